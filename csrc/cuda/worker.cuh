// What one warp does with the steps it is given: scores, an online softmax, and the weighted sum of values, all in
// registers. Copies are ring.cuh's, which steps they are attend.cuh's, operands fragments.cuh's.
//
// The softmax. Scores are in log2 units. A column (query row) keeps a shift near max(score + log2(scale of the value)),
// so that P' = 2^(score - shift) · scale, rounded to float16, is at most 2^15; only when it would exceed that does the
// warp take the branch that raises the shift. Since float16 keeps relative precision down to 2^-14 and something down
// to 2^-24, nothing is lost by the shift lagging behind. A masked score is -inf and its P' is replaced, not multiplied:
// scales there may be NaN. The maximum ignores NaN; the exponential does not, so whoever attends to a NaN gets one.
#pragma once

#include "query.cuh"

namespace hf_kvquant::cuda {

constexpr float kMaxWeight = 32768.f;  // of P', half of what float16 holds

// The maximum, sum and output of the rows of a unit over the steps of one warp.
template <class Shape>
class Worker {
  using Ring = typename Shape::KeyRing;
  using Keys = KeyWords<Shape::kKeyRowBytes, Shape::kIsGrouped>;
  using Values = ValueWords<Shape::kValue, Shape::kValueRowBytes, Shape::kIsGrouped>;
  static constexpr int kTiles = Shape::kTilesPerStep, kHalves = 2 * kTiles, kColumns = Shape::kColumns;
  static constexpr int kColumnTiles = Shape::kColumnTiles, kNumGroups = Shape::kNumGroups;

 public:
  __device__ __forceinline__ Worker(const DecodeParams& params, const unsigned char* planes, const float* factors,
                                    const float* sums, int lane)
      : g_(lane >> 2), t_(lane & 3), slot_(slot_of_row(lane >> 2)) {
    using KeyLayout = RowLayout<Shape::kKeyRowBytes>;
    using ValueLayout = RowLayout<Shape::kValueRowBytes>;
    key_at_ = KeyLayout::offset(slot_, 0, Keys::load_byte(t_, 0));
    even_value_at_ = Ring::kValueAt + ValueLayout::offset(slot_of_row(2 * t_), 0, Values::load_byte(g_, 0));
    scale_at_ = slot_ * kHalves * 2;
    odd_value_at_ = Ring::kValueAt + ValueLayout::offset(slot_of_row(2 * t_ + 1), 0, Values::load_byte(g_, 0));
    keep(key_at_), keep(even_value_at_), keep(odd_value_at_), keep(scale_at_);
    query_.load(planes, g_, t_);
    key_offset_ = code_offset(params.key_side);
    value_center_ = params.value_side.is_symmetric ? 0.f : kMiddleCode;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = row_of(c);
      factor_[c] = factors[row];
#pragma unroll
      for (int j = 0; j < kNumGroups; ++j) {
        if constexpr (Shape::kKey != Storage::fp8) sum_of_query_[c][j] = sums[row * kNumGroups + j];
      }
      maximum_[c] = -INFINITY;
      shift_[c] = 0.f;
      sum_[c] = 0.f;
#pragma unroll
      for (int j = 0; j < kNumGroups; ++j) zero_[c][j] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < Values::kTiles; ++j) output_[n][j][i] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kNumGroups; ++j) operand_[i][j][n][0] = operand_[i][j][n][1] = 0;
      }
    }
  }

  // Takes one step's scores and turns them into weights, and meanwhile adds what the step before has weighed: the two
  // have nothing to do with each other, so one's latencies hide behind the other's instructions. `before` is the stage
  // of the step before, for the first step any stage that is filled: its weights are zeros. The second body is for
  // steps that not all rows see in whole, and for what changes scores.
  template <bool kIsMasked>
  __device__ __forceinline__ void attend(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                         const Span& span, const unsigned char* before, const unsigned char* stage,
                                         int step) {
    // --- scores, relative to the shift
    uint32_t key_scales[kNumGroups][kTiles], key_zeros[kNumGroups][kTiles];
    load_scales<Shape::kHasKeyZero>(stage + Ring::kScalesAt, stage + Ring::kKeyZeroAt, key_scales, key_zeros);
    float score[kTiles][2][kColumns];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) score_tile(stage, i, key_scales, key_zeros, score[i]);
    add_values(before);

    bool is_visible[kTiles][2][kColumns];
    if constexpr (kIsMasked) mask(params, rows, segment, span, step, score, is_visible);

    // --- weights
    uint32_t value_scales[kNumGroups][kTiles], value_zeros[kNumGroups][kTiles];
    load_scales<Shape::kHasValueZero>(stage + Ring::kValueScaleAt, stage + Ring::kValueZeroAt, value_scales,
                                      value_zeros);
    float weight[kTiles][2][kColumns];
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = largest_scale(value_scales, i, h);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          weight[i][h][c] = exp2_approx(score[i][h][c]);
          float scaled = weight[i][h][c] * scale;
          if constexpr (kIsMasked) scaled = is_visible[i][h][c] ? scaled : 0.f;
          largest = fmaxf(largest, scaled);
        }
      }
    }
    if (__any_sync(kAllLanes, largest > kMaxWeight) || is_fresh_) {
      raise_shift<kIsMasked>(score, value_scales, is_visible);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) weight[i][h][c] = exp2_approx(score[i][h][c]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum_[c] += weight[i][h][c];
      }
