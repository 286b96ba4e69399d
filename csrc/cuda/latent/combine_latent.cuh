// Merges the parts of attention over latents, rotates their sum back, attends to the tokens of dense windows, and
// writes the result. A row is one head of one query token; one to eight warps share it.
#pragma once

#include <type_traits>

#include "../attend/combine.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

constexpr int kLatentCombineWarps = kLatentCombineThreads / kLanes;

// The channels of a lane: four neighbours in each 128.
template <int kRank>
using LatentRow = float[kRank / 4 / kLanes][4];

// Multiplies a row by a Hadamard matrix, as `rotate`, but for the order of its steps.
template <int kRank>
__device__ __forceinline__ void rotate_row(LatentRow<kRank>& x, int lane) {
  constexpr int kQuads = kRank / 4 / kLanes;
  const auto butterfly = [](float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  };
  for_all<kQuads>([&](int q) {
    butterfly(x[q][0], x[q][1]), butterfly(x[q][2], x[q][3]);
    butterfly(x[q][0], x[q][2]), butterfly(x[q][1], x[q][3]);
  });
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.f : 1.f;
    for_all<kQuads, 4>(
        [&](int q, int e) { x[q][e] = fmaf(x[q][e], sign, __shfl_xor_sync(kAllLanes, x[q][e], distance)); });
  }
#pragma unroll
  for (int distance = 1; distance < kQuads; distance *= 2) {
    for_all<kQuads, 4>([&](int q, int e) {
      if ((q & distance) == 0) butterfly(x[q][e], x[q + distance][e]);
    });
  }
  const float factor = rsqrtf(static_cast<float>(kRank));
  for_all<kQuads, 4>([&](int q, int e) { x[q][e] *= factor; });
}

// A weighted sum of rows, relative to 2^largest.
template <int kRank>
struct LatentSum {
  float largest = -INFINITY, weight = 0.f;
  LatentRow<kRank> x = {};

  __device__ __forceinline__ void raise(float to) {
    const float before = largest;
    largest = fmaxf(before, to);
    const float kept = exp2_below(before, largest);
    weight *= kept;
    for_all<kRank / 4 / kLanes, 4>([&](int q, int e) { x[q][e] *= kept; });
  }
};

// A query row as the rows that it is multiplied by: channels of the latent, and two of the rope part, both scaled.
template <int kRank>
struct LatentQuery {
  LatentRow<kRank> x;
  float of_rope[2];
  bool has_rope;

  __device__ __forceinline__ LatentQuery(const DecodeParams& params, int64_t at, int lane) {
    constexpr int kQuads = kRank / 4 / kLanes;
    const uint16_t* const from = static_cast<const uint16_t*>(params.query.data) + at;
    uint32_t words[kQuads][2];
    has_rope = 2 * lane < params.value_side.head_dim;
    const uint16_t* const part = from + kRank + (has_rope ? 2 * lane : 0);
    const uint32_t pair = part[0] | static_cast<uint32_t>(part[1]) << 16;
    const auto load = [&](auto is_aligned) {
      for_all<kQuads>([&](int q) { load_words<is_aligned>(from + 128 * q + 4 * lane, words[q]); });
    };
    has_aligned_rows(params.query) ? load(std::true_type{}) : load(std::false_type{});
    const float scale = params.softmax_scale * kLog2E;
    for_all<kQuads>([&](int q) { floats_of(words[q], params.query.dtype, x[q]); });
    floats_of<2>({pair}, params.query.dtype, of_rope);
    for_all<kQuads, 4>([&](int q, int e) { x[q][e] *= scale; });
    for_all<2>([&](int e) { of_rope[e] *= scale; });
  }
};

// Neighbouring numbers of a dense token, as they lie in memory.
template <bool kIsWide, int kNumbers>
struct DenseNumbers {
  uint32_t words[kIsWide ? kNumbers : kNumbers / 2];

