// What WarpAttention does differently where scales belong to groups of 32 channels. Scales and zeros of four groups are
// as many numbers as a word of codes holds, so they also go through the tensor cores wherever they can.
//
// Scores. A mask turns codes into float16. Each group has its own accumulator, which is multiplied by its scale:
//     score = factor · Σ_j scale_j · (query_j · codes_j) + Σ_j zero_j · Σ query_j.
// The second sum is one product with the query sums, each as two float16 numbers (GroupedQueryOperands). Symmetric
// formats have no zero, but codes with an offset, so their scales take its place.
//
// Values. Weights are rounded to float16 once, P, and once more as the operand of each group, P'_j = P · scale_j. Terms
// that are the same for all channels of a group go into its `center`, an output tile whose rows are groups:
//     Σ_t P_t · zero_tj + middle · Σ_t P_t · scale_tj - 8 · Σ_t P'_tj.
// The last sum centres the codes with the weights as rounded, so a rounding error is multiplied by the code's distance
// from the middle. P is the same in all three sums, so its rounding counts as it would in float16 attention. Tensor
// cores truncate their sums. So a step's sum starts at zero and is added in float32; else a long sequence would lose
// half a unit in the last place at every step.
#pragma once

#include "query.cuh"

namespace hf_kvquant::cuda {

template <class Shape>
class Groups {
  using Pipeline = typename Shape::StepPipeline;
  static constexpr int kTiles = Shape::kTilesPerStep, kHalves = 2 * kTiles, kColumns = Shape::kColumns;
  static constexpr int kColumnTiles = Shape::kColumnTiles, kColumnsPerTile = Shape::kColumnsPerTile;
  static constexpr int kNumGroups = Shape::kNumGroups, kQuads = GroupedQueryOperands<Shape>::kQuads;
  static constexpr int kWordBytes = kHalves * 2;  // scales of a slot: word i is for tile i, halves 0 and 1
  using Operand = uint32_t[kTiles][kNumGroups][kColumnTiles][2];

 public:
  __device__ __forceinline__ void load(const DecodeParams& params, const unsigned char* planes, const float* sums,
                                       int lane) {
    const int g = lane >> 2, t = lane & 3;
    g_ = g, t_ = t;
    const bool has_key_zero = !params.key_side.is_symmetric;
    query_.load(planes, sums, has_key_zero ? 1.f : -8.f, g, t);
    codes_at_ = matrix_row<Shape::kKeyRowBytes>(lane);
    scale_at_ = Pipeline::kScalesAt + slot_of_row(g) * kWordBytes;
    term_at_ = (has_key_zero ? Pipeline::kKeyZeroAt : Pipeline::kScalesAt) + slot_of_row(g) * kWordBytes +
               (t & 1) * 2 % kNumGroups * Pipeline::kScaleBytes;
    even_at_ = Pipeline::kValueScaleAt + slot_of_row(2 * t) * kWordBytes;
    odd_at_ = Pipeline::kValueScaleAt + slot_of_row(2 * t + 1) * kWordBytes;
    // Rows of the center: zeros of the groups, then scales. Up to four groups share the eight rows of one half.
    center_plane_ = kNumGroups == 8
                        ? Pipeline::kPlaneBytes + g * Pipeline::kScaleBytes
                        : ((g & 4) == 0 ? Pipeline::kPlaneBytes : 0) + (g & 3) % kNumGroups * Pipeline::kScaleBytes;
    keep(codes_at_), keep(scale_at_), keep(term_at_), keep(even_at_), keep(odd_at_), keep(center_plane_);
    middle_ = params.value_side.is_symmetric ? 0.f : middle_code(Shape::kValue);
    for_all<kColumnTiles, 4>([&](int n, int i) { center_[n][i] = 0.f; });
  }