#pragma unroll
      for (int j = 0; j < kNumGroups; ++j) {
        weigh<kIsMasked>(weight[i], is_visible[i], value_scales[j][i], value_zeros[j][i], j, operand_[i][j]);
      }
    }
  }

  // Adds the values of a step, weighed.
  __device__ __forceinline__ void add_values(const unsigned char* stage) {
    static_assert(kNumGroups == 1 || Values::kLoads == kNumGroups, "one load a group");
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int load = 0; load < Values::kLoads; ++load) {
        add_values(stage, i, load, operand_[i][kNumGroups == 1 ? 0 : load]);
      }
    }
  }

  // When all steps are taken: adds up what the lanes of a row have summed, and adds zeros to the output.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        sum_[c] += __shfl_xor_sync(kAllLanes, sum_[c], distance);
#pragma unroll
        for (int j = 0; j < kNumGroups; ++j) {
          if constexpr (Shape::kHasValueZero) zero_[c][j] += __shfl_xor_sync(kAllLanes, zero_[c][j], distance);
        }
      }
      maximum_[c] = sum_[c] == 0.f ? -INFINITY : shift_[c];
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < Values::kTiles; ++j) {
        const int group = kNumGroups == 1 ? 0 : j / Values::kTilesPerLoad;
#pragma unroll
        for (int i = 0; i < Shape::kColumnsPerTile; ++i) {
          if constexpr (Shape::kHasValueZero) {
            output_[n][j][i] = fmaf(output_[n][j][i], kLowNibbleUnit, zero_[2 * n + i][group]);
            output_[n][j][2 + i] = fmaf(output_[n][j][2 + i], kHighNibbleUnit, zero_[2 * n + i][group]);
          }
        }
      }
    }
  }

  // Maximum, sum and output into shared memory, `outputs` being this warp's [kRows][kOutputStride].
  __device__ __forceinline__ void share(float* outputs, float2* sums) const {
    for_quads([&](int c, int row, int channel, float4 values) {
      *reinterpret_cast<float4*>(outputs + row * Shape::kOutputStride + channel) = values;
    });
    if (g_ > 0) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[row_of(c)] = make_float2(maximum_[c], sum_[c]);
  }

 private:
  // Calls use(column, row, channel, values) for every four channels that this lane has of a row.
  template <class Use>
  __device__ __forceinline__ void for_quads(Use use) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < Shape::kColumnsPerTile; ++i) {
#pragma unroll
        for (int j = 0; j < Values::kTiles; j += 2) {
          use(2 * n + i, row_of(2 * n + i), Values::channel(g_, j),
              make_float4(output_[n][j][i], output_[n][j][2 + i], output_[n][j + 1][i], output_[n][j + 1][2 + i]));
        }
      }
    }
  }

  // The query row, within the tile, of a lane's column.
  __device__ __forceinline__ int row_of(int column) const {
    return Shape::kIsPaired ? t_ : 8 * (column >> 1) + 2 * t_ + (column & 1);
  }

  static __device__ __forceinline__ float half_of(uint32_t pair, int i) {
    const __half2 halves = *reinterpret_cast<const __half2*>(&pair);
    return i == 0 ? __low2float(halves) : __high2float(halves);
  }

  // Of a token, over the groups of its channels.
  static __device__ __forceinline__ float largest_scale(const uint32_t (&scales)[kNumGroups][kTiles], int tile,
                                                        int half) {
    float largest = half_of(scales[0][tile], half);
#pragma unroll
    for (int j = 1; j < kNumGroups; ++j) largest = fmaxf(largest, half_of(scales[j][tile], half));
    return largest;
  }

  // Scales of this lane's tokens: word i holds those of tile i, halves 0 and 1.
  template <bool kHasZero>
  __device__ __forceinline__ void load_scales(const unsigned char* scales_at, const unsigned char* zeros_at,
                                              uint32_t (&scales)[kNumGroups][kTiles],
                                              uint32_t (&zeros)[kNumGroups][kTiles]) const {
#pragma unroll
    for (int j = 0; j < kNumGroups; ++j) {
      const uint32_t at = scale_at_ + j * Ring::kScaleBytes;
      load_shared<kHalves * 2>(scales_at + at, scales[j]);
      if constexpr (kHasZero) load_shared<kHalves * 2>(zeros_at + at, zeros[j]);
    }
  }

  // Scores of one tile of 16 tokens: rows g and g + 8, all columns.
  __device__ __forceinline__ void score_tile(const unsigned char* stage, int tile,
                                             const uint32_t (&scales)[kNumGroups][kTiles],
                                             const uint32_t (&zeros)[kNumGroups][kTiles],
                                             float (&score)[2][kColumns]) const {
    uint32_t words[2][Keys::kWords];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int load = 0; load < Keys::kLoads; ++load) {
        load_shared<Keys::kLoadBytes>(
            stage + RowLayout<Shape::kKeyRowBytes>::at(key_at_, 2 * tile + h, load * 4 * Keys::kLoadBytes),
            &words[h][load * Keys::kWordsPerLoad]);
      }
    }
    if constexpr (Shape::kKey == Storage::fp8) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        float product[4] = {};
