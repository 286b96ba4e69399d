// The two inner products of attend.h, computed directly from codes in registers for few query rows: no float32 tile is
// written and read again, and scales and zeros stay outside the loop. Serves every storage type with one scale per
// token. A token of one kv head of 128 channels then takes 140 clocks instead of 200 with fp8, 107 instead of 150 with
// dense bf16 (4 rows, AVX-512, Zen 4). attend.h decides when to use this.
#pragma once

#include "dequantize.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

template <Storage kStorage_, Dtype kDtype_ = Dtype::fp32>
struct Codes {
  static constexpr Storage kStorage = kStorage_;
  // Codes of these may be infinite or NaN themselves; integers are finite whenever their scale is.
  static constexpr bool kMayBeFlawed = kStorage == Storage::none || kStorage == Storage::fp8;

  static constexpr int kBits = kStorage == Storage::int4   ? 4
                               : kStorage != Storage::none ? 8
                               : kDtype_ == Dtype::fp32    ? 32
                                                           : 16;

  // Channels c ... c + kWidth - 1 of a row, centred.
  static Float load_at(const uint8_t* row, int c) {
    if constexpr (kStorage == Storage::none) {
      return load_dense<kDtype_>(row, c);
    } else if constexpr (kStorage == Storage::fp8) {
      return load_fp8_scaled(row + c);
    } else {
      return sub(load_codes_at<kStorage>(row, c), broadcast(kStorage == Storage::int8 ? 128.0f : 8.0f));
    }
  }
};

template <class Use>
inline auto with_codes(const Side& side, Use use) {
  switch (side.storage) {
    case Storage::int8:
      return use(Codes<Storage::int8>());
    case Storage::int4:
      return use(Codes<Storage::int4>());
    case Storage::fp8:
      return use(Codes<Storage::fp8>());
    case Storage::none:
      break;
  }
  if (side.dense_dtype == Dtype::fp32) return use(Codes<Storage::none, Dtype::fp32>());
  if (side.dense_dtype == Dtype::bf16) return use(Codes<Storage::none, Dtype::bf16>());
  return use(Codes<Storage::none, Dtype::fp16>());
}

// Scales and zeros to go with Codes::load_at, [kTile]; no `zero` is written if symmetric. Returns whether all are
// finite.
inline bool load_direct_scales(const Side& side, int b, int head, int begin, int count, float* scale, float* zero) {
  if (side.storage == Storage::none) {
    for (int t = 0; t < kTile; t += kWidth) store(scale + t, broadcast(1.0f));
    return true;
  }
  const bool is_finite = load_scales(side, b, head, begin, count, scale, zero);
  if (!side.is_symmetric) center_zeros(side, scale, zero);
  if (side.storage == Storage::fp8) {  // see load_fp8_scaled
    for (int t = 0; t < kTile; t += kWidth) store(scale + t, mul(load(scale + t), broadcast(256.0f)));
  }
  return is_finite;
}

// query · key of kRows rows and `count` tokens: kWidth sums at a time, which are added across lanes together.
template <int kRows>
void score_directly(const Side& side, const uint8_t* codes, int count, const float* query, int query_stride,
                    const float* query_sums, const float* scale, const float* zero, float* scores) {
  constexpr int kTokens = kWidth / kRows;
  const int row_bytes = row_bytes_of(side);
  with_codes(side, [&](auto kind) {
    for (int t = 0; t < count; t += kTokens) {
      const uint8_t* tokens[kTokens];
      for (int n = 0; n < kTokens; ++n) {
        tokens[n] = codes + min_of(t + n, count - 1) * side.codes_stride_t;
        for (int i = 0; i < row_bytes; i += 64) prefetch(tokens[n] + kTokensAhead * side.codes_stride_t + i);
      }
      Float sums[kWidth];
      for (int i = 0; i < kWidth; ++i) sums[i] = zeros();
      for (int c = 0; c < side.head_dim; c += kWidth) {
        Float q[kRows];
        for (int r = 0; r < kRows; ++r) q[r] = load(query + r * query_stride + c);
        for (int n = 0; n < kTokens; ++n) {
          const Float keys = decltype(kind)::load_at(tokens[n], c);
          for (int r = 0; r < kRows; ++r) sums[r * kTokens + n] = fma(q[r], keys, sums[r * kTokens + n]);
        }
      }
      float totals[kWidth];
      store(totals, sum_each(sums));
      for (int r = 0; r < kRows; ++r)
        std::memcpy(scores + r * kTile + t, totals + r * kTokens, sizeof(float) * kTokens);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    const Float query_sum = broadcast(query_sums[r]);
    for (int t = 0; t < count; t += kWidth) {
      Float x = mul(load(scores + r * kTile + t), load(scale + t));
      if (!side.is_symmetric) x = fma(load(zero + t), query_sum, x);
      store(scores + r * kTile + t, x);
    }
  }
}

// Sums of weight · codes of kRows rows and kVectors vectors of channels. Returns NaN in some lane if a code is not
// finite, else zeros.
template <class Kind, int kRows, int kVectors>
inline Float sum_block(const uint8_t* codes, int64_t stride_t, int c, int count, const float* weights, float* out,
                       int stride) {
  Float flaws = zeros();
  Float sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zeros();
  }
  for (int t = 0; t < count; ++t) {
    const uint8_t* row = codes + t * stride_t;
    Float values[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      values[v] = Kind::load_at(row, c + v * kWidth);
      if constexpr (Kind::kMayBeFlawed) flaws = or_bits(flaws, sub(values[v], values[v]));
    }
    prefetch(row + kTokensAhead * stride_t + c * Kind::kBits / 8);
    for (int r = 0; r < kRows; ++r) {
      const Float weight = broadcast(weights[r * kTile + t]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, values[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(out + r * stride + c + v * kWidth, sums[r][v]);
  }
  return flaws;
}

// Writes the sums of (p · scale) · codes of kRows rows and a tile to `out`; `weights` [kRows, kTile] is scratch.
// Returns false if a code is not finite.
template <int kRows>
bool sum_directly(const Side& side, const uint8_t* codes, int count, const float* p, const float* scale, float* weights,
                  float* out, int stride) {
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTile; t += kWidth) {
      store(weights + r * kTile + t, mul(load(p + r * kTile + t), load(scale + t)));
    }
  }
  const Float flaws = with_codes(side, [&](auto kind) {
    using Kind = decltype(kind);
    Float all = zeros();
    int c = 0;
    for (; c + kValueVectors * kWidth <= side.head_dim; c += kValueVectors * kWidth) {
      all = or_bits(all,
                    sum_block<Kind, kRows, kValueVectors>(codes, side.codes_stride_t, c, count, weights, out, stride));
    }
    for (; c < side.head_dim; c += kWidth) {
      all = or_bits(all, sum_block<Kind, kRows, 1>(codes, side.codes_stride_t, c, count, weights, out, stride));
    }
    return all;
  });
  return sum_of(flaws) == 0.0f;
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