  // Scores of a step, plus `base`.
  __device__ __forceinline__ void score(const unsigned char* stage, const float (&factor)[kColumns],
                                        const float (&base)[kColumns], float (&score)[kTiles][2][kColumns]) const {
    uint32_t scales[kNumGroups][kTiles], terms[2 * kQuads][kTiles];
    for_all<kNumGroups>(
        [&](int j) { load_words<kWordBytes>(stage + scale_at_ + j * Pipeline::kScaleBytes, scales[j]); });
    for_all<2 * kQuads>([&](int k) {
      constexpr int kSecond = kNumGroups > 1 ? Pipeline::kScaleBytes : 0;
      load_words<kWordBytes>(stage + term_at_ + k / 2 * 4 * Pipeline::kScaleBytes + k % 2 * kSecond, terms[k]);
    });
    const uint32_t codes = shared_address(stage);
    for_all<kTiles>([&](int i) {
      float sum[kColumnTiles][4] = {};
      for_all<kColumnTiles>([&](int n) {
        for_all<kQuads>([&](int quad) {
          multiply_halves(sum[n], __byte_perm(terms[2 * quad][i], terms[2 * quad + 1][i], 0x5410),
                          __byte_perm(terms[2 * quad][i], terms[2 * quad + 1][i], 0x7632), query_.sums[n][quad]);
        });
        for_all<4>([&](int k) { sum[n][k] *= 1.f / (GroupedQueryOperands<Shape>::kSumUnit * kLowNibbleUnit); });
      });
      for_all<kNumGroups / 2>([&](int load) {
        uint32_t words[4];
        load_matrices<false>(codes + RowLayout<Shape::kKeyRowBytes>::at(codes_at_, 2 * i, load * 32), words);
        for_all<2>([&](int k) {
          const int j = 2 * load + k;
          const uint32_t e = words[2 * k], f = words[2 * k + 1], e8 = e >> 8, f8 = f >> 8;
          for_all<kColumnTiles>([&](int n) {
            float product[4] = {};
            const uint32_t (&query)[4] = query_.words[n][j];
            multiply_halves(product, e & kLowNibbles, f & kLowNibbles, e & kHighNibbles, f & kHighNibbles, query[0],
                            query[1]);
            multiply_halves(product, e8 & kLowNibbles, f8 & kLowNibbles, e8 & kHighNibbles, f8 & kHighNibbles, query[2],
                            query[3]);
            for_all<2>([&](int h) {
              const float scale = half_of(scales[j][i], h);
              for_all<kColumnsPerTile>(
                  [&](int c) { sum[n][2 * h + c] = fmaf(product[2 * h + c], scale, sum[n][2 * h + c]); });
            });
          });
        });
      });
      for_all<kColumnTiles, 2, kColumnsPerTile>([&](int n, int h, int k) {
        const int c = kColumnsPerTile * n + k;
        score[i][h][c] = fmaf(sum[n][2 * h + k], factor[c], base[c]);
      });
    });
  }

  // Scales of the values of a step, for the tokens of rows 2t and 2t + 1.
  struct Scales {
    uint32_t even[kNumGroups][kTiles], odd[kNumGroups][kTiles];

    // Whether one is 2 or more, or NaN.
    __device__ __forceinline__ bool is_any_large() const {
      uint32_t bits = 0;
      for_all<kNumGroups, kTiles>([&](int j, int i) { bits |= even[j][i] | odd[j][i]; });
      return (bits & 0x40004000u) != 0;
    }
  };

  __device__ __forceinline__ Scales load_scales(const unsigned char* stage) const {
    Scales scales;
    for_all<kNumGroups>([&](int j) {
      load_words<kWordBytes>(stage + even_at_ + j * Pipeline::kScaleBytes, scales.even[j]);
      load_words<kWordBytes>(stage + odd_at_ + j * Pipeline::kScaleBytes, scales.odd[j]);
    });
    return scales;
  }

  // log2 of the largest value scale of the token of lane row g, at least 0: weights must leave room for it.
  __device__ __forceinline__ float room(const unsigned char* stage, int tile, int half) const {
    float largest = 1.f;
    for_all<kNumGroups>([&](int j) {
      const half_bits* scale = reinterpret_cast<const half_bits*>(stage + scale_at_ + Pipeline::kValueScaleAt -
                                                                  Pipeline::kScalesAt + j * Pipeline::kScaleBytes);
      largest = fmaxf(largest, half_to_float(scale[2 * tile + half]));
    });
    return __log2f(largest);
  }

