// The interface of the CUDA kernels. csrc/args.cpp has checked all arguments except the lengths, which are on the
// device: kernels skip tokens beyond the capacity (of a ring: beyond kMaxRingLength), and attention of that sequence
// returns NaN. Nothing here waits for the device or allocates, so a CUDA graph can capture every call. The grid depends
// on shapes and the GPU only; lengths are read by the kernels alone. hf_kvquant/spec/reference.py defines the results.
#pragma once

#include <cstddef>
#include <string>

#include "../format.h"
#include "common/laps.h"

namespace hf_kvquant::cuda {

// What shares a scale: all channels of a token, a group of them, or a channel of the keys in a block of tokens.
enum class Scales { rows, groups, blocks };

struct NewTokens;
struct DecodePlan;

// An instantiation of the attention kernel (attend.cuh), with what the host needs to know about it.
struct AttendKernel {
  void (*function)(DecodeParams, NewTokens, DecodePlan, float* workspace);
  int fixed_bytes, stage_bytes;  // of shared memory: per thread block, and per warp and stage
  int num_stages, min_stages;    // of a warp's pipeline: usual number, and fewest if shared memory is short
  int head_dim;                  // the largest it serves
  int rows_per_tile;             // query rows (tokens times heads of a group) that a thread block serves
  int step_tokens;               // tokens that a warp takes at a time
  int min_warps;                 // of a thread block: 2, or kFewAttendWarps if it has no code for fewer
  int slot_floats;               // of a thread block's partial result
  Storage key;                   // of the keys
  Scales scales;
  bool is_paged;
  bool has_key_zero, has_value_zero;
  bool has_pairs;  // a warp takes a new key and its value side by side; this needs are_pairs in choose.cpp
  int num_threads;  // of a thread block of a chunk kernel; 0: the plan chooses
  // Merges the parts of a chunk kernel, `combine_ctas` thread blocks for a unit; nullptr: the kernel does that itself.
  void (*combine)(DecodeParams, NewTokens, DecodePlan, float* workspace);
  int combine_threads, combine_ctas;
  // Of a chunk kernel: fills the tiles that have tokens without codes, one by each thread block.
  void (*fill_dense)(DecodeParams, NewTokens, DecodePlan, float* workspace);
  int fill_dense_threads, filled_tile_bytes;  // of a tile in the workspace, with its notes
  // Of a chunk kernel that reads its tiles from the scratch: fills the other tiles; nullptr: the kernel does that.
  void (*fill_scratch)(DecodeParams, NewTokens, DecodePlan, float* workspace);
  int fill_scratch_threads, fill_scratch_bytes;  // the latter of shared memory
};

// Warps of a thread block of the attention kernel. Those of the smallest are the kernel's own: Shape::kMinWarps.
constexpr int kFewAttendWarps = 4, kMaxAttendWarps = 8;
constexpr int kTailTileTokens = 16;  // tokens of dense windows that a warp takes at a time
constexpr int kGroupChannels = 32;   // channels of a group in the kernels for groups

// The kernel with the smallest head dim (64, 128 or 256) that holds `head_dim` and the fewest rows (4, 8 or 16, as far
// as compiled) that hold `num_rows`, or else the most rows. Kernels for pages are kernels of their own, so that others
// need no page table. They also take split plans. Without a page table, the rows of sequence b are page b.
template <Storage kKey, Storage kValue, bool kHasKeyZero, bool kHasValueZero, Scales kScales>
AttendKernel kernel_for(int head_dim, int num_rows, bool is_paged);

// Kernels for more query rows, which serve all formats with codes. `few_rows`: at most 64, without softcap and ALiBi.
// `streamed`: tiles come from the scratch, see sm90/chunk/scratch.cuh; rows without codes are served too.
enum class ChunkKind { few_rows, many_rows, streamed };

// `changes_scores`: by softcap or ALiBi.
AttendKernel chunk_kernel_for(int head_dim, bool changes_scores, ChunkKind kind);

// Divides by a number that is known only at run time. A division costs some thirty instructions, so the host computes a
// reciprocal.
struct Divisor {
  unsigned value;
  unsigned reciprocal;  // ⌈2³¹ / value⌉, exact while x · value < 2³¹

#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int x) const { return __umulhi(2u * x, reciprocal); }
  __device__ __forceinline__ int rest(int x) const { return x - quotient(x) * static_cast<int>(value); }
#endif
};

inline Divisor divisor(int64_t value) {
  const auto small = static_cast<unsigned>(value);
  return {small, static_cast<unsigned>((0x7fffffffull + small) / small)};
}

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

// New keys and values for the attention kernel: to quantise, into the sides of DecodeParams, or of a chunk.
struct NewTokens {
  Dense key, value;
  int q_len;
};

// Where the heads of a plane begin. Strides are in multiples of 16 bytes, so 32 bits are enough and a product with them
// is one instruction.
struct Origin {
  const void* data;
  uint32_t stride_b, stride_h;

#ifdef __CUDACC__
  __device__ __forceinline__ const uint4* at(int b, int h, unsigned further) const {
    return static_cast<const uint4*>(data) + (uint64_t{stride_b} * b + (uint64_t{stride_h} * h + further));
  }
#endif
};

constexpr int kMaxPages = 1 << 28;  // 16 times as many fit 32 bits: see Pipeline::in_page

// How a warp copies rows of codes that are not dense (see DecodePlan): in chunks of 16, 8 or 4 bytes, one per lane.
struct RowChunks {
  int bytes;
  int num_chunks;  // in a step
  Divisor per_row;
};
constexpr int kChunkPlaceBytes = 8;  // of a chunk's entry in the list that Pipeline::list_chunks makes

// A plane of scales or zeros, as the attention kernel copies it: eight consecutive tokens at a time.
struct PlaneOfScales {
  Origin heads;              // `data` nullptr: nothing to copy
  uint32_t stride_g;         // in multiples of 16 bytes; in granularity channel from block to block
  Divisor groups_per_group;  // the kernel's groups, of 32 channels each, in one group of the cache
  int last_group;            // of the cache
};

// How many tiles of a side and head have tokens that are no codes, at most: of the first tokens, and of the newest.
struct DensePlan {
  int most_first, most_newest;

#ifdef __CUDACC__
  __host__ __device__
#endif
  int count() const { return most_first + most_newest; }
};

// How the work of one decode call is cut into thread blocks, and which kernel does it.
struct DecodePlan {
  AttendKernel kernel;  // `function` is nullptr where the general kernel serves (decode_general.cu)
  int num_stages;       // of a warp's pipeline
  int warps_log2;
  int shared_bytes;
  bool may_overlap;  // may start before the previous launch ends; the kernel waits for that itself
  Rows rows;
  int rows_per_tile;  // also for the general kernel
  int num_row_tiles;
  Divisor num_splits;  // thread blocks that share a result, if there is no split plan
  int ctas_of_head;    // row tiles x splits; the grid is this x heads x sequences, or entries of the split plan
  const int32_t* split_plan;  // see DecodeParams; nullptr: not used
  int num_planned;            // its entries
  int num_slots;              // of these, shares of sequences that are cut, at most
  bool mixes_shares;          // of the first `batch` entries, the last ones come between the first ones
  bool is_dense;       // rows of codes are as wide as the kernel's and have no gaps between them
  bool has_gaps;       // copies do not write all of a stage, see Pipeline::fill_gaps
  bool appends;        // the attention kernel quantises the new tokens too
  Laps laps;
  int max_length;      // see max_length_of
  bool has_dense_tokens;  // of windows, which the kernel attends to after the codes
  int plain_query_at;     // in shared memory: the untransformed query, for those and for the tails of blocks
  Origin key_codes, value_codes;
  RowChunks key_chunks, value_chunks;
  PlaneOfScales scales[4];  // in the order in which the kernel copies them; it may have fewer
  uint32_t query_stride_b, query_stride_h, query_stride_t;  // in elements
  int64_t num_counters;                                     // counters that must be zero; 0 when nothing is combined
  // Of a chunk kernel: tiles of keys and of values with tokens that are no codes, and the part of the workspace for
  // tiles that are filled beforehand, which comes first.
  DensePlan dense[2];
  int64_t tile_floats;
  // With a scratch: its tiles of a side, sequence and head; sequences and heads of a slice; and the first of the slice
  // that is launched. Else there is one slice.
  int scratch_tiles;
  int slice_batch, slice_heads;
  int first_b, first_h;
  int64_t workspace_floats;  // also of partial results; 0 when there are none of both
};

// Writes the plan of a batch, `batch` + `most_slots` entries. `starts` nullptr: no padding. hf_kvquant/ops/planning.py
// defines it.
void split_plan(const int32_t* lengths, const int32_t* starts, int batch, int num_slots, int most_slots, int min_tokens,
                int tokens_between, int32_t* plan, void* stream);

// Makes a device current for the extension's own CUDA runtime, which is not torch's, and returns torch's stream on it.
void* current_stream(int device_index);

// Throws std::invalid_argument for head dims and alignments without a kernel.
void check_support(const char* where, const Side& side, int max_head_dim);

// The plan of a chunk, whose tokens must be `new_tokens`. Where no kernel serves, its `kernel.function` is nullptr and
// `why_not` says why, if it is wanted.
DecodePlan plan_chunk(const DecodeParams& params, const AppendParams& new_tokens, std::string* why_not = nullptr);

// `new_tokens` are appended first; nullptr: none.
DecodePlan plan_decode(const DecodeParams& params, const AppendParams* new_tokens);

// Why plan_decode chooses the general kernel; empty: it chooses another. See csrc/requirements.h.
std::string why_general_here(const DecodeParams& params, const AppendParams* new_tokens);

void append(const AppendParams& params, void* stream);

// Appends, unless they are a chunk, and attends as planned. `params.counters` must be plan.num_counters zeros; they are
// zeros again afterwards.
void decode(const DecodeParams& params, const AppendParams* new_tokens, const DecodePlan& plan, float* workspace,
            void* stream);

// Attention over latents: see latent/latent.h. `plan_latent` throws std::invalid_argument where no kernel serves.
struct LatentPlan;
LatentPlan plan_latent(const DecodeParams& params);
void attend_latent(const DecodeParams& params, const LatentPlan& plan, float* workspace, void* stream);

void dequantize(const DequantizeParams& params, void* stream);

// The kernel for all calls that no other kernel serves: float32 queries, mixtures of formats.
void decode_general(const DecodeParams& params, const DecodePlan& plan, float* workspace, void* stream);

}  // namespace hf_kvquant::cuda
