// What one warp does with each of its steps: scores, an online softmax, and the weighted sum of values, all in
// registers. attend.cuh chooses the steps, pipeline.cuh copies them, fragments.cuh makes the operands.
//
// Softmax. Scores are in log2 units. A column (query row) keeps a shift near max(score + log2(scale of the value)), so
// that P' = 2^(score - shift) · scale, rounded to float16, is at most 2^15. Only when P' would exceed that, the warp
// takes the branch that raises the shift; until then the shift may lag behind without loss, since float16 keeps
// relative precision down to 2^-14 and some of it down to 2^-24. A masked score is -inf, and its P' is replaced, not
// multiplied, because scales there may be NaN. The maximum ignores NaN, the exponential does not, so rows that attend
// to a NaN become NaN. The masked body subtracts the shift last: slopes of ALiBi make the shift of far tokens so large
// that near ones would lose bits.
#pragma once

#include "blocks.cuh"
#include "groups.cuh"
#include "row_view.cuh"
#include "tails.cuh"

namespace hf_kvquant::cuda {

constexpr float kMaxWeight = 32768.f;  // of P', half of what float16 holds
// With groups, weights become float16 before they are multiplied by scales. If all scales are below 2, weights may
// reach 2^14. A new shift brings the largest to about 2^10, since small scales will make weights smaller.
constexpr float kMaxGroupedWeight = 16384.f, kGroupedWeightBits = 10.f;

// The maximum, sum and output of the rows of a unit over the steps of one warp.
template <class Shape>
class WarpAttention {
  using Pipeline = typename Shape::StepPipeline;
  using Keys = KeyWords<Shape::kKeyRowBytes>;
  using Values = ValueWords<Shape::kValue, Shape::kValueRowBytes>;
  static constexpr int kTiles = Shape::kTilesPerStep, kHalves = 2 * kTiles, kColumns = Shape::kColumns;
  static constexpr int kColumnTiles = Shape::kColumnTiles, kColumnsPerTile = Shape::kColumnsPerTile;
  static constexpr int kNumGroups = Shape::kNumGroups;
  static constexpr bool kIsGrouped = Shape::kIsGrouped, kIsBlocked = Shape::kIsBlocked;
  static constexpr float kHeadroom = kIsGrouped ? kGroupedWeightBits : 0.f;  // of the maximum above the shift
  static constexpr float kDenseWeightBits = kIsGrouped ? kGroupedWeightBits : 14.f;

 public:
  __device__ __forceinline__ explicit WarpAttention(int lane)
      : g_(lane >> 2), t_(lane & 3), slot_(slot_of_row(lane >> 2)) {
    for_all<kColumns>([&](int c) { maximum_[c] = -INFINITY, shift_[c] = sum_[c] = zero_[c] = 0.f; });
    for_all<kColumnTiles>([&](int n) {
      for_all<4, Values::kTiles>([&](int i, int j) { output_[n][j][i] = 0.f; });
      for_all<kTiles, kNumGroups>([&](int i, int j) { operand_[i][j][n][0] = operand_[i][j][n][1] = 0; });
    });
  }

  // What the steps need, so after the dense tokens, which need registers, too.
  __device__ __forceinline__ void load(const DecodeParams& params, const unsigned char* planes,
                                       const unsigned char* plain_query, const float* factors, const float* sums,
                                       int first_of_tail, int end_of_codes, int tail_slot, int lane) {
    values_at_ = Pipeline::kValueAt + matrix_row<Shape::kValueRowBytes>(lane);
    keep(values_at_);
    if constexpr (kIsGrouped) {
      groups_.load(params, planes, sums, lane);
    } else {
      scale_at_ = slot_ * kHalves * 2;
      keep(scale_at_);
      if constexpr (kIsBlocked) {
        blocks_.load(planes, plain_query, first_of_tail, end_of_codes, tail_slot, lane);
      } else {
        key_at_ = RowLayout<Shape::kKeyRowBytes>::offset(slot_, 0, Keys::load_byte(t_, 0));
        keep(key_at_);
        query_.load(planes, g_, t_);
        key_offset_ = code_offset(Shape::kKey, params.key_side.is_symmetric);
      }
      value_center_ = params.value_side.is_symmetric ? 0.f : middle_code(Shape::kValue);
    }
    for_all<kColumns>([&](int c) {
      const int row = row_of(c);
      factor_[c] = factors[row] * (kIsGrouped || kIsBlocked ? kLowNibbleUnit : 1.f);
      if constexpr (!kIsGrouped && !kIsBlocked && Shape::kKey != Storage::fp8) sum_of_query_[c] = sums[row];
    });
  }

