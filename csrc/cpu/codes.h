// Reads codes: how each storage type becomes float32, and the scales and zeros that go with a tile of tokens. How codes
// lie in a byte is in simd.h (`load_bits`, `load_u4`), by the rule of format.h. Codes are read centred: symmetric codes
// are then the numbers that they stand for, and keys with a zero cancel less.
//
//   value = scale · (code - center) + (zero + center · scale)
#pragma once

#include "simd.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int kTile = 64;
// Codes and scales are prefetched two tiles ahead, into L2: L1 holds little more than two tiles, so a prefetch into it
// would evict data in use (int8, 16k tokens, 2 threads: 1.76 ms a step; into L1 2.7, no prefetch 2.8, one tile ahead
// 1.73, eight 1.82; Zen 4).
constexpr int kTokensAhead = 2 * kTile;

inline uint8_t* codes_of(const Side& side, int b, int head, int token) {
  return side.codes + b * side.codes_stride_b + head * side.codes_stride_h + token * side.codes_stride_t;
}

constexpr float center_of(Storage storage) { return code_offset(storage, true); }

// --- codes -----------------------------------------------------------------------------------------------------------

// The codes of a storage type. Numbers of Storage::none are codes too, with a scale of 1.
template <Storage kStorage_, Dtype kDtype = Dtype::fp32>
struct Codes {
  static constexpr Storage kStorage = kStorage_;
  static constexpr bool kIsDense = kStorage == Storage::none;
  // Codes of these may be infinite or NaN themselves; integers are finite whenever their scale is.
  static constexpr bool kMayBeFlawed = kIsDense || kStorage == Storage::fp8;
  static constexpr bool kIsTile = false;
  static constexpr int kBits = !kIsDense ? bits_of(kStorage) : kDtype == Dtype::fp32 ? 32 : 16;
  static constexpr float kUnit = kStorage == Storage::fp8 ? 256.0f : 1.0f;  // see load_fp8_scaled

  static constexpr int bytes_of_channels(int count) { return count * kBits / 8; }

  // Channels c ... c + kWidth - 1 of a row, centred or as stored, divided by kUnit.
  template <bool kIsCentered = true>
  static Float load_at(const uint8_t* row, int c) {
    constexpr float kCenter = kIsCentered ? center_of(kStorage) : 0.0f;
    if constexpr (kStorage == Storage::none) {
      return load_dense<kDtype>(row, c);
    } else if constexpr (kStorage == Storage::fp8) {
      return load_fp8_scaled(row + c);
    } else if constexpr (kBits == 8) {
      return load_u8(row + c) - kCenter;
    } else if constexpr (kBits == 4) {
      return load_u4(row + c / 2) - kCenter;
    } else {
      return load_bits<kBits>(row, c) - kCenter;
    }
  }

  // The same for kCount channels, reading no further.
  template <int kCount, bool kIsCentered>
  static Float load_part_at(const uint8_t* row, int c) {
    uint8_t bytes[bytes_of_channels(kWidth)] = {};
    if (kCount < kWidth) std::memcpy(bytes, row + bytes_of_channels(c), bytes_of_channels(kCount));
    return kCount < kWidth ? load_at<kIsCentered>(bytes, 0) : load_at<kIsCentered>(row, c);
  }

  // Writes kCount codes from channel c on, rounded and with `offset` added. Those before c among the same eight channels
  // have been written.
  template <int kCount>
  static void store_at(uint8_t* row, int c, Float x, int offset) {
    if constexpr (kStorage != Storage::fp8 && kBits != 8 && kBits != 4) {
      store_bits<kBits, kCount>(row, c, round_to_int(x) + offset);
    } else {
      uint8_t bytes[kWidth];
      uint8_t* target = kCount == kWidth ? row + bytes_of_channels(c) : bytes;
      if constexpr (kStorage == Storage::fp8) {
        store_fp8(target, x);
      } else if constexpr (kBits == 8) {
        store_bytes(target, round_to_int(x) + offset);
      } else {
        store_nibbles(target, round_to_int(x) + offset);
      }
      if (kCount < kWidth) std::memcpy(row + bytes_of_channels(c), bytes, bytes_of_channels(kCount));
    }
  }
};

// A tile that was dequantised just now: it is in L1, its values are finite, and rows behind the last may be read.
struct TileCodes : Codes<Storage::none> {
  static constexpr bool kMayBeFlawed = false;
  static constexpr bool kIsTile = true;
};

// Calls `use` with the storage type as a constant; not for Storage::none, whose numbers have a dtype.
template <class Use>
inline void with_storage(Storage storage, Use use) {
  with_constant<Storage::int8, Storage::int4, Storage::fp8, Storage::int3, Storage::int2>(storage, use);
}

// Calls `use` with the Codes of a side.
template <class Use>
inline void with_codes(const Side& side, Use use) {
  with_storage(side.storage, [&](auto storage) { use(Codes<storage>()); });
  if (side.storage != Storage::none) return;
  with_dtype(side.dense_dtype, [&](auto dtype) { use(Codes<Storage::none, dtype>()); });
}

// --- scales and zeros ------------------------------------------------------------------------------------------------

