// The CPU kernels, as the rest of the extension sees them. Arguments have been checked by csrc/args.cpp before these
// are called, so nothing here reads or writes out of bounds; results are defined by hf_kvquant/reference.py. Which
// instruction set runs is chosen once, from what the processor offers, and can be lowered by name for tests.
#pragma once

#include "../format.h"

namespace hf_kvquant::cpu {

// Quantises new keys and values into their planes.
void append(const AppendParams& params);

// Attends to everything stored. New tokens have been appended by the caller.
void decode(const DecodeParams& params);

// The instruction set in use: "portable", "avx2" or "avx512".
const char* capability();

// Chooses an instruction set by name, nullptr the best one; false, and no change, when unknown or not available here.
bool set_capability(const char* name);

}  // namespace hf_kvquant::cpu
