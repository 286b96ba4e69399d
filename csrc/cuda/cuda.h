// The CUDA kernels, as the rest of the extension sees them. Arguments have been checked by csrc/args.cpp, except for
// the lengths: those live on the device, and what they would put beyond the capacity (of a ring: beyond kMaxRingLength)
// is left out, whereupon attention of the sequence is NaN. Nothing here waits for the device or allocates, so a CUDA
// graph can capture every call; the grid follows from shapes and the GPU, and lengths are read by the kernels alone.
// Results are defined by hf_kvquant/reference.py.
#pragma once

#include <cstddef>

#include "../format.h"
#include "laps.h"

namespace hf_kvquant::cuda {

// An instantiation of the attention kernel (attend.cuh), with what the host has to know of it.
struct AttendKernel {
  const void* function;
  int fixed_bytes, stage_bytes;  // of shared memory; the latter a warp's
  int num_stages, min_stages;    // of the rings, the latter where shared memory is short
  int head_dim;                  // the largest it serves
  int rows_per_tile;             // query rows (tokens times heads of a group) that a thread block serves
  int step_tokens;               // tokens that a warp takes at a time
  int slot_floats;               // of one block's partial result
  bool has_key_zero, has_value_zero, is_grouped, is_blocked;
  bool has_pairs;  // it takes a new key and its value side by side in a warp, or none
};

// What shares a scale: channels of a token (all of them, or groups), or the keys of a channel in a block of tokens.
enum class Scales { rows, groups, blocks };

// Warps of its blocks: 4 or 8, by the plan.
constexpr int kMinAttendWarps = 4, kMaxAttendWarps = 8;
constexpr int kTailTileTokens = 16;  // tokens of dense windows that a warp takes at a time
constexpr int kGroupChannels = 32;   // that have a scale of their own in the kernels for groups

// The kernels for a pair of storage types: of the smallest head dim (64, 128 or 256) that holds `head_dim`, and of the
// fewest rows that hold `num_rows`, or else the most there are.
AttendKernel attend_int8(int head_dim, int num_rows);
AttendKernel attend_int4(int head_dim, int num_rows);
AttendKernel attend_int4_groups(int head_dim, int num_rows);  // of 32 channels or multiples
AttendKernel attend_int4_channel(int head_dim, int num_rows);
AttendKernel attend_k8v4(int head_dim, int num_rows);
AttendKernel attend_fp8(int head_dim, int num_rows);

// Divides by a number that is known only at run time: a division costs some thirty instructions, so the host prepares
// it.
struct Divisor {
  unsigned value;
  unsigned reciprocal;  // ⌈2³¹ / value⌉, exact while x · value < 2³¹

#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int x) const { return __umulhi(2u * x, reciprocal); }
  __device__ __forceinline__ int rest(int x) const { return x - quotient(x) * static_cast<int>(value); }
#endif
};

// The query rows of a key-value head: row r is query token r / num_q_per_kv, head r % num_q_per_kv of the group.
struct Rows {
  Divisor num_q_per_kv;
  int num_rows;

#ifdef __CUDACC__
  __device__ __forceinline__ int token(int row) const { return num_q_per_kv.quotient(row); }
  __device__ __forceinline__ int head(int row, int token) const {
    return row - token * static_cast<int>(num_q_per_kv.value);
  }
#endif
};

// New keys and values for the attention kernel to quantise; the sides that they go to are those of DecodeParams.
struct NewTokens {
  Dense key, value;
  int q_len;
};

// Where heads of something begin: in multiples of 16 bytes, so that 32 bits are enough and a product with them is one
// instruction.
struct Origin {
  const void* data;
  uint32_t stride_b, stride_h;

#ifdef __CUDACC__
  __device__ __forceinline__ const uint4* at(int b, int h, unsigned further) const {
    return static_cast<const uint4*>(data) + (uint64_t{stride_b} * b + (uint64_t{stride_h} * h + further));
  }
#endif
};

// How a warp copies rows of codes that are not as the kernel's: in chunks of 16, 8 or 4 bytes, a lane each.
struct RowChunks {
  int bytes;
  int num_chunks;  // of a step
  Divisor per_row;
};
constexpr int kChunkPlaceBytes = 8;  // what a block remembers of each, see Ring::list_chunks

// Scales or zeros, as the attention kernel copies them: eight consecutive tokens at a time.
struct PlaneOfScales {
  Origin heads;              // `data` nullptr: nothing to copy
  uint32_t stride_g;         // in multiples of 16 bytes; of keys in blocks, from block to block
  Divisor groups_per_group;  // of the kernel, which has 32 channels in each, in one of the cache
  int last_group;            // of the cache
};

// How the work of one decode call is cut and who does it.
struct DecodePlan {
  AttendKernel kernel;  // `function` is nullptr where the general kernel serves (decode_general.cu)
  int num_stages;       // of the rings
  int warps_log2;
  int shared_bytes;
  bool may_overlap;  // the launch before, for whose end the kernel waits itself
  Rows rows;
  int rows_per_tile;  // also for the general kernel
  int num_row_tiles;
  Divisor num_splits;  // thread blocks that share a result
  int blocks_of_head;  // row tiles x splits; the grid is these x heads x sequences
  bool is_dense;       // rows of codes are as wide as the kernel's, and without gaps
  bool has_gaps;       // copies leave some of a stage as it is, see ring.cuh
  bool appends;        // the attention kernel quantises the new tokens too
  Laps laps;
  int max_length;      // see max_length_of
  int plain_query_at;  // in shared memory: the query as it came, for dense windows; 0 where there are none
  Origin key_codes, value_codes;
  RowChunks key_chunks, value_chunks;
  PlaneOfScales scales[4];  // in the order in which the kernel copies them, which may be fewer
  uint32_t query_stride_b, query_stride_h, query_stride_t;  // in elements
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

// Whether a kernel may start while the launch before is ending, which it then has to wait for itself.
bool may_overlap(const void* function);

// The kernel for what no other serves: float32 queries, storage type `none`, mixtures of formats.
void decode_general(const DecodeParams& params, const DecodePlan& plan, float* workspace, void* stream);

}  // namespace hf_kvquant::cuda