// The scales or zeros of one head.
struct Plane {
  half_bits* data;  // nullptr: none
  int64_t stride_g, stride_t;

  half_bits* at(int g, int64_t t) const { return data + g * stride_g + t * stride_t; }
};

inline Plane scales_of(const Side& side, int b, int head) {
  const int64_t offset = b * side.scale_stride_b + head * side.scale_stride_h;
  return {side.scale == nullptr ? nullptr : side.scale + offset, side.scale_stride_g, side.scale_stride_t};
}
inline Plane zeros_of(const Side& side, int b, int head) {
  const int64_t offset = b * side.zero_stride_b + head * side.zero_stride_h;
  return {side.zero == nullptr ? nullptr : side.zero + offset, side.zero_stride_g, side.zero_stride_t};
}

// Loads `count` tokens of a plane as float32 [num_groups, kTile], and 0 for the rest of the tile.
inline void load_plane(const Plane& plane, int num_groups, int begin, int count, float* result, Float& flaws) {
  for (int g = 0; g < num_groups; ++g) {
    const half_bits* row = plane.at(g, begin);
    float* target = result + g * kTile;
    for (int t = 0; t < kTile; t += 32) prefetch(row + (kTokensAhead + t) * plane.stride_t);
    int t = 0;
    if (plane.stride_t == 1) {
      for (; t + kWidth <= count; t += kWidth) store(target + t, load_dense<Dtype::fp16>(row, t));
    } else if (plane.stride_t == 0) {
      const float shared = half_to_float(*row);
      for (; t < count; ++t) target[t] = shared;
    }
    for (; t < count; ++t) target[t] = half_to_float(row[t * plane.stride_t]);
    for (; t < kTile; ++t) target[t] = 0.0f;
    for (t = 0; t < kTile; t += kWidth) check_finite(load(target + t), flaws);
  }
}

// Scales of a tile, and its zeros (for centred codes or as stored), both [num_groups, kTile]; no `zero` is written if
// symmetric. Returns whether all are finite. Without a scale plane (dense numbers, and codes whose scales are in the
// query) scales are 1.
inline bool load_scales(const Side& side, int b, int head, int begin, int count, float* scale, float* zero,
                        bool is_centered = true) {
  if (side.scale == nullptr) {
    for (int t = 0; t < kTile; t += kWidth) store(scale + t, broadcast(1.0f));
    return true;
  }
  Float flaws = zeros();
  load_plane(scales_of(side, b, head), side.num_groups, begin, count, scale, flaws);
  if (!side.is_symmetric) {
    load_plane(zeros_of(side, b, head), side.num_groups, begin, count, zero, flaws);
    const Float center = broadcast(center_of(side.storage));
    for (int i = 0; is_centered && i < side.num_groups * kTile; i += kWidth) {
      store(zero + i, fma(load(scale + i), center, load(zero + i)));
    }
  }
  return is_finite(flaws);
}

// --- whole values ----------------------------------------------------------------------------------------------------

// Tokens begin ... begin + count - 1 of one side as float32 [count, stride], with zeros behind the channels. Returns
// whether all values are finite.
template <class Kind, bool kIsSymmetric>
bool dequantize_rows(const Side& side, int b, int head, int begin, int count, float* tile, int stride) {
  const int group_size = side.head_dim / side.num_groups;
  const Plane scale_plane = scales_of(side, b, head), zero_plane = zeros_of(side, b, head);
  Float flaws = zeros();
  for (int token = begin; token < begin + count; ++token, tile += stride) {
    const uint8_t* row = codes_of(side, b, head, token);
    for (int g = 0; g < side.num_groups; ++g) {
      const float scale = scale_plane.data == nullptr ? 1.0f : half_to_float(*scale_plane.at(g, token));
      const float zero = kIsSymmetric ? 0.0f : half_to_float(*zero_plane.at(g, token));
      const Float scales = broadcast(scale * Kind::kUnit), zeros_of_all = broadcast(zero);
      check_finite(scales, flaws);
      check_finite(zeros_of_all, flaws);
      for_vectors(g * group_size, (g + 1) * group_size, [&](int c, auto size) {
        // Like reference.dequantize, from codes as stored, whose product with a scale is exact.
        Float x = Kind::template load_part_at<size, kIsSymmetric>(row, c);
        if constexpr (!Kind::kIsDense) x = kIsSymmetric ? x * scales : fma(x, scales, zeros_of_all);
        if constexpr (Kind::kMayBeFlawed) check_finite(x, flaws);
        store_part<size>(tile + c, x);
      });
    }
    for (int c = side.head_dim; c < stride; ++c) tile[c] = 0.0f;
  }
  return is_finite(flaws);
}

inline bool dequantize_tile(const Side& side, int b, int head, int begin, int count, float* tile, int stride) {
  bool is_finite = true;
  with_codes(side, [&](auto codes) {
    const auto dequantize = side.is_symmetric ? dequantize_rows<decltype(codes), true>
                                              : dequantize_rows<decltype(codes), false>;
    is_finite = dequantize(side, b, head, begin, count, tile, stride);
  });
  return is_finite;
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
