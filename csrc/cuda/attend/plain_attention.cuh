// What one warp does with each of its steps if keys and values have no codes: like WarpAttention, for 16-bit numbers of
// the query's dtype, which tensor cores multiply as they are. A token has twice the bytes of int8 and less work, so
// memory is the limit, and there is one simple way for everything (64 x 8k: 96 % of bandwidth, H200, 2026-11).
//
// A step is one tile of 16 tokens. Row g of its half h holds token 2g + h, which is row 8h + g in shared memory. Weights
// are two numbers of that dtype, the second one what the first loses: so the output has nearly the error of float32.
#pragma once

#include "fragments.cuh"
#include "row_view.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

template <class Shape>
class PlainAttention {
  using Pipeline = typename Shape::StepPipeline;
  using Keys = RowLayout<Shape::kKeyRowBytes>;
  using Values = RowLayout<Shape::kValueRowBytes>;
  static constexpr int kColumnTiles = Shape::kColumnTiles;
  static constexpr int kTiles = Shape::kHeadDim / 16;  // of 16 channels
  static_assert(Shape::kTilesPerStep == 1);

 public:
  // Takes what WarpAttention takes.
  __device__ __forceinline__ explicit PlainAttention(int lane) : g_(lane >> 2), t_(lane & 3) {
    for_all<kColumnTiles, 2>([&](int n, int i) { maximum_[n][i] = -INFINITY, sum_[n][i] = 0.f; });
    for_all<kColumnTiles, kTiles, 4>([&](int n, int j, int i) { output_[n][j][i] = 0.f; });
  }

  __device__ __forceinline__ void load(const DecodeParams& params, const unsigned char* planes, const unsigned char*,
                                       const float*, const float*, int, int, int, int lane) {
    is_half_ = params.query.dtype == Dtype::fp16, factor_ = params.softmax_scale * kLog2E;
    keys_at_ = plain_matrix_row<Shape::kKeyRowBytes>(lane, lane >> 3 & 1, lane >> 4);
    values_at_ = Pipeline::kValueAt + plain_matrix_row<Shape::kValueRowBytes>(lane, lane >> 4, lane >> 3 & 1);
    for_all<kColumnTiles, kTiles, 2>([&](int n, int j, int i) {
      const int at = (8 * n + g_) * Shape::kHeadDim + 16 * j + 8 * i + 2 * t_;
      query_[n][j][i] = *reinterpret_cast<const uint32_t*>(planes + 2 * at);
    });
  }

  // Attends to a step.
  template <bool kIsMasked>
  __device__ __forceinline__ void attend(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                         const Span& span, const float* constants, const unsigned char*,
                                         const unsigned char* stage, int step) {
    float score[kColumnTiles][4] = {};
    for_all<kTiles>([&](int j) {
      uint32_t keys[4];
      load_matrices<false>(shared_address(stage) + Keys::at(keys_at_, 0, 32 * j), keys);
      for_all<kColumnTiles>([&](int n) { multiply(score[n], keys, query_[n][j]); });
    });

    bool is_seen[2] = {false, false}, is_unseen[2] = {false, false};  // by a row: the lane's two tokens
    for_all<kColumnTiles, 2>([&](int n, int i) {
      float x[2] = {score[n][i] * factor_, score[n][2 + i] * factor_};
      if constexpr (kIsMasked) {
        const int row = 8 * n + 2 * t_ + i, of_unit = segment.row_tile * Shape::kRows + row;
        const RowView view(params, rows, segment, span, of_unit);
        for_all<2>([&](int h) {
          const int token = token_of(step, g_, h);
          const bool sees = view.sees(span, token), exists = of_unit < rows.num_rows;
          is_seen[h] |= exists && sees, is_unseen[h] |= exists && !sees;
          x[h] = sees ? view.logit(params, x[h], constants[row], token) : -INFINITY;
        });
      }
      float maximum = fmaxf(x[0], x[1]);  // ignores NaN, which the exponential does not
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
      }
      maximum = fmaxf(maximum, maximum_[n][i]);
      const float kept = exp2_below(maximum_[n][i], maximum);
      maximum_[n][i] = maximum;
      for_all<2>([&](int h) { score[n][2 * h + i] = exp2_below(x[h], maximum); });
      sum_[n][i] = fmaf(sum_[n][i], kept, score[n][i] + score[n][2 + i]);
      for_all<kTiles>([&](int j) { output_[n][j][i] *= kept, output_[n][j][2 + i] *= kept; });
    });

