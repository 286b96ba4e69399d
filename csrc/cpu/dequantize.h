// Loads a tile of tokens as float32: either whole values (dequantize_tile), or the scales and zeros of the tokens alone
// (load_scales), for kernels that multiply centred codes and apply scales outside their loop. attend.h decides which.
#pragma once

#include "simd.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int kTile = 64;
// Codes and scales are prefetched two tiles ahead, into L2: L1 holds little more than two tiles, so a prefetch into it
// would evict data in use (int8, 16k tokens, 2 threads: 1.76 ms a step; into L1 2.7, no prefetch 2.8, one tile ahead
// 1.73, eight 1.82; Zen 4).
constexpr int kTokensAhead = 2 * kTile;

inline const uint8_t* codes_of(const Side& side, int b, int head, int token) {
  return side.codes + b * side.codes_stride_b + head * side.codes_stride_h + token * side.codes_stride_t;
}

// Subtracted from integer codes before they are multiplied. Symmetric codes then are the numbers they stand for; with a
// zero, there is less cancellation.
inline float center_of(const Side& side) {
  return side.storage == Storage::int8 ? 128.0f : side.storage == Storage::int4 ? 8.0f : 0.0f;
}

// --- scales and zeros ------------------------------------------------------------------------------------------------

// Loads `count` tokens of a scale or zero plane as float32 [num_groups, kTile], and 0 for the rest of the tile. Returns
// whether all of them are finite.
inline bool load_plane(const half_bits* plane, int64_t stride_g, int64_t stride_t, int num_groups, int begin, int count,
                       float* result) {
  Float flaws = zeros();
  for (int g = 0; g < num_groups; ++g) {
    const half_bits* row = plane + g * stride_g + begin * stride_t;
    float* target = result + g * kTile;
    for (int t = 0; t < kTile; t += 32) prefetch(row + (kTokensAhead + t) * stride_t);
    int t = 0;
    if (stride_t == 1) {
      for (; t + kWidth <= count; t += kWidth) store(target + t, load_half(row + t));
    } else if (stride_t == 0) {
      const float shared = half_to_float(*row);
      for (; t < count; ++t) target[t] = shared;
    }
    for (; t < count; ++t) target[t] = half_to_float(row[t * stride_t]);
    for (; t < kTile; ++t) target[t] = 0.0f;
    for (t = 0; t < kTile; t += kWidth) flaws = or_bits(flaws, sub(load(target + t), load(target + t)));
  }
  return sum_of(flaws) == 0.0f;
}

// Scales and zeros of a tile, [num_groups, kTile]; no `zero` is written if symmetric. Returns whether all are finite.
inline bool load_scales(const Side& side, int b, int head, int begin, int count, float* scale, float* zero) {
  bool is_finite = load_plane(side.scale + b * side.scale_stride_b + head * side.scale_stride_h, side.scale_stride_g,
                              side.scale_stride_t, side.num_groups, begin, count, scale);
  if (!side.is_symmetric) {
    is_finite &= load_plane(side.zero + b * side.zero_stride_b + head * side.zero_stride_h, side.zero_stride_g,
                            side.zero_stride_t, side.num_groups, begin, count, zero);
  }
  return is_finite;
}

// Adjusts zeros for centred codes: x = scale · (code - center) + (zero + center · scale).
inline void center_zeros(const Side& side, const float* scale, float* zero) {
  const Float center = broadcast(center_of(side));
  for (int i = 0; i < side.num_groups * kTile; i += kWidth) {
    store(zero + i, fma(load(scale + i), center, load(zero + i)));
  }
}

// --- codes -----------------------------------------------------------------------------------------------------------

template <Storage kStorage>
inline Float load_codes_at(const uint8_t* row, int c) {
  if constexpr (kStorage == Storage::int4) return load_u4(row + c / 2);
  if constexpr (kStorage == Storage::int8) return load_u8(row + c);
  if constexpr (kStorage == Storage::fp8) return load_fp8_scaled(row + c);
}

// --- whole values ----------------------------------------------------------------------------------------------------

