// The two inner products of attention in float32, for every storage type and shape, on every processor:
//
//   score_codes, add_codes  read codes and convert them in registers: no tile is written, and scales and zeros stay
//                           outside the loop. For few rows, as every four rows convert the codes again. A token of
//                           one kv head of 128 channels takes 140 clocks instead of 200 with fp8, 107 instead of 150
//                           with dense bf16 (4 rows, AVX-512, Zen 4).
//   score_tile, add_tile    dequantise a tile to scratch memory first, which all rows share.
//
// Both end in the same loops, score_rows and add_rows. attend_table.h says which serves what.
#pragma once

#include "attend_work.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

// --- loops -----------------------------------------------------------------------------------------------------------

// Vectors of channels whose sums add_rows keeps in registers for each of up to 4 rows.
constexpr int kValueVectors = kWidth == 16 ? 4 : 2;

// Rows of codes, or of a dequantised tile, from the first token of a tile on.
struct CodeRows {
  const uint8_t* codes;
  int64_t stride;  // in bytes
  int num_channels;
};

// query · code of kRows rows and `count` tokens: kWidth sums at a time, which are added across lanes together. With 4
// rows and AVX-512 these are 4 tokens, so each load of either side feeds 4 multiply-adds. Inlined, it lacks registers.
template <class Kind, int kRows>
[[gnu::noinline]] void score_rows(CodeRows source, int count, const float* query, int query_stride, float* scores) {
  constexpr int kTokens = kWidth / kRows;
  for (int t = 0; t < count; t += kTokens) {
    const uint8_t* tokens[kTokens];
    for (int n = 0; n < kTokens; ++n) {
      tokens[n] = source.codes + (Kind::kIsTile ? t + n : min_of(t + n, count - 1)) * source.stride;
      for (int i = 0; !Kind::kIsTile && i < source.num_channels * Kind::kBits / 8; i += 64) {
        prefetch(tokens[n] + kTokensAhead * source.stride + i);
      }
    }
    Float sums[kWidth];
    for (int i = 0; i < kWidth; ++i) sums[i] = zeros();
    for (int c = 0; c < source.num_channels; c += kWidth) {
      Float q[kRows];
      for (int r = 0; r < kRows; ++r) q[r] = load(query + r * query_stride + c);
      for (int n = 0; n < kTokens; ++n) {
        const Float keys = Kind::load_at(tokens[n], c);
        for (int r = 0; r < kRows; ++r) sums[r * kTokens + n] = fma(q[r], keys, sums[r * kTokens + n]);
      }
    }
    float totals[kWidth];
    store(totals, sum_each(sums));
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kTile + t, totals + r * kTokens, sizeof(float) * kTokens);
  }
}

// Rows of sums to add to, and how: out = out · rescale + sum of weight · code + constant.
struct SumRows {
  float* out;
  int stride;
  const float* weights;  // [row, kTile]
  const Row* rows;
  const float* constants;  // [row]; nullptr for a tile
};