#pragma unroll
        for (int w = 0; w < Keys::kWords; ++w) {
          multiply_halves(product, halves_of_e4m3(words[0][w] & 0xffff), halves_of_e4m3(words[1][w] & 0xffff),
                          halves_of_e4m3(words[0][w] >> 16), halves_of_e4m3(words[1][w] >> 16),
                          query_.words[n][0][w][0], query_.words[n][0][w][1]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = half_of(scales[0][tile], h);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int c = 2 * n + i;
            score[h][c] = fmaf(product[2 * h + i] * factor_[c], scale, -shift_[c]);
          }
        }
      }
    } else if constexpr (Shape::kIsGrouped) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) score[h][c] = -shift_[c];
      }
#pragma unroll
      for (int j = 0; j < kNumGroups; ++j) {
        const uint32_t low0 = words[0][j] & kNibbles, high0 = words[0][j] >> 4 & kNibbles;
        const uint32_t low1 = words[1][j] & kNibbles, high1 = words[1][j] >> 4 & kNibbles;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          int product[kParts][4] = {};
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            multiply_bytes(product[part], low0, low1, high0, high1, query_.words[n][part][j][0],
                           query_.words[n][part][j][1]);
          }
          add_products(product, n, j, tile, scales, zeros, score);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        // int4: sums over low nibbles, and over high ones, which are left where they are and count sixteenfold.
        int product[kParts][4] = {}, sixteenfold[kParts][4] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int w = 0; w < Keys::kWords; w += 2) {
            if constexpr (Shape::kKey == Storage::int8) {
              multiply_bytes(product[part], words[0][w], words[1][w], words[0][w + 1], words[1][w + 1],
                             query_.words[n][part][w][0], query_.words[n][part][w + 1][0]);
            } else {
              multiply_bytes(product[part], words[0][w] & kNibbles, words[1][w] & kNibbles, words[0][w + 1] & kNibbles,
                             words[1][w + 1] & kNibbles, query_.words[n][part][w][0], query_.words[n][part][w + 1][0]);
              multiply_bytes(sixteenfold[part], words[0][w] & kHighNibbles, words[1][w] & kHighNibbles,
                             words[0][w + 1] & kHighNibbles, words[1][w + 1] & kHighNibbles,
                             query_.words[n][part][w][1], query_.words[n][part][w + 1][1]);
            }
          }
        }
        if constexpr (Shape::kKey == Storage::int4) {
          // The sixteenfold sum is a multiple of 16, so 16 · product + sixteenfold is 16 times the sum of both.
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) product[part][i] = product[part][i] * 16 + sixteenfold[part][i];
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int i = 0; i < kColumns / kColumnTiles; ++i)
            score[h][kColumns / kColumnTiles * n + i] = -shift_[kColumns / kColumnTiles * n + i];
        }
        add_products(product, n, 0, tile, scales, zeros, score);
      }
    }
  }

  static constexpr float kMiddleCode = 8.f;  // of int4
  static_assert(Shape::kHasValueZero == (Shape::kValue == Storage::int4));
  static constexpr uint32_t kNibbles = 0x0f0f0f0fu, kHighNibbles = 0xf0f0f0f0u;
  static constexpr int kParts = QueryOperands<Shape>::kParts;

  // Adds scale · (query · codes) + zero · Σ query of one group to the scores of a column tile.
  __device__ __forceinline__ void add_products(const int (&product)[kParts][4], int n, int group, int tile,
                                               const uint32_t (&scales)[kNumGroups][kTiles],
                                               const uint32_t (&zeros)[kNumGroups][kTiles],
                                               float (&score)[2][kColumns]) const {
    // Ungrouped int4 sums count sixteenfold.
    constexpr float kUnit = Shape::kKey == Storage::int4 && !Shape::kIsGrouped ? 1.f / 16 : 1.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = half_of(scales[group][tile], h);
      const float zero = Shape::kHasKeyZero ? half_of(zeros[group][tile], h) : 0.f;
#pragma unroll
      for (int i = 0; i < Shape::kColumnsPerTile; ++i) {
        const int c = Shape::kColumnsPerTile * n + i;
        const int whole = Shape::kIsPaired ? product[0][2 * h] * 256 + product[0][2 * h + 1]
                                           : product[0][2 * h + i] * 256 + product[kParts - 1][2 * h + i];
        const float dot = fmaf(static_cast<float>(whole), factor_[c] * kUnit, -key_offset_ * sum_of_query_[c][group]);
        score[h][c] = fmaf(dot, scale, score[h][c]);
        if constexpr (Shape::kHasKeyZero) score[h][c] = fmaf(zero, sum_of_query_[c][group], score[h][c]);
      }
    }
  }

  // Softcap and ALiBi, and -inf for what a row does not see.
  __device__ __forceinline__ void mask(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                       const Span& span, int step, float (&score)[kTiles][2][kColumns],
                                       bool (&is_visible)[kTiles][2][kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = segment.row_tile * Shape::kRows + row_of(c);
      const int query_token = rows.token(row), position = span.first_position + query_token;
      const bool has_slope = params.alibi_slopes != nullptr && row < rows.num_rows;
      const float slope = has_slope ? params.alibi_slopes[segment.h * static_cast<int>(rows.num_q_per_kv.value) +
                                                          rows.head(row, query_token)] *
                                          kLog2E
                                    : 0.f;
      const int from = params.sliding_window > 0 ? position - params.sliding_window + 1 : 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = step * Ring::kStepTokens + slot_ * kHalves + 2 * i + h;
          float x = score[i][h][c];
          if (params.softcap > 0.f) {
            // cap · tanh(x / cap) = cap · (1 - 2 / (exp(2x / cap) + 1))
            const float cap = params.softcap * kLog2E;
            const float power = exp2f((x + shift_[c]) * (2.f * kLog2E / cap));
            x = cap * (1.f - 2.f / (power + 1.f)) - shift_[c];
          }
          x = fmaf(slope, static_cast<float>(token - position), x);
          is_visible[i][h][c] = token >= span.begin && token < span.end && token <= position && token >= from;
          score[i][h][c] = is_visible[i][h][c] ? x : -INFINITY;
        }
      }
    }
  }

  // Raises the shift of all columns to what this step asks for, and lowers what has been summed so far accordingly.
  template <bool kIsMasked>
  __device__ __forceinline__ void raise_shift(float (&score)[kTiles][2][kColumns],
                                              const uint32_t (&value_scales)[kNumGroups][kTiles],
                                              const bool (&is_visible)[kTiles][2][kColumns]) {
    bool is_unset = false;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float wanted = -INFINITY;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float wish = score[i][h][c] + shift_[c] + __log2f(largest_scale(value_scales, i, h));
          if (!kIsMasked || is_visible[i][h][c]) wanted = fmaxf(wanted, wish);
        }
      }
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        wanted = fmaxf(wanted, __shfl_xor_sync(kAllLanes, wanted, distance));
      }
      const float maximum = fmaxf(maximum_[c], wanted);
      const float shift = maximum == -INFINITY ? 0.f : maximum;
      const float kept = maximum_[c] == -INFINITY ? 1.f : exp2_approx(shift_[c] - shift);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) score[i][h][c] += shift_[c] - shift;
      }
      maximum_[c] = maximum;
      shift_[c] = shift;
      is_unset |= maximum == -INFINITY;
      sum_[c] *= kept;
      const int n = Shape::kIsPaired ? 0 : c >> 1, column = Shape::kIsPaired ? 0 : c & 1;