  // Turns one step's scores into weights, and in between adds the weighted values of the previous step: the two are
  // independent, so the latencies of one hide behind the instructions of the other. `before` is the stage of the
  // previous step; for the first step it is any filled stage, since its weights are zeros. kIsMasked is for steps that
  // not all rows attend to in full, and for softcap and ALiBi, which change scores.
  template <bool kIsMasked>
  __device__ __forceinline__ void attend(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                         const Span& span, const float* constants, const unsigned char* before,
                                         const unsigned char* stage, int step) {
    ValueMatrices values;
    load_values(before, values);

    // --- scores minus their shift, which costs nothing here; the masked body subtracts it later
    float score[kTiles][2][kColumns], base[kColumns];
    for_all<kColumns>([&](int c) { base[c] = kIsMasked ? 0.f : -shift_[c]; });
    if constexpr (kIsGrouped) {
      groups_.score(stage, factor_, base, score);
    } else if constexpr (kIsBlocked) {
      blocks_.score(params, rows, segment, span, constants, stage, step, factor_, base, score);
    } else {
      uint32_t scales[kTiles], zeros[kTiles];
      load_scales<Shape::kHasKeyZero>(stage + Pipeline::kScalesAt, stage + Pipeline::kKeyZeroAt, scales, zeros);
      for_all<kTiles>([&](int i) { score_tile(stage, i, scales, zeros, base, score[i]); });
    }
    add_values(values);

    bool is_visible[kTiles][2][kColumns];
    if constexpr (kIsMasked) mask(params, rows, segment, span, constants, step, score, is_visible);

    // --- weights
    float weight[kTiles][2][kColumns];
    if constexpr (kIsGrouped) {
      const typename Groups<Shape>::Scales scales = groups_.load_scales(stage);
      float largest = 0.f;
      for_all<kTiles, 2, kColumns>([&](int i, int h, int c) {
        weight[i][h][c] = exp2_approx(kIsMasked ? score[i][h][c] - shift_[c] : score[i][h][c]);
        largest = fmaxf(largest, weight[i][h][c]);
      });
      if (__any_sync(kAllLanes, largest > kMaxGroupedWeight || scales.is_any_large()) || is_fresh_) {
        raise_shift<kIsMasked>(score, is_visible, weight, [&](int i, int h) { return groups_.room(stage, i, h); });
      }
      add_up(weight);
      groups_.template weigh<kIsMasked>(stage, scales, weight, is_visible, operand_);
    } else {
      uint32_t scales[kTiles], zeros[kTiles];
      load_scales<Shape::kHasValueZero>(stage + Pipeline::kValueScaleAt, stage + Pipeline::kValueZeroAt, scales, zeros);
      bool is_beyond = false;  // or NaN, where the weight alone may be infinite
      for_all<kTiles, 2>([&](int i, int h) {
        const float scale = half_of(scales[i], h);
        for_all<kColumns>([&](int c) {
          weight[i][h][c] = exp2_approx(kIsMasked ? score[i][h][c] - shift_[c] : score[i][h][c]);
          float scaled = weight[i][h][c] * scale;
          if constexpr (kIsMasked) scaled = is_visible[i][h][c] ? scaled : 0.f;
          is_beyond |= !(scaled <= kMaxWeight);
        });
      });
      if (__any_sync(kAllLanes, is_beyond) || is_fresh_) {
        // A scale that is NaN counts like the smallest one: lse does not depend on values.
        raise_shift<kIsMasked>(score, is_visible, weight,
                               [&](int i, int h) { return fmaxf(__log2f(half_of(scales[i], h)), -24.f); });
      }
      add_up(weight);
      for_all<kTiles>([&](int i) { weigh<kIsMasked>(weight[i], is_visible[i], scales[i], zeros[i], operand_[i][0]); });
    }
  }

