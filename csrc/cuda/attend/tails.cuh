// Attends to the tokens of dense windows, which are kept unquantised in the tail of a side. The warps of the attention
// kernel do so after the codes, with `attend_to_dense_tokens`.
//
// A warp takes 16 tokens at a time: tensor cores multiply keys by the untransformed query, weights stay float32. There
// are few such tokens, and the time goes into waiting for memory and for instructions that are in no cache. So
// everything is loaded at once, and there is little code. Windows of 32 tokens add 13 us to 135 at 64 x 8k, and 5 to 9
// at 1 x 8k (H200, int4, 2026-11). As separate thread blocks they added 24 and 2.5: those that wait keep others from
// reading. With eight tokens at a time, twice as many warps take part: 4 + 28 tokens added 4 us instead of 6 at 1 x 128k
// and 2 instead of 4 at 1 x 2k. But 4 + 32 at 64 x 8k, where four warps then take two rounds, added 18 instead of 14. So
// eight would have to be for what fits one round.
#pragma once

#include "schedule.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

// The dense tokens of a sequence, numbered in this order: first tokens that have left the window of the newest ones,
// then that window, padding included.
struct DenseTokens {
  int num_first, start, newest;  // the last two: the first token, and the first one of the window
  int count;

  __device__ __forceinline__ DenseTokens(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds)
      : start(max(bounds.start, 0)) {
    newest = bounds.newest(plan, params.residual_length);
    num_first = max(min(start + params.sink_length, newest) - start, 0);
    count = num_first + bounds.num_tokens(plan) - newest;
  }

  // -1 beyond the last.
  __device__ __forceinline__ int token(int number) const {
    if (number >= count) return -1;
    return number < num_first ? start + number : newest + (number - num_first);
  }
};

// The first of a warp's tiles of dense tokens. Tiles are assigned to the warps of all parts in turn.
__device__ __forceinline__ int first_tile(const DecodePlan& plan, const Segment& segment, int warp) {
  return (segment.part << plan.warps_log2) + warp;
}

// Prefetches the rows of a warp's first tile. Takes no segment: one that a function refers to is kept in memory.
static __device__ __noinline__ void expect_dense_tokens(const DecodeParams& params, const DecodePlan& plan,
                                                        const Bounds& bounds, int tail_slot, int head, int tile,
                                                        int lane) {
  constexpr int kLineBytes = 128;
  const DenseTokens tokens(params, plan, bounds);
  const int token = tokens.token(tile * kTailTileTokens + lane % kTailTileTokens);
  if (token < 0) return;
  const Side& side = lane < kTailTileTokens ? params.key_side : params.value_side;
  const int64_t row = tail_slot * side.tail_stride_b + head * side.tail_stride_h +
                      tail_row(side, token, tokens.start, params.sink_length) * side.tail_stride_t;
  for (int byte = 0; byte < 2 * side.head_dim; byte += kLineBytes) {
    prefetch(static_cast<const char*>(side.tail) + 2 * row + byte);
  }
}

// The rows of a side that a warp takes: each lane of a half of the warp knows the place of one token.
struct DenseRows {
  const uint16_t* row;  // of this lane's token: in the new keys or values if it is new, else in the tail
  uint16_t* target;     // of a new token, in the tail

  __device__ DenseRows(const Side& side, const Dense& dense, const Segment& segment, int tail_slot, int token,
                       int start, int dense_first, int first_new) {
    target = static_cast<uint16_t*>(side.tail) + (tail_slot * side.tail_stride_b + segment.h * side.tail_stride_h +
                                                  tail_row(side, token, start, dense_first) * side.tail_stride_t);
    row = target;
    if (token >= first_new) {
      row = static_cast<const uint16_t*>(dense.data) + segment.b * dense.stride_b + segment.h * dense.stride_h +
            (token - first_new) * dense.stride_t;
    }
  }

  // For the token of another lane. All lanes call this together.
  __device__ __forceinline__ const uint16_t* row_of(int lane) const { return from_lane(row, lane); }
  __device__ __forceinline__ uint16_t* target_of(int lane) const { return from_lane(target, lane); }

 private:
  template <class Pointer>
  static __device__ __forceinline__ Pointer from_lane(Pointer pointer, int lane) {
    return reinterpret_cast<Pointer>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
  }
};