#pragma unroll
      for (int j = 0; j < kNumGroups; ++j) zero_[c][j] *= kept;
#pragma unroll
      for (int j = 0; j < Values::kTiles; ++j) {
        output_[n][j][column] *= kept;
        output_[n][j][2 + column] *= kept;
      }
    }
    is_fresh_ = __any_sync(kAllLanes, is_unset);
  }

  // The B operand of weights times values for one tile: P' = weight · scale in float16. Zeros add up on the side.
  template <bool kIsMasked>
  __device__ __forceinline__ void weigh(const float (&weight)[2][kColumns], const bool (&is_visible)[2][kColumns],
                                        uint32_t scales, uint32_t zeros, int group,
                                        uint32_t (&operand)[kColumnTiles][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = half_of(scales, h);
      const float zero = Shape::kHasValueZero ? fmaf(scale, value_center_, half_of(zeros, h)) : 0.f;
      float scaled[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        scaled[c] = weight[h][c] * scale;
        if constexpr (kIsMasked) scaled[c] = is_visible[h][c] ? scaled[c] : 0.f;
        if constexpr (Shape::kHasValueZero) {
          if (!kIsMasked || is_visible[h][c]) zero_[c][group] = fmaf(weight[h][c], zero, zero_[c][group]);
        }
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const uint32_t pair = Shape::kIsPaired
                                  ? pack_halves(scaled[0], 0.f)
                                  : pack_halves(scaled[2 * n % kColumns], scaled[(2 * n + 1) % kColumns]);
        operand[n][h] = transpose(pair);
        if constexpr (Shape::kValue == Storage::int4) {
          // Codes are taken off their middle here, for weights as they were rounded: a rounding error then counts as
          // often as the code differs from the middle, not as often as the code.
#pragma unroll
          for (int i = 0; i < Shape::kColumnsPerTile; ++i) {
            zero_[2 * n + i][group] = fmaf(half_of(pair, i), -kMiddleCode, zero_[2 * n + i][group]);
          }
        }
      }
    }
  }

  // Weights times the values of one load of a tile's four tokens: 2t and 2t + 1 of both halves.
  __device__ __forceinline__ void add_values(const unsigned char* stage, int tile, int load,
                                             const uint32_t (&operand)[kColumnTiles][2]) {
    constexpr int kWords = (Values::kLoadBytes + 3) / 4;
    using Layout = RowLayout<Shape::kValueRowBytes>;
    uint32_t words[4][kWords];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_shared<Values::kLoadBytes>(stage + Layout::at(k & 1 ? odd_value_at_ : even_value_at_, 2 * tile + (k >> 1),
                                                         load * 8 * Values::kLoadBytes),
                                      words[k]);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      for_value_operands<Shape::kValue>(
          words[0][w], words[1][w], words[2][w], words[3][w], Values::kLoadBytes == 2 ? 1 : 2,
          [&](int index, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
            const int j = load * Values::kTilesPerLoad + w * (Values::kIsInt4 ? 4 : 2) + index;
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n) {
              multiply_halves(output_[n][j], a0, a1, a2, a3, operand[n][0], operand[n][1]);
            }
          });
    }
  }

  int g_, t_, slot_;
  uint32_t key_at_, even_value_at_, odd_value_at_, scale_at_;  // in a stage: of the lane's first words and scales
  QueryOperands<Shape> query_;
  float key_offset_;
  float value_center_;  // what is to be added to codes off their middle
  float factor_[kColumns], sum_of_query_[kColumns][kNumGroups];
  float maximum_[kColumns], shift_[kColumns], sum_[kColumns], zero_[kColumns][kNumGroups];
  uint32_t operand_[kTiles][kNumGroups][kColumnTiles][2];  // weights of the step before
  float output_[kColumnTiles][Values::kTiles][4];
  bool is_fresh_ = true;
};

}  // namespace hf_kvquant::cuda