// kRows rows and the kVectors vectors of channels from c on. Returns NaN in some lane if a code is not finite, else
// zeros.
template <class Kind, int kRows, int kVectors>
inline Float add_block(const CodeRows& source, int c, int count, const SumRows& target) {
  Float flaws = zeros();
  Float sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zeros();
  }
  const uint8_t* row = source.codes + c * Kind::kBits / 8;
  for (int t = 0; t < count; ++t, row += source.stride) {
    Float values[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      values[v] = Kind::load_at(row, v * kWidth);
      if constexpr (Kind::kMayBeFlawed) check_finite(values[v], flaws);
    }
    if (!Kind::kIsTile) prefetch(row + kTokensAhead * source.stride);
    for (int r = 0; r < kRows; ++r) {
      const Float weight = broadcast(target.weights[r * kTile + t]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, values[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* out = target.out + r * target.stride + c + v * kWidth;
      if constexpr (!Kind::kIsTile) sums[r][v] += target.constants[r];
      store(out, fma(load(out), broadcast(target.rows[r].rescale), sums[r][v]));
    }
  }
  return flaws;
}

// All channels. Returns whether all codes are finite. Inlined, it lacks registers, too.
template <class Kind, int kRows>
[[gnu::noinline]] bool add_rows(CodeRows source, int count, SumRows target) {
  Float flaws = zeros();
  int c = 0;
  for (; c + kValueVectors * kWidth <= source.num_channels; c += kValueVectors * kWidth) {
    flaws += add_block<Kind, kRows, kValueVectors>(source, c, count, target);
  }
  for (; c < source.num_channels; c += kWidth) flaws += add_block<Kind, kRows, 1>(source, c, count, target);
  return is_finite(flaws);
}

// --- directly from codes ---------------------------------------------------------------------------------------------

inline void score_codes(const Work& work, const Keys& keys, int begin, int count) {
  const Side& side = keys.side;
  const AttendTask& task = work.task;
  load_scales(side, work.slot, task.kv_head, begin, count, work.key_scale, work.key_zero);
  const CodeRows source = {codes_of(side, work.slot, task.kv_head, begin), side.codes_stride_t, side.head_dim};
  with_codes(side, [&](auto kind) {
    using Kind = decltype(kind);
    for_row_blocks(task.num_rows, [&](auto size, int r) {
      score_rows<Kind, size>(source, count, keys.query + r * work.key_stride, work.key_stride,
                             work.scores + r * kTile);
    });
    for (int r = 0; r < task.num_rows; ++r) {
      for (int t = 0; t < count; t += kWidth) {
        float* scores = work.scores + r * kTile + t;
        Float x = load(scores) * (load(work.key_scale + t) * Kind::kUnit);
        if (!side.is_symmetric) x = fma(load(work.key_zero + t), broadcast(work.query_sums[r]), x);
        store(scores, x);
      }
    }
  });
}

// Returns false and changes nothing if something in the tile is not finite.
inline bool add_codes(const Work& work, const Values& values, int, int begin, int count) {
  const Side& side = values.side;
  const AttendTask& task = work.task;
  if (!load_scales(side, work.slot, task.kv_head, begin, count, work.value_scale, work.value_zero)) return false;
  const CodeRows source = {codes_of(side, work.slot, task.kv_head, begin), side.codes_stride_t, side.head_dim};
  bool is_done = true;
  with_codes(side, [&](auto kind) {
    using Kind = decltype(kind);
    for_row_blocks(task.num_rows, [&](auto size, int first) {
      if (!is_done) return;  // found with the first rows, before anything is added: all rows use the same codes
      float constants[size];
      const SumRows target = {values.out + first * values.stride, values.stride, work.row_weights,
                              values.rows + first, constants};
      for (int r = 0; r < size; ++r) {
        const float* p = work.scores + (first + r) * kTile;
        Float zero_sum = zeros();
        for (int t = 0; t < kTile; t += kWidth) {
          store(work.row_weights + r * kTile + t, load(p + t) * (load(work.value_scale + t) * Kind::kUnit));
          if (!side.is_symmetric) zero_sum = fma(load(p + t), load(work.value_zero + t), zero_sum);
        }
        constants[r] = sum_of(zero_sum);
        float* saved = work.saved_out + r * work.value_stride;
        if (Kind::kMayBeFlawed) std::memcpy(saved, target.out + r * values.stride, sizeof(float) * side.head_dim);
      }
      is_done = add_rows<Kind, size>(source, count, target);
      for (int r = 0; !is_done && r < size; ++r) {
        const float* saved = work.saved_out + r * work.value_stride;
        std::memcpy(target.out + r * values.stride, saved, sizeof(float) * side.head_dim);
      }
    });
  });
  return is_done;
}

// --- from a dequantised tile -----------------------------------------------------------------------------------------

// Few rows do little work with each dequantised number, so it should still be in L1: 16 tokens at a time (8 KB at
// head_dim 128) instead of all 64. Many rows would load and store their sums too often that way.
inline int tokens_at_once(const AttendTask& task) { return task.num_rows <= 8 ? 16 : kTile; }

inline void score_tile(const Work& work, const Keys& keys, int begin, int count) {
  const AttendTask& task = work.task;
  const CodeRows source = {reinterpret_cast<const uint8_t*>(work.tile), work.key_stride * 4, work.key_stride};
  for (int t = 0; t < count; t += tokens_at_once(task)) {
    const int tokens = min_of(tokens_at_once(task), count - t);
    dequantize_tile(keys.side, work.slot, task.kv_head, begin + t, tokens, work.tile, work.key_stride);
    for_row_blocks(task.num_rows, [&](auto size, int r) {
      score_rows<TileCodes, size>(source, tokens, keys.query + r * work.key_stride, work.key_stride,
                                  work.scores + r * kTile + t);
    });
  }
}

// Replaces values of the tile that are not finite by 0 and makes the sums of the rows that see them NaN, channel by
// channel. See attend.h on masking.
inline void poison(const Work& work, const Values& values, int token, int count) {
  for (int t = 0; t < count; ++t) {
    float* value = work.tile + t * work.value_stride;
    for (int c = 0; c < values.side.head_dim; ++c) {
      if (value[c] - value[c] == 0.0f) continue;
      value[c] = 0.0f;
      for (int r = 0; r < work.task.num_rows; ++r) {
        const Row& row = values.rows[r];
        if (row.begin <= token + t && token + t < row.end) values.out[r * values.stride + c] = kNan;
      }
    }
  }
}

// Always returns true.
inline bool add_tile(const Work& work, const Values& values, int token, int begin, int count) {
  const AttendTask& task = work.task;
  const CodeRows source = {reinterpret_cast<const uint8_t*>(work.tile), work.value_stride * 4, work.value_stride};
  for (int t = 0; t < count; t += tokens_at_once(task)) {
    const int tokens = min_of(tokens_at_once(task), count - t);
    if (!dequantize_tile(values.side, work.slot, task.kv_head, begin + t, tokens, work.tile, work.value_stride)) {
      poison(work, values, token + t, tokens);
    }
    for_row_blocks(task.num_rows, [&](auto size, int first) {
      add_rows<TileCodes, size>(source, tokens, {values.out + first * values.stride, values.stride,
                                                 work.scores + first * kTile + t, values.rows + first, nullptr});
    });
    for (int r = 0; r < task.num_rows; ++r) values.rows[r].rescale = 1.0f;
  }
  return true;
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
