// The interface of the CPU kernels. csrc/args.cpp has checked all arguments, so nothing here reads or writes out of
// bounds. hf_kvquant/spec/reference.py defines the results. The best instruction set that the processor supports is
// chosen once; tests can choose a lower one by name.
#pragma once

#include "../format.h"

namespace hf_kvquant::cpu {

// Quantises new keys and values into their planes.
void append(const AppendParams& params);

// Attends to everything stored. The caller has appended new tokens.
void decode(const DecodeParams& params);

// The instruction set in use: "portable", "avx2" or "avx512".
const char* capability();

// Chooses an instruction set by name, or the best one for nullptr. Returns false and changes nothing if the name is
// unknown or the processor does not support it.
bool set_capability(const char* name);

}  // namespace hf_kvquant::cpu
