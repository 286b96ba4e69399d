// The CUDA kernels, as the rest of the extension sees them. Arguments have been checked by csrc/args.cpp, except for
// the lengths: those live on the device, and what they would put beyond the capacity is left out. Nothing here waits
// for the device or allocates, so a CUDA graph can capture every call; the grid follows from the capacity, and lengths are
// read by the kernels alone. Results are defined by hf_kvquant/reference.py.
#pragma once

#include "../format.h"

namespace hf_kvquant::cuda {

// How the work of one decode call is cut.
struct DecodePlan {
  int num_splits;            // parts of each sequence
  int rows_per_block;        // queries (heads of a group times tokens) that a thread block serves: 1, 4 or 8
  int64_t workspace_floats;  // results of the parts; 0 when there is one part
};

// Makes a device current for this library's CUDA runtime, which is not torch's, and returns torch's stream on it.
void* current_stream(int device_index);

// Throws std::invalid_argument for head dims and alignments without a kernel.
void check_support(const char* where, const Side& side);

DecodePlan plan_decode(const DecodeParams& params);

void append(const AppendParams& params, void* stream);
void decode(const DecodeParams& params, const DecodePlan& plan, float* workspace, void* stream);

}  // namespace hf_kvquant::cuda
