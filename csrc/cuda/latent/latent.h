// Attention over latents (MLA): what the plan and the kernels share.
#pragma once

#include "../cuda.h"

namespace hf_kvquant::cuda {

constexpr int kLatentGroup = 128;     // channels that share a scale at 4 bits
constexpr int kLatentTileTokens = 64;
constexpr int kLatentThreads = 128;   // of a thread block that attends: a warp for 16 tokens of a tile
constexpr int kLatentCombineThreads = 256;
constexpr int kRopeChannels = 64;     // of a rope part; fewer are followed by zeros

struct LatentPlan;

// An instantiation of the kernels for latents.
struct LatentKernel {
  void (*attend)(DecodeParams, LatentPlan, float* workspace);
  void (*combine)(DecodeParams, LatentPlan, float* workspace);
  int rows_per_tile;  // query rows that a thread block serves
  int shared_bytes;
};

// The kernel for latents of `rank` channels and `num_rows` query rows of a sequence, in as few tiles as possible, and
// these as small as possible; `attend` is nullptr if there is none.
template <Storage kLatent>
LatentKernel latent_kernel_for(int rank, int num_rows);

// How a call is cut: a thread block takes a share of a sequence's tokens for a tile of query rows, and a second kernel
// merges the parts.
struct LatentPlan {
  LatentKernel kernel;
  Rows rows;
  int num_row_tiles, num_splits;
  int warps_per_row;  // of `combine`
  Laps laps;
  int max_length;  // see max_length_of
  int64_t workspace_floats;
};

// The tokens of a sequence that a call reads as codes, and those that it reads from the tails.
struct LatentTokens {
  int start, length;
  int begin, end;   // of the codes that any query reads
  int dense_from;   // the first of the newest tokens that the first query reads from the tails
  int first_query;  // position of the first query token

#ifdef __CUDACC__
  __device__ LatentTokens(const DecodeParams& params, const LatentPlan& plan, int b)
      : start(params.starts == nullptr ? 0 : min(max(params.starts[b], 0), plan.max_length)),
        length(min(max(params.lengths[b], 0), plan.max_length)) {
    const Side& side = params.key_side;
    first_query = length - params.q_len;
    begin = start, end = length, dense_from = INT32_MAX;
    if (side.tail == nullptr) return;
    begin = start + params.sink_length;
    const int tail_from = plan.laps.tail_from(b, length);
    end = min(length, tail_begin(side, length, params.residual_length, tail_from));
    dense_from = window_begin(side, max(first_query + 1, 0), length, params.residual_length, tail_from);
  }

  // The same of query token `token`, whose window begins later.
  __device__ int window(const DecodeParams& params, int token) const {
    return max(first_query + token + 1 - params.residual_length, dense_from);
  }
  // One past the last of the codes that it reads.
  __device__ int end_of(const DecodeParams& params, int token) const {
    return min(min(end, window(params, token)), first_query + token + 1);
  }

  __device__ int first_tile() const { return begin / kLatentTileTokens; }
  __device__ int num_tiles() const {
    return end <= begin ? 0 : (end + kLatentTileTokens - 1) / kLatentTileTokens - first_tile();
  }
#endif
};

}  // namespace hf_kvquant::cuda