// One row of codes as float32. load_codes(c) returns the codes from channel c on, finish(codes, c) their values.
template <class Load, class LoadTail, class Finish>
inline void expand_row(int head_dim, int stride, float* row, Load load_codes, LoadTail load_tail, Finish finish) {
  int c = 0;
  for (; c + kWidth <= head_dim; c += kWidth) store(row + c, finish(load_codes(c), c));
  if (c < head_dim) {  // 8 channels of a vector of 16, through a copy that does not read past the row
    float values[kWidth];
    store(values, finish(load_tail(c, head_dim - c), c));
    std::memcpy(row + c, values, sizeof(float) * (head_dim - c));
    c = head_dim;
  }
  for (; c < stride; ++c) row[c] = 0.0f;
}

// Multiplies codes by scales and adds zeros in float32, as reference.dequantize does: code · scale is exact.
// kIsChecked: whether the caller wants to know if all values are finite.
template <Storage kStorage, bool kIsSymmetric, bool kIsChecked>
bool dequantize_rows(const Side& side, int b, int head, int begin, int count, float* tile, int stride, float* scale_row,
                     float* zero_row) {
  constexpr float kOffset = !kIsSymmetric || kStorage == Storage::fp8 ? 0.0f
                            : kStorage == Storage::int8               ? 128.0f
                                                                      : 8.0f;
  const uint8_t* codes = side.codes + b * side.codes_stride_b + head * side.codes_stride_h;
  const half_bits* scale = side.scale + b * side.scale_stride_b + head * side.scale_stride_h;
  const half_bits* zero = kIsSymmetric ? nullptr : side.zero + b * side.zero_stride_b + head * side.zero_stride_h;
  const int group_size = side.head_dim / side.num_groups;
  const Float offset = broadcast(kOffset);
  float flaw = 0.0f;  // becomes NaN with the first scale or zero that is not finite
  Float flaws = zeros();
  for (int t = 0; t < count; ++t) {
    const int64_t token = begin + t;
    const uint8_t* row = codes + token * side.codes_stride_t;
    const auto load_row = [row](int c) { return load_codes_at<kStorage>(row, c); };
    const auto load_tail = [row](int c, int remaining) {
      uint8_t bytes[kWidth] = {};
      constexpr int kPerByte = kStorage == Storage::int4 ? 2 : 1;
      std::memcpy(bytes, row + c / kPerByte, remaining / kPerByte);
      return load_codes_at<kStorage>(bytes, 0);
    };
    const auto value_of = [&](Float code, Float s, Float z) {
      Float x;
      if constexpr (kIsSymmetric) {
        x = mul(sub(code, offset), s);
      } else {
        x = fma(code, s, z);
      }
      if constexpr (kStorage == Storage::fp8 && kIsChecked) flaws = or_bits(flaws, sub(x, x));
      return x;
    };
    for (int g = 0; g < side.num_groups; ++g) {
      constexpr float kUnit = kStorage == Storage::fp8 ? 256.0f : 1.0f;  // see load_fp8_scaled
      const float s = kUnit * half_to_float(scale[g * side.scale_stride_g + token * side.scale_stride_t]);
      const float z = kIsSymmetric ? 0.0f : half_to_float(zero[g * side.zero_stride_g + token * side.zero_stride_t]);
      flaw += (s - s) + (z - z);
      if (side.num_groups == 1) {
        const Float scales = broadcast(s), offsets = broadcast(z);
        expand_row(side.head_dim, stride, tile + t * stride, load_row, load_tail,
                   [&](Float code, int) { return value_of(code, scales, offsets); });
      } else {
        for (int c = g * group_size; c < (g + 1) * group_size; ++c) {
          scale_row[c] = s;
          zero_row[c] = z;
        }
      }
    }
    if (side.num_groups > 1) {
      expand_row(side.head_dim, stride, tile + t * stride, load_row, load_tail,
                 [&](Float code, int c) { return value_of(code, load(scale_row + c), load(zero_row + c)); });
    }
  }
  return flaw == 0.0f && sum_of(flaws) == 0.0f;
}