// Adds 16 dense tokens, from number `first` on, to a warp's partial result of a unit: the output of every row, and its
// maximum and sum, in log2 units and without the constants of rows, as for codes. `queries` are untransformed,
// [kRows][kHeadDim] of 16 bits. Writes new tokens among these to the tails, if the plan appends.
template <class Shape>
__device__ __forceinline__ void attend_to_tile(const DecodeParams& params, const NewTokens& new_tokens,
                                               const DecodePlan& plan, const Segment& segment, const Bounds& bounds,
                                               const DenseTokens& tokens, int first, const unsigned char* queries,
                                               const float* constants, float* outputs, float2* sums, int lane) {
  constexpr int kHeadDim = Shape::kHeadDim, kChunks = kHeadDim / 32, kPerLane = kHeadDim / kLanes;
  constexpr int kColumnTiles = Shape::kColumnTiles, kRows = Shape::kRows;
  const int g = lane >> 2, t = lane & 3;
  const Side &keys = params.key_side, &values = params.value_side;
  const int first_position = bounds.num_tokens(plan) - params.q_len;
  const int first_new = plan.appends ? bounds.length - new_tokens.q_len : INT32_MAX;

  // --- load keys, in the lanes that multiply them, and values, a lane's channels of all tokens
  const int own = tokens.token(first + lane % kTailTileTokens), exists = max(own, 0);
  const int slot = tail_slot<Shape::kIsPaged>(plan, segment.b), start = tokens.start, sinks = params.sink_length;
  const DenseRows key_rows(keys, new_tokens.key, segment, slot, exists, start, sinks, first_new);
  const DenseRows value_rows(values, new_tokens.value, segment, slot, exists, start, sinks, first_new);
  uint4 key[2][kChunks];
  int token[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint16_t* row = key_rows.row_of(g + 8 * h);
    token[h] = __shfl_sync(kAllLanes, own, g + 8 * h);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int c = 32 * j + 8 * t;
      key[h][j] = {0, 0, 0, 0};
      if (token[h] >= 0 && c < keys.head_dim) key[h][j] = *reinterpret_cast<const uint4*>(row + c);
    }
  }
  const bool has_value = lane * kPerLane < values.head_dim;
  uint32_t value[kTailTileTokens][kPerLane / 2];
#pragma unroll
  for (int i = 0; i < kTailTileTokens; ++i) {
    const uint16_t* row = value_rows.row_of(i);
#pragma unroll
    for (int w = 0; w < kPerLane / 2; ++w) value[i][w] = 0;
    if (first + i < tokens.count && has_value) load_words<2 * kPerLane>(row + lane * kPerLane, value[i]);
  }

  // --- scores
  float score[kColumnTiles][4] = {};
  for_all<kColumnTiles, kChunks>([&](int n, int j) {
    uint4 query = {0, 0, 0, 0};
    if (8 * n + g < kRows) {
      query = *reinterpret_cast<const uint4*>(queries + ((8 * n + g) * kHeadDim + 32 * j + 8 * t) * 2);
    }
    const uint4 &low = key[0][j], &high = key[1][j];
    if (keys.tail_dtype == Dtype::bf16) {
      multiply_bfloats(score[n], low.x, high.x, low.y, high.y, query.x, query.y);
      multiply_bfloats(score[n], low.z, high.z, low.w, high.w, query.z, query.w);
    } else {
      multiply_halves(score[n], low.x, high.x, low.y, high.y, query.x, query.y);
      multiply_halves(score[n], low.z, high.z, low.w, high.w, query.z, query.w);
    }
  });

  // --- weights, relative to the maximum of these tokens and earlier ones; -1 where a row does not attend: values there
  // may be NaN
  float kept[kColumnTiles][2];
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int column = 8 * n + 2 * t + k, row = segment.row_tile * kRows + column, i = plan.rows.token(row);
      const bool is_row = column < kRows && row < plan.rows.num_rows;
      const int position = is_row ? first_position + i : -1;
      // A softcap applies to scores that contain their constants, and so do results.
      const float constant = is_row && params.softcap == 0.f ? constants[column] : 0.f;
      const float2 before = is_row ? sums[column] : make_float2(-INFINITY, 0.f);
      float maximum = before.x, sum = 0.f;
      bool is_visible[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = score[n][2 * h + k];
        const int distance = token[h] - position;
        x = fmaf(x, params.softmax_scale * kLog2E, -constant);
        if (params.softcap > 0.f) x = capped(x, params.softcap * kLog2E);
        if (params.alibi_slopes != nullptr && is_row) {
          const int head = segment.h * static_cast<int>(plan.rows.num_q_per_kv.value) + plan.rows.head(row, i);
          x = fmaf(params.alibi_slopes[head] * kLog2E, static_cast<float>(distance), x);
        }
        is_visible[h] = token[h] >= tokens.start && distance <= 0 && is_row &&
                        (params.sliding_window == 0 || distance > -params.sliding_window);
        if (is_visible[h]) maximum = fmaxf(maximum, x);
      }
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = score[n][2 * h + k];
        x = is_visible[h] ? exp2_below(x, maximum) : -1.f;
        sum += is_visible[h] ? x : 0.f;
      }
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
      kept[n][k] = exp2_below(before.x, maximum);
      __syncwarp();  // all lanes of a column have read what one of them overwrites
      if (g == 0 && is_row) sums[column] = make_float2(maximum, fmaf(before.y, kept[n][k], sum));
    }
  }

  // --- values, for two rows at a time
  const bool is_bf16 = values.tail_dtype == Dtype::bf16;