  // Adds the weighted values of a step.
  __device__ __forceinline__ void add_values(const unsigned char* stage) {
    ValueMatrices values;
    load_values(stage, values);
    add_values(values);
  }

  // After the last step: adds up the sums of all lanes of a row, and adds zeros to the output.
  __device__ __forceinline__ void finish() {
    for_all<kColumns>([&](int c) {
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        sum_[c] += __shfl_xor_sync(kAllLanes, sum_[c], distance);
        if constexpr (Shape::kHasValueZero && !kIsGrouped) {
          zero_[c] += __shfl_xor_sync(kAllLanes, zero_[c], distance);
        }
      }
      maximum_[c] = sum_[c] == 0.f ? -INFINITY : shift_[c];
    });
    if constexpr (Shape::kHasValueZero) {
      for_all<kColumnTiles, Shape::kColumnsPerTile, Values::kTiles>([&](int n, int i, int j) {
        const float center = kIsGrouped ? groups_.center(n, i, j / Values::kTilesPerChunk) : zero_[2 * n + i];
        output_[n][j][i] = fmaf(output_[n][j][i], unit_of_output<Shape::kValue>(j, 0), center);
        output_[n][j][2 + i] = fmaf(output_[n][j][2 + i], unit_of_output<Shape::kValue>(j, 1), center);
      });
    }
  }

  // Before the first step: adds a tile of dense tokens. `queries` as of DenseTile. After the last tile comes
  // `end_dense_tokens`.
  __device__ __forceinline__ void add(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                      const Span& span, int start, const unsigned char* queries,
                                      const float* constants, const DenseTile<Shape>& tile) {
    float score[kColumnTiles][4] = {};
    tile.multiply_keys(params.key_side.tail_dtype, queries, score);

    // --- weights. The shift is so far below the maximum that weights of codes, which follow, keep their bits even if
    // these tokens take nearly all of the weight, as first tokens do.
    const int first_row = segment.row_tile * Shape::kRows;
    const auto is_first = [&](int token) { return token < start + params.sink_length; };
    float weight[kColumns][2];
    int query_token[kColumns];
    for_all<kColumns>([&](int c) {
      const int n = c / kColumnsPerTile, k = c % kColumnsPerTile;
      const RowView view(params, rows, segment, span, first_row + row_of(c));
      query_token[c] = view.position - span.first_position;
      const float constant = constants[row_of(c)];
      float x[2], wanted = -INFINITY;
      bool is_visible[2];
      for_all<2>([&](int h) {
        const int token = tile.token[h];
        x[h] = view.logit(params, fmaf(score[n][2 * h + k], params.softmax_scale * kLog2E, -constant), constant, token);
        is_visible[h] = token >= start && token <= view.position && token >= view.from &&
                        (token >= view.dense_from || is_first(token));
        if (is_visible[h]) wanted = fmaxf(wanted, x[h]);
      });
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        wanted = fmaxf(wanted, __shfl_xor_sync(kAllLanes, wanted, distance));
      }
      const float shift = fmaxf(maximum_[c] - kHeadroom, wanted - kDenseWeightBits);
      const float kept = maximum_[c] == -INFINITY ? 1.f : exp2_approx(shift_[c] - shift);
      if (shift > -INFINITY) shift_[c] = shift, maximum_[c] = shift + kHeadroom;
      sum_[c] *= kept;
      for_all<2>([&](int h) {
        // Beyond 2^24, float32 may not hold the shift closely enough, hence the clamp. NaN stays NaN.
        const float power = x[h] - shift_[c];
        weight[c][h] = is_visible[h] ? exp2_approx(power > kDenseWeightBits ? kDenseWeightBits : power) : 0.f;
        sum_[c] += weight[c][h];
      });
      for_all<Values::kTiles>([&](int j) {
        output_[n][j][k] *= kept;
        output_[n][j][2 + k] *= kept;
      });
    });

