// What all kernels share: reading and writing values and rows of codes. A lane takes eight consecutive channels at a
// time, which are in one group for every group size. Layouts are in format.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "../../format.h"
#include "instructions.cuh"
#include "laps.h"

namespace hf_kvquant::cuda {

constexpr int kChunk = 8;  // channels of a lane
constexpr float kLog2E = 1.4426950408889634f;
constexpr half_bits kHalfNan = 0x7e00;

__device__ inline float half_to_float(half_bits bits) { return __half2float(__ushort_as_half(bits)); }
__device__ inline half_bits float_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ inline bool is_finite_half(half_bits bits) { return (bits & 0x7c00) != 0x7c00; }

__device__ inline float load_value(const void* data, Dtype dtype, int64_t index) {
  switch (dtype) {
    case Dtype::fp32: return static_cast<const float*>(data)[index];
    case Dtype::fp16: return __half2float(static_cast<const __half*>(data)[index]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  }
}

__device__ inline void store_value(void* data, Dtype dtype, int64_t index, float x) {
  switch (dtype) {
    case Dtype::fp32: static_cast<float*>(data)[index] = x; break;
    case Dtype::fp16: static_cast<__half*>(data)[index] = __float2half_rn(x); break;
    default: static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(x);
  }
}

// Two values rounded to 16 bits, the first in the low half.
__device__ inline uint32_t narrow(Dtype dtype, float low, float high) {
  if (dtype == Dtype::fp16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Stores eight values from element `first` on, a multiple of 16 bytes.
__device__ inline void store_values(void* data, Dtype dtype, int64_t first, const float (&x)[kChunk]) {
  if (dtype == Dtype::fp32) {
    float4* words = reinterpret_cast<float4*>(static_cast<float*>(data) + first);
    words[0] = {x[0], x[1], x[2], x[3]};
    words[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + first) = {
      narrow(dtype, x[0], x[1]), narrow(dtype, x[2], x[3]), narrow(dtype, x[4], x[5]), narrow(dtype, x[6], x[7])};
}

// Eight numbers of 16 bits.
__device__ inline void widen(const uint4& words, Dtype dtype, float (&x)[kChunk]) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint16_t bits = pairs[i / 2] >> (16 * (i % 2));
    x[i] = dtype == Dtype::fp16 ? half_to_float(bits) : __uint_as_float(uint32_t{bits} << 16);
  }
}

// Eight values from element `first` on, loaded at once if they start at a multiple of 16 bytes.
__device__ inline void load_values(const void* data, Dtype dtype, int64_t first, float (&x)[kChunk]) {
  const char* from = static_cast<const char*>(data) + first * (dtype == Dtype::fp32 ? 4 : 2);
  if (reinterpret_cast<int64_t>(from) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = load_value(data, dtype, first + i);
    return;
  }
  if (dtype == Dtype::fp32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 word = reinterpret_cast<const float4*>(from)[i];
      x[4 * i] = word.x, x[4 * i + 1] = word.y, x[4 * i + 2] = word.z, x[4 * i + 3] = word.w;
    }
    return;
  }
  widen(*reinterpret_cast<const uint4*>(from), dtype, x);
}

__device__ inline uint8_t* code_row(const Side& side, int64_t b, int64_t h, int64_t t) {
  return side.codes + b * side.codes_stride_b + h * side.codes_stride_h + t * side.codes_stride_t;
}

__device__ inline half_bits* scale_at(const Side& side, int64_t b, int64_t h, int64_t g, int64_t t) {
  return side.scale + b * side.scale_stride_b + h * side.scale_stride_h + g * side.scale_stride_g +
         t * side.scale_stride_t;
}

__device__ inline half_bits* zero_at(const Side& side, int64_t b, int64_t h, int64_t g, int64_t t) {
  return side.zero + b * side.zero_stride_b + h * side.zero_stride_h + g * side.zero_stride_g + t * side.zero_stride_t;
}

// --- codes

// The codes of eight channels, as stored in a row. This is the only place that knows how.
template <Storage kStorage>
struct Codes {
  static constexpr int kBits = bits_of(kStorage), kBytes = kBits;  // of one code, of all eight
  static constexpr int kPerWord = kBits * kChunk <= 32 ? kChunk : 32 / kBits, kNumWords = kChunk / kPerWord;
  static_assert(kPerWord * kNumWords == kChunk, "no code is in two words");
  // The lowest bit of every code in a word.
  static constexpr uint32_t kOnes = ((uint64_t{1} << kBits * kPerWord) - 1) / ((1u << kBits) - 1);
  uint32_t words[kNumWords];

  // From the first of the bytes of channels c ... c + 7 of a row.
  __device__ static uint8_t* at(uint8_t* row, int c) { return row + c / kChunk * kBytes; }

  __device__ static Codes load(const uint8_t* source) {
    Codes codes;
    if constexpr (kBytes % 4 == 0) {
      load_words<kBytes>(source, codes.words);
    } else if constexpr (kBytes == 2) {
      codes.words[0] = *reinterpret_cast<const uint16_t*>(source);
    } else {
      codes.words[0] = 0;
#pragma unroll
      for (int i = 0; i < kBytes; ++i) codes.words[0] |= uint32_t{source[i]} << (8 * i);
    }
    return codes;
  }

  __device__ void store(uint8_t* target) const {
    if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(target) = {words[0], words[1]};
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32_t*>(target) = words[0];
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(words[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes; ++i) target[i] = static_cast<uint8_t>(words[0] >> (8 * i));
    }
  }

  // The number that a code stands for, in units of the scale. `offset` as of code_offset.
  __device__ float value(int k, float offset) const {
    const uint32_t code = words[k / kPerWord] >> (kBits * (k % kPerWord)) & ((1u << kBits) - 1);
    if constexpr (is_integer(kStorage)) {
      // A code in the lowest bits of 2^23 is that number more: cheaper than a conversion, and as exact.
      return __uint_as_float(0x4b000000u | code) - (8388608.f + offset);
    } else {
      return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(code), __NV_E4M3)));
    }
  }
};