  // From the number at `index` on, a multiple of kNumbers in aligned rows.
  __device__ __forceinline__ void load(const void* data, int64_t index) {
    const auto* const from = static_cast<const uint32_t*>(data) + (kIsWide ? index : index / 2);
    if constexpr (sizeof(words) == 16) {
      const uint4 word = *reinterpret_cast<const uint4*>(from);
      words[0] = word.x, words[1] = word.y, words[2] = word.z, words[3] = word.w;
    } else if constexpr (sizeof(words) == 8) {
      const uint2 word = *reinterpret_cast<const uint2*>(from);
      words[0] = word.x, words[1] = word.y;
    } else {
      words[0] = *from;
    }
  }
  __device__ __forceinline__ float get(int i, Dtype dtype) const {
    if constexpr (kIsWide) return __uint_as_float(words[i]);
    return float_of(words[i / 2] >> (16 * (i % 2)) & 0xffffu, dtype);
  }
};

// The dense tokens that a query sees: the first ones, then the newest, and where their rows are.
struct DenseTokens {
  int start, newest;              // positions of the first token, and of the first of the newest
  int num_sinks, num, first_row;  // of the newest

  __device__ __forceinline__ DenseTokens(const DecodeParams& params, const LatentTokens& tokens, int token) {
    const Side& side = params.key_side;
    const int end = min(tokens.length, tokens.first_query + token + 1);
    start = tokens.start;
    num_sinks = side.tail == nullptr ? 0 : max(min(params.sink_length, end - tokens.start), 0);
    newest = side.tail == nullptr ? end : max(tokens.window(params, token), tokens.start + num_sinks);
    num = num_sinks + max(end - newest, 0);
    first_row = side.tail == nullptr || side.ring == 0 ? 0 : newest % side.ring;
  }
  __device__ __forceinline__ int position(int index) const {
    return index < num_sinks ? start + index : newest + index - num_sinks;
  }
  // The row of token `index` in a tail, as tail_row: the newest ones are fewer than the ring has rows.
  __device__ __forceinline__ int row(int index, const Side& side, int sink_length) const {
    const int row = first_row + index - num_sinks;
    return index < num_sinks ? index : sink_length + (row < side.ring ? row : row - side.ring);
  }
};

// Attends to every dense token from number `helper` on, num_helpers apart. Rope parts that are always dense are where
// codes would be, in 16 bits.
template <int kRank, bool kIsWide, bool kHasDenseRope>
__device__ __forceinline__ void attend_dense(const DecodeParams& params, const LatentPlan& plan, int b,
                                             const DenseTokens& tokens, const LatentQuery<kRank>& query, int helper,
                                             int num_helpers, int lane, LatentSum<kRank>& dense) {
  constexpr int kQuads = kRank / 4 / kLanes, kAtOnce = kIsWide ? 2 : 4;
  const Side &latent = params.key_side, &rope = params.value_side;
  const int64_t slot = plan.laps.tail_slot(b), of_latent = slot * latent.tail_stride_b + 4 * lane;
  const int channel = query.has_rope ? 2 * lane : 0;
  const Dtype rope_dtype = kHasDenseRope ? rope.dense_dtype : rope.tail_dtype;
#pragma unroll 1
  for (int i = helper; i < tokens.num; i += kAtOnce * num_helpers) {
    DenseNumbers<kIsWide, 4> value[kAtOnce][kQuads];
    DenseNumbers<kIsWide && !kHasDenseRope, 2> part[kAtOnce];
    for_all<kAtOnce>([&](int k) {
      const int index = min(i + k * num_helpers, tokens.num - 1);
      const int row = tokens.row(index, latent, params.sink_length);
      for_all<kQuads>([&](int q) { value[k][q].load(latent.tail, of_latent + row * latent.tail_stride_t + 128 * q); });
      if constexpr (kHasDenseRope) {
        const int position = tokens.position(index);
        part[k].load(rope.codes + plan.laps.slot(b, position) * rope.codes_stride_b,
                     int64_t{plan.laps.row(position)} * rope.head_dim + channel);
      } else {
        part[k].load(rope.tail, slot * rope.tail_stride_b + row * rope.tail_stride_t + channel);
      }
    });
    float score[kAtOnce];
    for_all<kAtOnce>([&](int k) {
      score[k] = 0.f;
      if (query.has_rope) {
        for_all<2>([&](int e) { score[k] = fmaf(query.of_rope[e], part[k].get(e, rope_dtype), score[k]); });
      }
      for_all<kQuads, 4>(
          [&](int q, int e) { score[k] = fmaf(query.x[q][e], value[k][q].get(e, latent.tail_dtype), score[k]); });
    });
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      for_all<kAtOnce>([&](int k) { score[k] += __shfl_xor_sync(kAllLanes, score[k], distance); });
    }
    for_all<kAtOnce>([&](int k) { score[k] = i + k * num_helpers < tokens.num ? score[k] : -INFINITY; });
    float most = score[0];
    for_all<kAtOnce>([&](int k) { most = fmaxf(most, score[k]); });
    dense.raise(most);
    for_all<kAtOnce>([&](int k) {
      if (i + k * num_helpers >= tokens.num) return;
      const float weight = exp2_below(score[k], dense.largest);
      dense.weight += weight;
      for_all<kQuads, 4>([&](int q, int e) {
        dense.x[q][e] = fmaf(weight, value[k][q].get(e, latent.tail_dtype), dense.x[q][e]);
      });
    });
  }
}