    // --- values. Those that a row does not attend to may be NaN, and 0 · NaN would be NaN. So where rows do not all
    // attend to the same tokens of the tile, values are multiplied for each query token separately.
    const int last_row = min(first_row + Shape::kRows, rows.num_rows) - 1;
    const int first_query = rows.token(first_row), last_query = rows.token(last_row);
    const auto sees = [&](int query, int token) {
      const int position = span.first_position + query;
      return token >= start && token <= position &&
             (params.sliding_window == 0 || token > position - params.sliding_window) &&
             (token > position - params.residual_length || is_first(token));
    };
    bool is_same = true;
    for_all<2>([&](int h) {
      const int token = tile.token[h];
      is_same &= token < start || (sees(first_query, token) && sees(last_query, token));
    });
    const bool is_one = first_query == last_query || __all_sync(kAllLanes, is_same);
#pragma unroll 1
    for (int query = is_one ? last_query : first_query; query <= last_query; ++query) {
      const auto counts = [&](int c) { return is_one || query_token[c] == query; };
      const auto sees_token = [&](int token) { return sees(query, token); };
      if (params.value_side.tail_dtype == Dtype::bf16) {
        add_dense_values<Dtype::bf16>(tile, weight, counts, sees_token);
      } else {
        add_dense_values<Dtype::fp16>(tile, weight, counts, sees_token);
      }
    }
  }

  // Brings the output to the units of codes.
  __device__ __forceinline__ void end_dense_tokens() {
    if constexpr (Shape::kHasValueZero) {
      for_all<kColumnTiles, kColumnsPerTile, Values::kTiles>([&](int n, int i, int j) {
        output_[n][j][i] *= 1.f / unit_of_output<Shape::kValue>(j, 0);
        output_[n][j][2 + i] *= 1.f / unit_of_output<Shape::kValue>(j, 1);
      });
    }
    bool is_unset = false;
    for_all<kColumns>([&](int c) { is_unset |= maximum_[c] == -INFINITY; });
    is_fresh_ = __any_sync(kAllLanes, is_unset);
  }

  // Writes maximum, sum and output to shared memory; `outputs` is this warp's [kRows][kOutputStride].
  __device__ __forceinline__ void share(float* outputs, float2* sums) const {
    constexpr int kTilesAtOnce = Values::kTilesPerChunk > 1 ? 2 : 1;
    for_all<kColumnTiles, Shape::kColumnsPerTile>([&](int n, int i) {
      float* row = outputs + row_of(2 * n + i) * Shape::kOutputStride;
#pragma unroll
      for (int j = 0; j < Values::kTiles; j += kTilesAtOnce) {
        float* to = row + Values::channel(g_, j);
        const float2 values = {output_[n][j][i], output_[n][j][2 + i]};
        if constexpr (kTilesAtOnce == 2) {
          *reinterpret_cast<float4*>(to) =
              make_float4(values.x, values.y, output_[n][j + 1][i], output_[n][j + 1][2 + i]);
        } else {
          *reinterpret_cast<float2*>(to) = values;
        }
      }
    });
    if (g_ > 0) return;
    for_all<kColumns>([&](int c) { sums[row_of(c)] = make_float2(maximum_[c], sum_[c]); });
  }

 private:
  using ValueMatrices = uint32_t[kTiles][Values::kLoads][4];

  __device__ __forceinline__ void load_values(const unsigned char* stage, ValueMatrices& values) const {
    const uint32_t at = shared_address(stage);
    for_all<kTiles, Values::kLoads>([&](int i, int load) {
      load_matrices<true>(at + RowLayout<Shape::kValueRowBytes>::at(values_at_, 2 * i, load * 32), values[i][load]);
    });
  }

  __device__ __forceinline__ void add_values(const ValueMatrices& values) {
    static_assert(kNumGroups == 1 || Values::kChunks == kNumGroups, "one chunk a group");
    for_all<kTiles, Values::kChunks>([&](int i, int chunk) {
      const uint32_t* halves = values[i][chunk / 2] + chunk % 2 * 2;
      for_value_operands<Shape::kValue>(halves[0], halves[1],
                                        [&](int index, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
                                          for_all<kColumnTiles>([&](int n) {
                                            const uint32_t (&weights)[2] = operand_[i][kIsGrouped ? chunk : 0][n];
                                            multiply_halves(output_[n][chunk * Values::kTilesPerChunk + index], a0, a1,
                                                            a2, a3, weights[0], weights[1]);
                                          });
                                        });
    });
  }

  // Adds weights · values of a tile of dense tokens, for the columns and tokens that count.
  template <Dtype kDtype, class CountsColumn, class CountsToken>
  __device__ __forceinline__ void add_dense_values(const DenseTile<Shape>& tile, const float (&weight)[kColumns][2],
                                                   CountsColumn counts, CountsToken counts_token) {
    uint32_t operand[kColumnTiles][kWeightParts][2];
    for_all<kColumnTiles, 2>([&](int n, int h) {
      float rest[2] = {};
      for_all<kColumnsPerTile>([&](int k) {
        const int c = kColumnsPerTile * n + k;
        rest[k] = counts(c) ? weight[c][h] : 0.f;
      });
      for_all<kWeightParts>([&](int part) {
        const uint32_t pair =
            kDtype == Dtype::bf16 ? pack_bfloats(rest[0], rest[1]) : pack_halves(rest[0], rest[1]);
        for_all<2>([&](int k) {
          const uint32_t as_float = k == 0 ? pair << 16 : pair & 0xffff0000u;
          rest[k] -= kDtype == Dtype::bf16 ? __uint_as_float(as_float) : half_of(pair, k);
        });
        operand[n][part][h] = transpose(pair);
      });
    });
    tile.template multiply_values<kDtype>(operand, counts_token, output_);
  }

  // The query row, within the tile, of a lane's column.
  __device__ __forceinline__ int row_of(int column) const { return Shape::row_of(column, t_); }

  // Scales of this lane's tokens: word i is for tile i, halves 0 and 1.
  template <bool kHasZero>
  __device__ __forceinline__ void load_scales(const unsigned char* scales_at, const unsigned char* zeros_at,
                                              uint32_t (&scales)[kTiles], uint32_t (&zeros)[kTiles]) const {
    load_words<kHalves * 2>(scales_at + scale_at_, scales);
    if constexpr (kHasZero) load_words<kHalves * 2>(zeros_at + scale_at_, zeros);
  }

  // Adds a step's weights to the sums of rows.
  __device__ __forceinline__ void add_up(const float (&weight)[kTiles][2][kColumns]) {
    for_all<kTiles, 2, kColumns>([&](int i, int h, int c) { sum_[c] += weight[i][h][c]; });
  }

  // Scores of one tile of 16 tokens: rows g and g + 8, all columns.
  __device__ __forceinline__ void score_tile(const unsigned char* stage, int tile, const uint32_t (&scales)[kTiles],
                                             const uint32_t (&zeros)[kTiles], const float (&base)[kColumns],
                                             float (&score)[2][kColumns]) const {
    uint32_t words[2][Keys::kWords];
    for_all<2, Keys::kLoads>([&](int h, int load) {
      load_words<Keys::kLoadBytes>(
          stage + RowLayout<Shape::kKeyRowBytes>::at(key_at_, 2 * tile + h, load * 4 * Keys::kLoadBytes),
          &words[h][load * Keys::kWordsPerLoad]);
    });
    if constexpr (Shape::kKey == Storage::fp8) {
      for_all<kColumnTiles>([&](int n) {
        float product[4] = {};
        for_all<Keys::kWords>([&](int w) {
          multiply_halves(product, halves_of_e4m3(words[0][w] & 0xffff), halves_of_e4m3(words[1][w] & 0xffff),
                          halves_of_e4m3(words[0][w] >> 16), halves_of_e4m3(words[1][w] >> 16),
                          query_.words[n][0][w][0], query_.words[n][0][w][1]);
        });
        for_all<2>([&](int h) {
          const float scale = half_of(scales[tile], h);
          for_all<2>([&](int i) {
            const int c = 2 * n + i;
            score[h][c] = fmaf(product[2 * h + i] * factor_[c], scale, base[c]);
          });
        });
      });
    } else {
      for_all<kColumnTiles>([&](int n) {
        // Of each code of a byte; `later` ones stay in place and so count 2^bits times as much as the one before.
        int product[kParts][4] = {}, later[kCodesPerByte][kParts][4] = {};
        for_all<kParts>([&](int part) {
#pragma unroll
          for (int w = 0; w < Keys::kWords; w += 2) {
            for_all<kCodesPerByte>([&](int k) {
              constexpr uint32_t kMask = ((1u << kKeyBits) - 1) * 0x01010101u;  // all bits for int8
              const uint32_t mask = kMask << k * kKeyBits;
              multiply_bytes(k == 0 ? product[part] : later[k][part], words[0][w] & mask, words[1][w] & mask,
                             words[0][w + 1] & mask, words[1][w + 1] & mask, query_.words[n][part][w][k],
                             query_.words[n][part][w + 1][k]);
            });
          }
        });
        // All sums are multiples of what they count, so this is kFold times the sum over all codes.
        for_all<kParts, 4>([&](int part, int i) {
#pragma unroll
          for (int k = 1; k < kCodesPerByte; ++k) {
            product[part][i] = product[part][i] * (1 << kKeyBits) + later[k][part][i];
          }
        });
        for_all<2, kColumns / kColumnTiles>(
            [&](int h, int i) { score[h][kColumns / kColumnTiles * n + i] = base[kColumns / kColumnTiles * n + i]; });
        add_products(product, n, tile, scales, zeros, score);
      });
    }
  }

  static_assert(Shape::kHasValueZero == (bits_of(Shape::kValue) < 8));
  static constexpr int kKeyBits = bits_of(Shape::kKey), kCodesPerByte = 8 / kKeyBits;
  static constexpr int kFold = 1 << (8 - kKeyBits);  // of sums of products, see score_tile
  static constexpr int kParts = QueryOperands<Shape>::kParts;

  // Adds scale · (query · codes) + zero · Σ query to the scores of a column tile.
  __device__ __forceinline__ void add_products(const int (&product)[kParts][4], int n, int tile,
                                               const uint32_t (&scales)[kTiles], const uint32_t (&zeros)[kTiles],
                                               float (&score)[2][kColumns]) const {
    constexpr float kUnit = 1.f / kFold;
    for_all<2>([&](int h) {
      const float scale = half_of(scales[tile], h);
      const float zero = Shape::kHasKeyZero ? half_of(zeros[tile], h) : 0.f;
      for_all<Shape::kColumnsPerTile>([&](int i) {
        const int c = Shape::kColumnsPerTile * n + i;
        const int whole = Shape::kIsPaired ? product[0][2 * h] * 256 + product[0][2 * h + 1]
                                           : product[0][2 * h + i] * 256 + product[kParts - 1][2 * h + i];
        const float dot = fmaf(static_cast<float>(whole), factor_[c] * kUnit, -key_offset_ * sum_of_query_[c]);
        score[h][c] = fmaf(dot, scale, score[h][c]);
        if constexpr (Shape::kHasKeyZero) score[h][c] = fmaf(zero, sum_of_query_[c], score[h][c]);
      });
    });
  }

  // Applies softcap and ALiBi, and sets the scores of tokens that a row does not attend to to -inf.
  __device__ __forceinline__ void mask(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                       const Span& span, const float* constants, int step,
                                       float (&score)[kTiles][2][kColumns],
                                       bool (&is_visible)[kTiles][2][kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const RowView view(params, rows, segment, span, segment.row_tile * Shape::kRows + row_of(c));
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = step * Pipeline::kStepTokens + slot_ * kHalves + 2 * i + h;
          const float x = view.logit(params, score[i][h][c], constants[row_of(c)], token);
          is_visible[i][h][c] = view.sees(span, token);
          score[i][h][c] = is_visible[i][h][c] ? x : -INFINITY;
        }
      }
    }
  }

  template <bool kIsMasked>
  __device__ __forceinline__ float whole_score(float score, int column) const {
    return kIsMasked ? score : score + shift_[column];
  }

  // Raises the shift of all columns to what this step needs, scales the sums so far to match, and computes the step's
  // weights again. `room(tile, half)` is log2 of the scale that a weight will be multiplied by.
  template <bool kIsMasked, class Room>
  __device__ __forceinline__ void raise_shift(float (&score)[kTiles][2][kColumns],
                                              const bool (&is_visible)[kTiles][2][kColumns],
                                              float (&weight)[kTiles][2][kColumns], Room room) {
    bool is_unset = false;
    for_all<kColumns>([&](int c) {
      float wanted = -INFINITY;
      for_all<kTiles, 2>([&](int i, int h) {
        const float wish = whole_score<kIsMasked>(score[i][h][c], c) + room(i, h);
        if (!kIsMasked || is_visible[i][h][c]) wanted = fmaxf(wanted, wish);
      });
#pragma unroll
      for (int distance = 4; distance < kLanes; distance *= 2) {
        wanted = fmaxf(wanted, __shfl_xor_sync(kAllLanes, wanted, distance));
      }
      const float maximum = fmaxf(maximum_[c], wanted);
      const float shift = maximum == -INFINITY ? 0.f : maximum - kHeadroom;
      const float kept = maximum_[c] == -INFINITY ? 1.f : exp2_approx(shift_[c] - shift);
      for_all<kTiles, 2>([&](int i, int h) {
        // Beyond 2^24, float32 may not hold the shift closely enough, hence the clamp. NaN stays NaN.
        const float x = whole_score<kIsMasked>(score[i][h][c], c) - shift, most = kHeadroom - room(i, h);
        weight[i][h][c] = exp2_approx(x > most ? most : x);
      });
      maximum_[c] = maximum;
      shift_[c] = shift;
      is_unset |= maximum == -INFINITY;
      sum_[c] *= kept;
      const int n = Shape::kIsPaired ? 0 : c >> 1, column = Shape::kIsPaired ? 0 : c & 1;
      if constexpr (kIsGrouped) {
        groups_.lower(n, column, kept);
      } else {
        zero_[c] *= kept;
      }
      for_all<Values::kTiles>([&](int j) {
        output_[n][j][column] *= kept;
        output_[n][j][2 + column] *= kept;
      });
    });
    is_fresh_ = __any_sync(kAllLanes, is_unset);
  }

  // The B operand of weights times values for one tile: P' = weight · scale in float16. Sums weight · zero as well.
  template <bool kIsMasked>
  __device__ __forceinline__ void weigh(const float (&weight)[2][kColumns], const bool (&is_visible)[2][kColumns],
                                        uint32_t scales, uint32_t zeros, uint32_t (&operand)[kColumnTiles][2]) {
    for_all<2>([&](int h) {
      const float scale = half_of(scales, h);
      const float zero = Shape::kHasValueZero ? fmaf(scale, value_center_, half_of(zeros, h)) : 0.f;
      float scaled[kColumns];
      for_all<kColumns>([&](int c) {
        scaled[c] = weight[h][c] * scale;
        if constexpr (kIsMasked) scaled[c] = is_visible[h][c] ? scaled[c] : 0.f;
        if constexpr (Shape::kHasValueZero) {
          if (!kIsMasked || is_visible[h][c]) zero_[c] = fmaf(weight[h][c], zero, zero_[c]);
        }
      });
      for_all<kColumnTiles>([&](int n) {
        const uint32_t pair = Shape::kIsPaired ? pack_halves(scaled[0], 0.f)
                                               : pack_halves(scaled[2 * n % kColumns], scaled[(2 * n + 1) % kColumns]);
        operand[n][h] = transpose(pair);
        if constexpr (bits_of(Shape::kValue) < 8) {
          // Centres the codes, for weights as they were rounded: the rounding error of a weight is then multiplied by
          // the code's distance from the middle, not by the code.
          for_all<Shape::kColumnsPerTile>(
              [&](int i) { zero_[2 * n + i] = fmaf(half_of(pair, i), -middle_code(Shape::kValue), zero_[2 * n + i]); });
        }
      });
    });
  }

  int g_, t_, slot_;
  uint32_t values_at_, key_at_, scale_at_;  // in a stage: of the lane's first matrix row, words and scales
  QueryOperands<Shape> query_;              // without groups or blocks, like the next
  float key_offset_;
  float value_center_;  // what centred codes of values lack: the middle, 0 if symmetric
  float sum_of_query_[kColumns];
  Groups<Shape> groups_;  // with groups
  Blocks<Shape> blocks_;  // with blocks
  float factor_[kColumns];
  float maximum_[kColumns], shift_[kColumns], sum_[kColumns], zero_[kColumns];
  uint32_t operand_[kTiles][kNumGroups][kColumnTiles][2];  // weights of the previous step
  float output_[kColumnTiles][Values::kTiles][4];
  bool is_fresh_ = true;
};

}  // namespace hf_kvquant::cuda