// Calls `use` with the storage type as a constant; not for Storage::none, which has no codes.
template <class Use>
__device__ inline void with_storage(Storage storage, Use use) {
  switch (storage) {
    case Storage::none: case Storage::int3: break;  // ops/kernels.py refuses int3
    case Storage::int8: return use(std::integral_constant<Storage, Storage::int8>());
    case Storage::int4: return use(std::integral_constant<Storage, Storage::int4>());
    case Storage::fp8: return use(std::integral_constant<Storage, Storage::fp8>());
    case Storage::int2: return use(std::integral_constant<Storage, Storage::int2>());
  }
}

// The same with whether the format is symmetric, which only integers need not be.
template <class Use>
__device__ inline void with_format(const Side& side, Use use) {
  with_storage(side.storage, [&](auto storage) {
    if constexpr (is_integer(storage.value)) {
      if (!side.is_symmetric) return use(storage, std::false_type());
    }
    use(storage, std::true_type());
  });
}

// Eight channels of a full block of granularity channel.
__device__ inline void load_of_block(const Side& side, int64_t b, int64_t h, int64_t t, int c, float (&x)[kChunk]) {
  const half_bits *scale = scale_at(side, b, h, t / kBlockSize, 0) + c,
                  *zero = zero_at(side, b, h, t / kBlockSize, 0) + c;
  using BlockCodes = Codes<Storage::int4>;
  const auto codes = BlockCodes::load(BlockCodes::at(code_row(side, b, h, t), c));
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = codes.value(i, 0.f) * half_to_float(scale[i]) + half_to_float(zero[i]);
}

// The eight channels from `c` on of a row, dequantised: code · scale + zero.
__device__ inline void load_channels(const Side& side, int64_t b, int64_t h, int64_t t, int c, float (&x)[kChunk]) {
  uint8_t* row = code_row(side, b, h, t);
  if (side.storage == Storage::none) return load_values(row, side.dense_dtype, c, x);
  if (side.has_channel_scales) return load_of_block(side, b, h, t, c, x);
  const int g = c / (side.head_dim / side.num_groups);
  const float scale = half_to_float(*scale_at(side, b, h, g, t));
  const float zero = side.is_symmetric ? 0.f : half_to_float(*zero_at(side, b, h, g, t));
  with_storage(side.storage, [&](auto storage) {
    const auto codes = Codes<storage.value>::load(Codes<storage.value>::at(row, c));
    const float offset = code_offset(storage.value, side.is_symmetric);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = codes.value(i, offset);
  });
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = x[i] * scale + zero;
}

// Which tokens of a sequence a query reads from the tail of a side.
struct Tail {
  int slot, start, dense_first, begin;  // slot: the index of the tail's first axis

  // Of a query that sees `num_seen` tokens of `length`. All numbers are clamped to what there is room for.
  __device__ Tail(const CacheParams& params, const Laps& laps, const Side& side, int b, int num_seen, int length,
                  int start)
      : slot(side.tail == nullptr ? 0 : laps.tail_slot(b)),
        start(max(start, 0)),
        dense_first(params.sink_length),
        begin(side.tail == nullptr
                  ? length
                  : window_begin(side, num_seen, length, params.residual_length, laps.tail_from(b, length))) {}

  __device__ bool has(const Side& side, int token) const {
    return side.tail != nullptr && (token >= begin || is_sink(token, start, dense_first));
  }

  // Loads eight channels of a token that the tail has.
  __device__ void load(const Side& side, int64_t h, int token, int c, float (&x)[kChunk]) const {
    const int64_t row = tail_row(side, token, start, dense_first);
    load_values(side.tail, side.tail_dtype,
                slot * side.tail_stride_b + h * side.tail_stride_h + row * side.tail_stride_t + c, x);
  }
};

// cap · tanh(x / cap), as cap · (1 - 2 / (exp(2x / cap) + 1)). Far below the cap this is a difference of numbers near
// 1, whose error is in the last bits of the cap, however small x is. There a polynomial is used (relative error 2^-21).
__device__ __forceinline__ float capped(float x, float cap) {
  const float t = x * (1.f / cap), square = t * t;
  const float power = exp2f(t * (2.f * kLog2E));
  const float far = cap * (1.f - 2.f / (power + 1.f));
  const float near = x * fmaf(square, fmaf(square, fmaf(square, -17.f / 315, 2.f / 15), -1.f / 3), 1.f);
  return square < 0.0625f ? near : far;
}

}  // namespace hf_kvquant::cuda