#pragma unroll 1
  for (int pair = 0; pair < kRows / 2; ++pair) {
    float* to = outputs + 2 * pair * Shape::kOutputStride + lane * kPerLane;
    float output[2][kPerLane];
    for_all<2>([&](int k) {
      const float of_lane = kColumnTiles == 1 || pair < 4 ? kept[0][k] : kept[kColumnTiles - 1][k];
      const float factor = __shfl_sync(kAllLanes, of_lane, pair % 4);
      for_all<kPerLane>([&](int c) { output[k][c] = to[k * Shape::kOutputStride + c] * factor; });
    });
    // Eight tokens at a time: all at once would take more registers than codes do.
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      float of_lane[2];
      for_all<2>([&](int k) {
        const float low = h == 0 ? score[0][k] : score[0][2 + k];
        const float high = h == 0 ? score[kColumnTiles - 1][k] : score[kColumnTiles - 1][2 + k];
        of_lane[k] = kColumnTiles == 1 || pair < 4 ? low : high;
      });
      for_all<8>([&](int i) {
        float x[kPerLane];
        for_all<kPerLane / 2>([&](int w) {
          const uint32_t word = h == 0 ? value[i][w] : value[8 + i][w];
          x[2 * w] = is_bf16 ? __uint_as_float(word << 16) : half_to_float(word & 0xffff);
          x[2 * w + 1] = is_bf16 ? __uint_as_float(word & 0xffff0000u) : half_to_float(word >> 16);
        });
        for_all<2>([&](int k) {
          const float weight = __shfl_sync(kAllLanes, of_lane[k], i * 4 + pair % 4);
          if (weight < 0.f) return;
          for_all<kPerLane>([&](int c) { output[k][c] = fmaf(weight, x[c], output[k][c]); });
        });
      });
    }
    for_all<2, kPerLane>([&](int k, int c) { to[k * Shape::kOutputStride + c] = output[k][c]; });
  }

  // --- new tokens
  if (!plan.appends) return;
  for_all<2>([&](int h) {
    uint16_t* row = key_rows.target_of(g + 8 * h);
    for_all<kChunks>([&](int j) {
      const int c = 32 * j + 8 * t;
      if (token[h] >= first_new && c < keys.head_dim) *reinterpret_cast<uint4*>(row + c) = key[h][j];
    });
  });
  for_all<kTailTileTokens>([&](int i) {
    uint16_t* row = value_rows.target_of(i);
    if (tokens.token(first + i) < first_new || !has_value) return;
    for_all<kPerLane / 2>([&](int w) { reinterpret_cast<uint32_t*>(row + lane * kPerLane)[w] = value[i][w]; });
  });
}

// All tiles of a warp.
template <class Shape>
__device__ __forceinline__ void attend_to_dense_tokens(const DecodeParams& params, const NewTokens& new_tokens,
                                                       const DecodePlan& plan, const Segment& segment,
                                                       const Bounds& bounds, const unsigned char* queries,
                                                       const float* constants, float* outputs, float2* sums, int warp,
                                                       int lane) {
  const DenseTokens tokens(params, plan, bounds);
  const int stride = segment.num_parts << plan.warps_log2;
#pragma unroll 1
  for (int tile = first_tile(plan, segment, warp); tile * kTailTileTokens < tokens.count; tile += stride) {
    attend_to_tile<Shape>(params, new_tokens, plan, segment, bounds, tokens, tile * kTailTileTokens, queries, constants,
                          outputs, sums, lane);
    __syncwarp();
  }
}

}  // namespace hf_kvquant::cuda