template <int kRank>
__global__ void __launch_bounds__(kLatentCombineThreads, 2)
    combine_latent(const __grid_constant__ DecodeParams params, const __grid_constant__ LatentPlan plan,
                   float* workspace) {
  constexpr int kQuads = kRank / 4 / kLanes;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int helper = warp & (plan.warps_per_row - 1), num_helpers = plan.warps_per_row;
  const unsigned all_rows = static_cast<unsigned>(params.batch) * plan.rows.num_rows;
  const unsigned number = (blockIdx.x * kLatentCombineWarps + warp) / num_helpers;
  const bool exists = number < all_rows;
  const unsigned b = exists ? number / plan.rows.num_rows : 0;
  const int row = exists ? static_cast<int>(number - b * plan.rows.num_rows) : 0;
  const LatentTokens tokens(params, plan, b);
  const int token = plan.rows.token(row), head = plan.rows.head(row, token);
  LatentSum<kRank> codes, dense;
  // Dense tokens need nothing of the kernel before, which began when what they come from was complete.
  if (exists) {
    const DenseTokens found(params, tokens, token);
    if (helper < found.num) {
      const int64_t at = b * params.query.stride_b + head * params.query.stride_h + token * params.query.stride_t;
      const LatentQuery<kRank> query(params, at, lane);
      const auto attend = [&](auto is_wide, auto has_dense_rope) {
        attend_dense<kRank, is_wide, has_dense_rope>(params, plan, static_cast<int>(b), found, query, helper,
                                                     num_helpers, lane, dense);
      };
      const auto with_rope = [&](auto is_wide) {
        const bool has_dense_rope = params.value_side.storage == Storage::none;
        has_dense_rope ? attend(is_wide, std::true_type{}) : attend(is_wide, std::false_type{});
      };
      params.key_side.tail_dtype == Dtype::fp32 ? with_rope(std::true_type{}) : with_rope(std::false_type{});
    }
  }
  wait_for_launch_before();
  start_launch_behind();
  if (exists) {
    const int all_tiles = tokens.num_tiles(), share = (all_tiles + plan.num_splits - 1) / plan.num_splits;
    const int num_parts = share == 0 ? 0 : (all_tiles + share - 1) / share, tile = row / plan.kernel.rows_per_tile;
    const int64_t slot_floats = int64_t{plan.kernel.rows_per_tile} * (kRank + 2);
    const float* const first = workspace + (int64_t{b} * plan.num_row_tiles + tile) * plan.num_splits * slot_floats;
    const int row_of_tile = row - tile * plan.kernel.rows_per_tile;
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int part = helper; part < num_parts; part += kAtOnce * num_helpers) {
      float4 loaded[kAtOnce][kQuads];
      float2 sums[kAtOnce];
      for_all<kAtOnce>([&](int i) {
        const float* const slot = first + min(part + i * num_helpers, num_parts - 1) * slot_floats;
        sums[i] = __ldcg(reinterpret_cast<const float2*>(slot + plan.kernel.rows_per_tile * kRank) + row_of_tile);
        if (part + i * num_helpers >= num_parts) sums[i] = {-INFINITY, 0.f};
        for_all<kQuads>([&](int q) {
          loaded[i][q] = __ldcg(reinterpret_cast<const float4*>(slot + row_of_tile * kRank + 128 * q) + lane);
        });
      });
      float most = sums[0].x;
      for_all<kAtOnce>([&](int i) { most = fmaxf(most, sums[i].x); });
      codes.raise(most);
      for_all<kAtOnce>([&](int i) {
        if (part + i * num_helpers >= num_parts) return;
        const float weight = exp2_below(sums[i].x, codes.largest);
        codes.weight = fmaf(sums[i].y, weight, codes.weight);
        for_all<kQuads>([&](int q) {
          codes.x[q][0] = fmaf(loaded[i][q].x, weight, codes.x[q][0]);
          codes.x[q][1] = fmaf(loaded[i][q].y, weight, codes.x[q][1]);
          codes.x[q][2] = fmaf(loaded[i][q].z, weight, codes.x[q][2]);
          codes.x[q][3] = fmaf(loaded[i][q].w, weight, codes.x[q][3]);
        });
      });
    }
    if (params.key_transform.is_rotated) rotate_row<kRank>(codes.x, lane);

    codes.raise(dense.largest);
    const float weight = exp2_below(dense.largest, codes.largest);
    codes.weight = fmaf(dense.weight, weight, codes.weight);
    for_all<kQuads, 4>([&](int q, int e) { codes.x[q][e] = fmaf(dense.x[q][e], weight, codes.x[q][e]); });
  }

  // --- the warps of a row
  extern __shared__ float4 of_warps[];  // of each warp: channels, then largest and weight
  constexpr int kStride = kRank / 4 + 1;
  float4* const own = of_warps + warp * kStride;
  if (num_helpers > 1) {
    if (helper > 0) {
      for_all<kQuads>([&](int q) {
        own[q * kLanes + lane] = {codes.x[q][0], codes.x[q][1], codes.x[q][2], codes.x[q][3]};
      });
      if (lane == 0) own[kRank / 4] = {codes.largest, codes.weight, 0.f, 0.f};
    }
    __syncthreads();
    if (helper > 0) return;
    for (int i = 1; i < num_helpers; ++i) {
      const float4* const theirs = own + i * kStride;
      const float4 sums = theirs[kRank / 4];
      codes.raise(sums.x);
      const float weight = exp2_below(sums.x, codes.largest);
      codes.weight = fmaf(sums.y, weight, codes.weight);
      for_all<kQuads>([&](int q) {
        const float4 x = theirs[q * kLanes + lane];
        codes.x[q][0] = fmaf(x.x, weight, codes.x[q][0]);
        codes.x[q][1] = fmaf(x.y, weight, codes.x[q][1]);
        codes.x[q][2] = fmaf(x.z, weight, codes.x[q][2]);
        codes.x[q][3] = fmaf(x.w, weight, codes.x[q][3]);
      });
    }
  }
  if (!exists) return;
  // Tokens are missing, and the host may not know. NaN, since a result without them would look like any other.
  if (params.lengths[b] > plan.max_length) codes.weight = NAN;
  const float factor = codes.weight == 0.f ? 0.f : 1.f / codes.weight;
  const int64_t at = ((int64_t{b} * params.q_len + token) * params.num_q_heads + head) * kRank;
  for_all<kQuads>([&](int q) {
    const auto x = [&](int e) { return codes.x[q][e] * factor; };
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + at + 128 * q + 4 * lane) = {
        narrow(params.query.dtype, x(0), x(1)), narrow(params.query.dtype, x(2), x(3))};
  });
  if (lane == 0) {
    constexpr float kLn2 = 0.6931471805599453f;
    params.lse[(int64_t{b} * params.num_q_heads + head) * params.q_len + token] =
        codes.weight == 0.f ? -INFINITY : (codes.largest + log2f(codes.weight)) * kLn2;
  }
}

}  // namespace hf_kvquant::cuda