// For granularity channel: tokens of one block. Scales need no check for finiteness: keys are not summed over tokens.
inline void dequantize_block(const Side& side, int b, int head, int begin, int count, float* tile, int stride,
                             float* scale_row, float* zero_row) {
  const int64_t block = begin / kBlockSize;
  const int size = side.head_dim;
  convert_dense(side.scale, Dtype::fp16, b * side.scale_stride_b + head * side.scale_stride_h +
                                             block * side.scale_stride_g, size, scale_row);
  convert_dense(side.zero, Dtype::fp16, b * side.zero_stride_b + head * side.zero_stride_h +
                                            block * side.zero_stride_g, size, zero_row);
  for (int t = 0; t < count; ++t) {
    const uint8_t* row = codes_of(side, b, head, begin + t);
    expand_row(
        size, stride, tile + t * stride, [row](int c) { return load_u4(row + c / 2); },
        [row](int c, int remaining) {
          uint8_t bytes[kWidth] = {};
          std::memcpy(bytes, row + c / 2, remaining / 2);
          return load_u4(bytes);
        },
        [&](Float code, int c) { return fma(code, load(scale_row + c), load(zero_row + c)); });
  }
}

template <Dtype kDtype, bool kIsChecked>
bool widen_rows(const Side& side, int b, int head, int begin, int count, float* tile, int stride) {
  const uint8_t* codes = side.codes + b * side.codes_stride_b + head * side.codes_stride_h;
  Float flaws = zeros();
  for (int t = 0; t < count; ++t) {
    const uint8_t* row = codes + static_cast<int64_t>(begin + t) * side.codes_stride_t;
    expand_row(
        side.head_dim, stride, tile + t * stride, [row](int c) { return load_dense<kDtype>(row, c); },
        [row](int c, int remaining) {
          float values[kWidth] = {};
          convert_dense(row, kDtype, c, remaining, values);
          return load(values);
        },
        [&flaws](Float x, int) {
          if constexpr (kIsChecked) flaws = or_bits(flaws, sub(x, x));
          return x;
        });
  }
  return sum_of(flaws) == 0.0f;
}

// Tokens begin ... begin + count - 1 of one side as float32 [kTile, stride]; further rows up to a multiple of 16 are 0.
// Returns whether all values are finite, if kIsChecked.
template <bool kIsChecked>
bool dequantize_tile(const Side& side, int b, int head, int begin, int count, float* tile, int stride, float* scale_row,
                     float* zero_row) {
  const int padded = round_up(count, 16);
  std::memset(tile + count * stride, 0, sizeof(float) * (padded - count) * stride);
  const auto quantized = [&](auto kernel) {
    return kernel(side, b, head, begin, count, tile, stride, scale_row, zero_row);
  };
  if (side.has_channel_scales) {
    dequantize_block(side, b, head, begin, count, tile, stride, scale_row, zero_row);
    return true;
  }
  const bool is_symmetric = side.is_symmetric;
  switch (side.storage) {
    case Storage::int8:
      return is_symmetric ? quantized(dequantize_rows<Storage::int8, true, kIsChecked>)
                          : quantized(dequantize_rows<Storage::int8, false, kIsChecked>);
    case Storage::int4:
      return is_symmetric ? quantized(dequantize_rows<Storage::int4, true, kIsChecked>)
                          : quantized(dequantize_rows<Storage::int4, false, kIsChecked>);
    case Storage::fp8:
      return quantized(dequantize_rows<Storage::fp8, true, kIsChecked>);
    case Storage::none:
      break;
  }
  switch (side.dense_dtype) {
    case Dtype::fp32:
      return widen_rows<Dtype::fp32, kIsChecked>(side, b, head, begin, count, tile, stride);
    case Dtype::bf16:
      return widen_rows<Dtype::bf16, kIsChecked>(side, b, head, begin, count, tile, stride);
    case Dtype::fp16:
      break;
  }
  return widen_rows<Dtype::fp16, kIsChecked>(side, b, head, begin, count, tile, stride);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
