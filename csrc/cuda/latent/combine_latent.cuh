// Merges the parts of attention over latents, rotates their sum back, attends to the tokens of dense windows, and
// writes the result. A row is one head of one query token; one to eight warps share it.
#pragma once

#include "../attend/combine.cuh"
#include "latent.h"

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

// Four numbers of a dtype at a multiple of 8 bytes, or 16.
__device__ __forceinline__ void load_four(const void* data, Dtype dtype, int64_t first, float (&x)[4]) {
  if (dtype == Dtype::fp32) {
    const float4 word = *reinterpret_cast<const float4*>(static_cast<const float*>(data) + first);
    x[0] = word.x, x[1] = word.y, x[2] = word.z, x[3] = word.w;
    return;
  }
  const uint2 word = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + first);
  const uint32_t pairs[2] = {word.x, word.y};
  for_all<4>([&](int i) {
    const uint32_t bits = pairs[i / 2] >> (16 * (i % 2)) & 0xffffu;
    x[i] = dtype == Dtype::fp16 ? half_to_float(static_cast<half_bits>(bits)) : __uint_as_float(bits << 16);
  });
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
  wait_for_launch_before();
  start_launch_behind();

  const LatentTokens tokens(params, plan, b);
  const int token = plan.rows.token(row), head = plan.rows.head(row, token);
  LatentSum<kRank> codes, dense;
  if (exists) {
    // --- the parts
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

    // --- dense tokens: the first ones, then the newest
    const Side &latent = params.key_side, &rope = params.value_side;
    const int end = min(tokens.length, tokens.first_query + token + 1);  // of what this query sees
    const int num_sinks = latent.tail == nullptr ? 0 : max(min(params.sink_length, end - tokens.start), 0);
    const int newest = latent.tail == nullptr ? end : max(tokens.end, tokens.start + num_sinks);
    const int num_dense = num_sinks + max(end - newest, 0);
    if (helper < num_dense) {
      LatentRow<kRank> query;
      const int64_t at = b * params.query.stride_b + head * params.query.stride_h + token * params.query.stride_t;
      const float scale = params.softmax_scale * kLog2E;
      const bool is_aligned = at % 4 == 0 && reinterpret_cast<int64_t>(params.query.data) % 8 == 0;
      for_all<kQuads>([&](int q) {
        if (is_aligned) return load_four(params.query.data, params.query.dtype, at + 128 * q + 4 * lane, query[q]);
        for_all<4>([&](int e) {
          query[q][e] = load_value(params.query.data, params.query.dtype, at + 128 * q + 4 * lane + e);
        });
      });
      for_all<kQuads, 4>([&](int q, int e) { query[q][e] *= scale; });
      float of_rope[2] = {};
      const bool has_rope = 2 * lane < rope.head_dim;
      if (has_rope) {
        for_all<2>([&](int i) {
          of_rope[i] = scale * load_value(params.query.data, params.query.dtype, at + kRank + 2 * lane + i);
        });
      }
      const int64_t slot = plan.laps.tail_slot(static_cast<int>(b));
      constexpr int kAtOnce = 2;
#pragma unroll 1
      for (int i = helper; i < num_dense; i += kAtOnce * num_helpers) {
        LatentRow<kRank> value[kAtOnce];
        float score[kAtOnce];
        for_all<kAtOnce>([&](int k) {
          const int index = min(i + k * num_helpers, num_dense - 1);
          const int position = index < num_sinks ? tokens.start + index : newest + index - num_sinks;
          const int64_t of_latent = slot * latent.tail_stride_b +
                                    tail_row(latent, position, tokens.start, params.sink_length) * latent.tail_stride_t;
          const int64_t part = slot * rope.tail_stride_b +
                               tail_row(rope, position, tokens.start, params.sink_length) * rope.tail_stride_t;
          for_all<kQuads>(
              [&](int q) { load_four(latent.tail, latent.tail_dtype, of_latent + 128 * q + 4 * lane, value[k][q]); });
          score[k] = 0.f;
          if (has_rope) {
            for_all<2>([&](int e) {
              score[k] = fmaf(of_rope[e], load_value(rope.tail, rope.tail_dtype, part + 2 * lane + e), score[k]);
            });
          }
        });
        for_all<kAtOnce>([&](int k) {
          for_all<kQuads, 4>([&](int q, int e) { score[k] = fmaf(query[q][e], value[k][q][e], score[k]); });
#pragma unroll
          for (int distance = 1; distance < kLanes; distance *= 2) {
            score[k] += __shfl_xor_sync(kAllLanes, score[k], distance);
          }
          if (i + k * num_helpers >= num_dense) score[k] = -INFINITY;
        });
        float most = score[0];
        for_all<kAtOnce>([&](int k) { most = fmaxf(most, score[k]); });
        dense.raise(most);
        for_all<kAtOnce>([&](int k) {
          if (i + k * num_helpers >= num_dense) return;
          const float weight = exp2_below(score[k], dense.largest);
          dense.weight += weight;
          for_all<kQuads, 4>([&](int q, int e) { dense.x[q][e] = fmaf(weight, value[k][q][e], dense.x[q][e]); });
        });
      }
    }
    const auto add = [&](const LatentSum<kRank>& other) {
      codes.raise(other.largest);
      const float weight = exp2_below(other.largest, codes.largest);
      codes.weight = fmaf(other.weight, weight, codes.weight);
      for_all<kQuads, 4>([&](int q, int e) { codes.x[q][e] = fmaf(other.x[q][e], weight, codes.x[q][e]); });
    };
    add(dense);
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
