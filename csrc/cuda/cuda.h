// The CUDA kernels, as the rest of the extension sees them. Arguments have been checked by csrc/args.cpp, except for
// the lengths: those live on the device, and what they would put beyond the capacity is left out. Nothing here waits
// for the device or allocates, so a CUDA graph can capture every call; the grid follows from shapes and the GPU, and
// lengths are read by the kernels alone. Results are defined by hf_kvquant/reference.py.
#pragma once

#include <cstddef>

#include "../format.h"

namespace hf_kvquant::cuda {

// An instantiation of the attention kernel (attend.cuh), with what the host has to know of it.
struct AttendKernel {
  const void* function;
  int fixed_bytes, bytes_per_stage;  // of shared memory
  int num_stages, min_stages;        // of the rings, the latter where shared memory is short
  int rows_per_tile;                 // query rows (tokens times heads of a group) that a thread block serves
  int step_tokens;                   // tokens that a warp takes at a time
  int slot_floats;                   // of one block's partial result
  bool has_key_zero, has_value_zero;
};

constexpr int kAttendThreads = 128;

// The kernels for a pair of storage types: of the smallest head dim (64, 128 or 256) that holds `head_dim`, and of the
// fewest rows that hold `num_rows`, or else the most there are.
AttendKernel attend_int8(int head_dim, int num_rows);
AttendKernel attend_int4(int head_dim, int num_rows);
AttendKernel attend_int4_groups(int head_dim, int num_rows);  // of 32 channels or multiples
AttendKernel attend_k8v4(int head_dim, int num_rows);
AttendKernel attend_fp8(int head_dim, int num_rows);

// Divides by a number that is known only at run time: a division costs some thirty instructions, so the host prepares
// it.
struct Divisor {
  unsigned value;
  unsigned reciprocal;  // ⌈2³² / value⌉, exact while x · value < 2³²; 0 for 1, whose does not fit

#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int x) const { return reciprocal == 0 ? x : __umulhi(x, reciprocal); }
  __device__ __forceinline__ int rest(int x) const { return x - quotient(x) * static_cast<int>(value); }
#endif
};

// The query rows of a key-value head: row r is query token r / num_q_per_kv, head r % num_q_per_kv of the group.
struct Rows {
  Divisor num_q_per_kv;
  int num_rows;

#ifdef __CUDACC__
  __device__ __forceinline__ int token(int row) const { return num_q_per_kv.quotient(row); }
  __device__ __forceinline__ int head(int row) const { return num_q_per_kv.rest(row); }
#endif
};

// New keys and values for the attention kernel to quantise; the sides that they go to are those of DecodeParams.
struct NewTokens {
  Dense key, value;
  int q_len;
};

// How the work of one decode call is cut and who does it.
struct DecodePlan {
  AttendKernel kernel;  // `function` is nullptr where the general kernel serves (decode_general.cu)
  int num_stages;       // of the rings
  int shared_bytes;
  Rows rows;
  int rows_per_tile;  // also for the general kernel
  Divisor num_row_tiles, num_kv_heads;
  Divisor num_splits;        // parts of each sequence
  int num_blocks;            // sequences x heads x row tiles x splits
  bool appends;              // the attention kernel quantises the new tokens too
  int64_t num_counters;      // zeros needed at the place where parts meet; 0 when nothing is combined
  int64_t workspace_floats;  // partial results; 0 when there are none
};

// Makes a device current for this library's CUDA runtime, which is not torch's, and returns torch's stream on it.
void* current_stream(int device_index);

// Throws std::invalid_argument for head dims and alignments without a kernel.
void check_support(const char* where, const Side& side);

// `new_tokens` are those to append first; nullptr: none.
DecodePlan plan_decode(const DecodeParams& params, const AppendParams* new_tokens);

void append(const AppendParams& params, void* stream);

// Appends and attends as planned. `params.counters` are plan.num_counters zeros, and zeros again afterwards.
void decode(const DecodeParams& params, const AppendParams* new_tokens, const DecodePlan& plan, float* workspace,
            void* stream);

// The kernel for what no other serves: float32 queries, storage type `none`, mixtures of formats.
void decode_general(const DecodeParams& params, const DecodePlan& plan, float* workspace, void* stream);

}  // namespace hf_kvquant::cuda