    uint32_t weights[kColumnTiles][2][2];
    for_all<kColumnTiles, 2>([&](int n, int h) {
      const float low = score[n][2 * h], high = score[n][2 * h + 1];
      const uint32_t pair = pack(low, high);
      weights[n][0][h] = transpose(pair);
      weights[n][1][h] = transpose(pack(low - first_of(pair), high - second_of(pair)));
    });
    if constexpr (kIsMasked) {
      for_all<2>([&](int h) {
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
          is_seen[h] |= __shfl_xor_sync(kAllLanes, static_cast<int>(is_seen[h]), distance) != 0;
          is_unseen[h] |= __shfl_xor_sync(kAllLanes, static_cast<int>(is_unseen[h]), distance) != 0;
        }
      });
      if (__any_sync(kAllLanes, (is_seen[0] && is_unseen[0]) || (is_seen[1] && is_unseen[1]))) {
        add_row_by_row(params, rows, segment, span, stage, step, weights);
        return;
      }
    }
    for_all<kTiles>([&](int j) {
      uint32_t values[4];
      load_values(stage, j, values);
      for_all<kColumnTiles, 2>([&](int n, int part) { multiply(output_[n][j], values, weights[n][part]); });
    });
  }

  // After the last step: adds up the sums of all lanes of a row.
  __device__ __forceinline__ void finish() {
    for_all<kColumnTiles, 2>([&](int n, int i) {
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        sum_[n][i] += __shfl_xor_sync(kAllLanes, sum_[n][i], distance);
      }
    });
  }

  // Writes maximum, sum and output to shared memory; `outputs` is this warp's [kRows][kOutputStride].
  __device__ __forceinline__ void share(float* outputs, float2* sums) const {
    for_all<kColumnTiles, 2>([&](int n, int i) {
      const int row = 8 * n + 2 * t_ + i;
      float* const to = outputs + row * Shape::kOutputStride + g_;
      for_all<kTiles>([&](int j) { to[16 * j] = output_[n][j][i], to[16 * j + 8] = output_[n][j][2 + i]; });
      if (g_ == 0) sums[row] = make_float2(maximum_[n][i], sum_[n][i]);
    });
  }

 private:
  static __device__ __forceinline__ int token_of(int step, int row, int half) {
    return step * Pipeline::kStepTokens + 2 * row + half;
  }

  // The A operand of values times weights: channels of tile j.
  __device__ __forceinline__ void load_values(const unsigned char* stage, int j, uint32_t (&values)[4]) const {
    load_matrices<true>(shared_address(stage) + Values::at(values_at_, 0, 32 * j), values);
  }

  // Adds weighted values where some rows see a token that others do not: each row gets zeros for what it does not see.
  // Its weights are zero there, but a value may be infinite or NaN. Such steps are few.
  __device__ __forceinline__ void add_row_by_row(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                                 const Span& span, const unsigned char* stage, int step,
                                                 const uint32_t (&weights)[kColumnTiles][2][2]) {
    for_all<kColumnTiles>([&](int n) {
#pragma unroll 1
      for (int column = 0; column < 8; ++column) {
        const RowView view(params, rows, segment, span, segment.row_tile * Shape::kRows + 8 * n + column);
        uint32_t mask[2];
        for_all<2>([&](int h) {
          mask[h] = (view.sees(span, token_of(step, 2 * t_, h)) ? 0xffffu : 0u) |
                    (view.sees(span, token_of(step, 2 * t_ + 1, h)) ? 0xffff0000u : 0u);
        });
        for_all<kTiles>([&](int j) {
          uint32_t values[4];
          load_values(stage, j, values);
          values[0] &= mask[0], values[1] &= mask[0], values[2] &= mask[1], values[3] &= mask[1];
          float sum[4] = {};
          for_all<2>([&](int part) { multiply(sum, values, weights[n][part]); });
          for_all<4>([&](int i) {
            if (2 * t_ + i % 2 == column) output_[n][j][i] += sum[i];
          });
        });
      }
    });
  }

  __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) const {
    if (is_half_) {
      multiply_halves(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
    } else {
      multiply_bfloats(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
    }
  }
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    return is_half_ ? pack_halves(low, high) : pack_bfloats(low, high);
  }
  __device__ __forceinline__ float first_of(uint32_t pair) const {
    return is_half_ ? half_of(pair, 0) : __uint_as_float(pair << 16);
  }
  __device__ __forceinline__ float second_of(uint32_t pair) const {
    return is_half_ ? half_of(pair, 1) : __uint_as_float(pair & 0xffff0000u);
  }

  int g_, t_;
  bool is_half_;
  float factor_;                  // of scores: the softmax scale, in log2 units
  uint32_t keys_at_, values_at_;  // in a stage: of the lane's first matrix rows
  uint32_t query_[kColumnTiles][kTiles][2];
  float maximum_[kColumnTiles][2], sum_[kColumnTiles][2];
  float output_[kColumnTiles][kTiles][4];
};

}  // namespace hf_kvquant::cuda