  // Makes the operands of weights times values, and adds the step's part of the centers.
  template <bool kIsMasked>
  __device__ __forceinline__ void weigh(const unsigned char* stage, const Scales& scales,
                                        const float (&weight)[kTiles][2][kColumns],
                                        const bool (&is_visible)[kTiles][2][kColumns], Operand& operand) {
    uint32_t even_terms[kTiles], odd_terms[kTiles], more_even_terms[kTiles], more_odd_terms[kTiles];
    load_words<kWordBytes>(stage + even_at_ + center_plane_, even_terms);
    load_words<kWordBytes>(stage + odd_at_ + center_plane_, odd_terms);
    if constexpr (kNumGroups == 8) {
      load_words<kWordBytes>(stage + even_at_ + center_plane_ - Pipeline::kPlaneBytes, more_even_terms);
      load_words<kWordBytes>(stage + odd_at_ + center_plane_ - Pipeline::kPlaneBytes, more_odd_terms);
    }
    float sum[kColumnTiles][4] = {};
    for_all<kTiles>([&](int i) {
      uint32_t terms[4] = {};
      for_all<2>([&](int h) {
        const int selector = h == 0 ? 0x5410 : 0x7632;
        terms[2 * h] = number<kIsMasked>(__byte_perm(even_terms[i], odd_terms[i], selector));
        if constexpr (kNumGroups == 8) {
          terms[2 * h + 1] = number<kIsMasked>(__byte_perm(more_even_terms[i], more_odd_terms[i], selector));
        }
      });
      for_all<kColumnTiles>([&](int n) {
        uint32_t weights[2], shown[2];
        for_all<2>([&](int h) {
          const int c = kColumnsPerTile * n, next = kColumnsPerTile == 2 ? c + 1 : c;
          weights[h] = transpose(pack_halves(weight[i][h][c], kColumnsPerTile == 2 ? weight[i][h][next] : 0.f));
          if constexpr (kIsMasked) {
            shown[h] = transpose((is_visible[i][h][c] ? 0x0000ffffu : 0) | (is_visible[i][h][next] ? 0xffff0000u : 0));
          }
        });
        multiply_halves(sum[n], terms[0], terms[1], terms[2], terms[3], weights[0], weights[1]);
        for_all<kNumGroups>([&](int j) {
          uint32_t (&scaled)[2] = operand[i][j][n];
          for_all<2>([&](int h) {
            const uint32_t pair = __byte_perm(scales.even[j][i], scales.odd[j][i], h == 0 ? 0x5410 : 0x7632);
            scaled[h] = multiply_halves(weights[h], pair);
            if constexpr (kIsMasked) scaled[h] &= shown[h];
          });
          const uint32_t minus_middle = g_ == j ? 0xc800c800u : 0;
          multiply_halves(sum[n], minus_middle, 0, minus_middle, 0, scaled[0], scaled[1]);
        });
      });
    });
    for_all<kColumnTiles, 4>([&](int n, int i) { center_[n][i] += sum[n][i]; });
  }

  // Scales down the sums of a column so far.
  __device__ __forceinline__ void lower(int n, int i, float kept) {
    center_[n][i] *= kept;
    center_[n][2 + i] *= kept;
  }

  // The center of a group, for column i of a tile. All lanes call this together.
  __device__ __forceinline__ float center(int n, int i, int group) const {
    const float zeros = __shfl_sync(kAllLanes, center_[n][i], group * 4 + t_);
    const float scales = kNumGroups == 8 ? __shfl_sync(kAllLanes, center_[n][2 + i], group * 4 + t_)
                                         : __shfl_sync(kAllLanes, center_[n][i], (4 + group) * 4 + t_);
    return fmaf(scales, middle_, zeros);
  }

 private:
  // In steps that not all rows attend to in full, a NaN must not reach rows that do not attend to it, so it is replaced
  // here. Rows that do attend to it become NaN by the scale, which is NaN, too.
  template <bool kIsMasked>
  static __device__ __forceinline__ uint32_t number(uint32_t halves) {
    if constexpr (kIsMasked) asm("min.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x7bff7bffu));
    return halves;
  }

  int g_, t_;
  GroupedQueryOperands<Shape> query_;
  uint32_t codes_at_, scale_at_, term_at_, even_at_, odd_at_, center_plane_;  // in a stage
  float middle_;  // what centred codes lack: the middle, 0 if symmetric
  float center_[kColumnTiles][4];
};

}  // namespace hf_kvquant::cuda
