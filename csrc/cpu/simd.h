// Float32 vectors of three instruction sets under one set of names: loads of every code type, exp, tanh, rounding,
// reductions. A kernels_*.cpp defines KVQ_ISA and includes the kernels, which are written once with these names.
// Everything is in an anonymous namespace: a function compiled with AVX-512 must never be the copy that the linker
// keeps for a processor without it. cpu.cpp decides which set runs, attend.h and quantize.h what is computed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../format.h"

#if KVQ_USE_AVX2 || KVQ_USE_AVX512
#include <immintrin.h>
#endif

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Into L2; harmless past the end of a buffer.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline int min_of(int a, int b) { return a < b ? a : b; }
inline int max_of(int a, int b) { return a > b ? a : b; }
inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// --- single numbers --------------------------------------------------------------------------------------------------

inline float bf16_to_float(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float x) {
  if (x != x) return 0x7FC0;
  const uint32_t bits = bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#if KVQ_USE_AVX2 || KVQ_USE_AVX512
inline float half_to_float(half_bits bits) { return _cvtsh_ss(bits); }
inline half_bits float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
inline float half_to_float(half_bits bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) return bit_cast<float>(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13));
  if (magnitude >= 0x400) return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float x = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -x : x;
}

inline half_bits float_to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<half_bits>(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return static_cast<half_bits>(sign | 0x7C00);  // 65520 and more round to infinity
  if (magnitude < 0x38800000) {  // below 2^-14: multiples of 2^-24, which adding 0.5 leaves in the low mantissa bits
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<half_bits>(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000));
  }
  return static_cast<half_bits>(sign | ((magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13));
}
#endif

// --- vectors ---------------------------------------------------------------------------------------------------------
// Float is a vector of kWidth numbers. max_of(a, b) and min_of(a, b) return b where either is NaN, in every set.
// To check that numbers are finite, or_bits collects x - x, which is 0 or NaN: collecting by addition would wait for
// every addition.

#if KVQ_USE_AVX512

constexpr int kWidth = 16;
constexpr int kValueVectors = 4;  // vectors of channels that the value loop keeps per row: 4 rows x 4 of 32 registers
using Float = __m512;

inline Float zeros() { return _mm512_setzero_ps(); }
inline Float broadcast(float x) { return _mm512_set1_ps(x); }
inline Float load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
inline Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
inline Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
inline Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
inline Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
inline Float max_of(Float a, Float b) { return _mm512_max_ps(a, b); }
inline Float min_of(Float a, Float b) { return _mm512_min_ps(a, b); }
inline Float round_even(Float x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Float abs_of(Float x) { return _mm512_abs_ps(x); }
inline Float or_bits(Float a, Float b) { return _mm512_or_ps(a, b); }
// a where x < y, else b (also where x or y is NaN).
inline Float select_less(Float x, Float y, Float a, Float b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
// x · 2^n for integral n; n far below the range of exponents gives 0.
inline Float scale_by_power(Float x, Float n) { return _mm512_scalef_ps(x, n); }
inline float sum_of(Float x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Float x) { return _mm512_reduce_max_ps(x); }
inline float smallest_of(Float x) { return _mm512_reduce_min_ps(x); }
// Numbers a and b that are kStride lanes apart (1, 2, 4 or 8, a in the lower one) become a + b and a - b.
template <int kStride>
inline Float butterfly(Float x) {
  constexpr __mmask16 kUpper = kStride == 1 ? 0xAAAA : kStride == 2 ? 0xCCCC : kStride == 4 ? 0xF0F0 : 0xFF00;
  Float other;
  if constexpr (kStride == 1) other = _mm512_permute_ps(x, 0xB1);
  if constexpr (kStride == 2) other = _mm512_permute_ps(x, 0x4E);
  if constexpr (kStride == 4) other = _mm512_shuffle_f32x4(x, x, 0xB1);
  if constexpr (kStride == 8) other = _mm512_shuffle_f32x4(x, x, 0x4E);
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), kUpper, other, x);
}

inline Float load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Float load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Float widen_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
inline Float load_u8(const uint8_t* p) { return widen_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Float load_u4(const uint8_t* p) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(packed, mask);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
  return widen_bytes(_mm_unpacklo_epi8(even, odd));
}
// e4m3 times 2^-8; callers multiply the scale by 2^8. The exponent of e4m3 has one bit less than that of float16, so
// the seven lower bits moved up by seven are this number as a float16, subnormals included. Only NaN is a special case.
inline Float load_fp8_scaled(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  // The shift to the right leaves two copies of the sign; the lower one is cleared.
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16(~0x4000));
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
  const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
  return _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(0x7E00)));
}
inline void store_bf16(uint16_t* p, Float x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i result =
      _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
}
inline void store_half(uint16_t* p, Float x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Integral x in 0..255.
inline void store_u8(uint8_t* p, Float x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// Integral x in 0..15, channel 2i in the low nibble of byte i.
inline void store_u4(uint8_t* p, Float x) {
  const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
  const __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001));  // even + 16 odd
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
}
// |x| <= 448. From 2^-6 up the mantissa is rounded to 3 bits in place; below, codes count multiples of 2^-9.
inline void store_fp8(uint8_t* p, Float x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(magnitude, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF)));
  const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
  const __m512i tiny = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(512.0f)));
  const __mmask16 is_tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(121 << 23));
  const __m512i sign = _mm512_srli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(0x7FFFFFFF), bits), 24);
  const __m512i codes = _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_tiny, tiny), sign);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
}
// Lane i of the result is the sum of the lanes of x[i]: four levels that halve the number of vectors.
inline Float sum_each(const Float (&x)[kWidth]) {
  Float halves[8], quarters[4];
  for (int i = 0; i < 4; ++i) {
    for (int pair = 0; pair < 2; ++pair) {  // lanes of 128 bits: two of x[i + 8 pair], two of x[i + 8 pair + 4]
      const Float a = x[i + 8 * pair], b = x[i + 8 * pair + 4];
      halves[2 * i + pair] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    const Float a = halves[2 * i], b = halves[2 * i + 1];
    quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  const auto add_halves = [](Float a, Float b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  };
  const Float low = add_halves(quarters[0], quarters[1]), high = add_halves(quarters[2], quarters[3]);
  return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD));
}

#elif KVQ_USE_AVX2

constexpr int kWidth = 8;
constexpr int kValueVectors = 2;  // 4 rows x 2 of 16 registers
using Float = __m256;

inline Float zeros() { return _mm256_setzero_ps(); }
inline Float broadcast(float x) { return _mm256_set1_ps(x); }
inline Float load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
inline Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
inline Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
inline Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
inline Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
inline Float max_of(Float a, Float b) { return _mm256_max_ps(a, b); }
inline Float min_of(Float a, Float b) { return _mm256_min_ps(a, b); }
inline Float round_even(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Float abs_of(Float x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Float or_bits(Float a, Float b) { return _mm256_or_ps(a, b); }
inline Float select_less(Float x, Float y, Float a, Float b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
inline Float scale_by_power(Float x, Float n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return select_less(n, broadcast(-126.0f), zeros(), _mm256_mul_ps(x, _mm256_castsi256_ps(exponent)));
}
template <class Op>
inline float fold(Float x, Op op) {
  __m128 y = op(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = op(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(op(y, _mm_shuffle_ps(y, y, 1)));
}
inline float sum_of(Float x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float largest_of(Float x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
inline float smallest_of(Float x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); });
}
// See the AVX-512 version.
template <int kStride>
inline Float butterfly(Float x) {
  constexpr int kUpper = kStride == 1 ? 0xAA : kStride == 2 ? 0xCC : 0xF0;
  Float other;
  if constexpr (kStride == 1) other = _mm256_permute_ps(x, 0xB1);
  if constexpr (kStride == 2) other = _mm256_permute_ps(x, 0x4E);
  if constexpr (kStride == 4) other = _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), kUpper);
}

inline Float load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Float load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Float widen_bytes(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }
inline Float load_u8(const uint8_t* p) { return widen_bytes(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Float load_u4(const uint8_t* p) {
  int32_t packed_bits;
  std::memcpy(&packed_bits, p, sizeof(packed_bits));
  const __m128i packed = _mm_cvtsi32_si128(packed_bits);
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(packed, mask);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
  return widen_bytes(_mm_unpacklo_epi8(even, odd));
}
// See the AVX-512 version.
inline Float load_fp8_scaled(const uint8_t* p) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(wide, 8), 1), _mm_set1_epi16(~0x4000));
  const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
  const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
  return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00))));
}
inline void store_bf16(uint16_t* p, Float x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i result =
      _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store_half(uint16_t* p, Float x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_u8(uint8_t* p, Float x) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline void store_u4(uint8_t* p, Float x) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  const __m128i pairs = _mm_maddubs_epi16(_mm_packus_epi16(words, words), _mm_set1_epi16(0x1001));  // even + 16 odd
  const int32_t packed = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
  std::memcpy(p, &packed, sizeof(packed));
}
// See the AVX-512 version.
inline void store_fp8(uint8_t* p, Float x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(magnitude, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFFF)));
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
  const __m256i tiny = _mm256_cvtps_epi32(_mm256_mul_ps(abs_of(x), _mm256_set1_ps(512.0f)));
  const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), magnitude);
  const __m256i sign = _mm256_srli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7FFFFFFF), bits), 24);
  const __m256i codes = _mm256_or_si256(_mm256_blendv_epi8(normal, tiny, is_tiny), sign);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline Float sum_each(const Float (&x)[kWidth]) {
  const Float low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Float high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

#else

// Vectors of four, by an extension of GCC and Clang, which compile them to what the target always has (SSE2, NEON). GCC
// 12 did not vectorise plain loops over an array of four, which ran at a quarter of the speed.
constexpr int kWidth = 4;
constexpr int kValueVectors = 2;
typedef float Float __attribute__((vector_size(16)));
typedef int32_t Int __attribute__((vector_size(16)));

inline Float zeros() { return Float{}; }
inline Float broadcast(float x) { return Float{x, x, x, x}; }
inline Float load(const float* p) {
  Float x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline void store(float* p, Float x) { std::memcpy(p, &x, sizeof(x)); }
inline Float add(Float a, Float b) { return a + b; }
inline Float sub(Float a, Float b) { return a - b; }
inline Float mul(Float a, Float b) { return a * b; }
inline Float div(Float a, Float b) { return a / b; }
inline Float fma(Float a, Float b, Float c) { return a * b + c; }
inline Float select(Int mask, Float a, Float b) {
  return bit_cast<Float>((mask & bit_cast<Int>(a)) | (~mask & bit_cast<Int>(b)));
}
inline Float max_of(Float a, Float b) { return select(a > b, a, b); }
inline Float min_of(Float a, Float b) { return select(a < b, a, b); }
inline Float abs_of(Float x) { return bit_cast<Float>(bit_cast<Int>(x) & 0x7FFFFFFF); }
inline Float or_bits(Float a, Float b) { return bit_cast<Float>(bit_cast<Int>(a) | bit_cast<Int>(b)); }
inline Float select_less(Float x, Float y, Float a, Float b) { return select(x < y, a, b); }
// Adding 1.5 · 2^23 leaves no bits for a fraction. Numbers beyond 2^22, here always far out of range, are left as is.
inline Float round_even(Float x) {
  const Float magic = broadcast(12582912.0f);
  return select(abs_of(x) < 4194304.0f, (x + magic) - magic, x);
}
inline Float scale_by_power(Float x, Float n) {
  const Int is_number = n >= -126.0f;
  const Int exponent = __builtin_convertvector(select(is_number, n, zeros()), Int);
  const Float scaled = x * bit_cast<Float>((exponent + 127) << 23);
  return select(is_number | (n != n), scaled, zeros());
}
inline float sum_of(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest_of(Float x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
inline float smallest_of(Float x) {
  const float a = x[0] < x[2] ? x[0] : x[2], b = x[1] < x[3] ? x[1] : x[3];
  return a < b ? a : b;
}
// See the AVX-512 version.
template <int kStride>
inline Float butterfly(Float x) {
  const Float other = kStride == 1 ? Float{x[1], x[0], x[3], x[2]} : Float{x[2], x[3], x[0], x[1]};
  const Int upper = kStride == 1 ? Int{0, -1, 0, -1} : Int{0, 0, -1, -1};
  return select(upper, other - x, x + other);
}
template <class Op>
inline Float each(Op op) {
  return Float{op(0), op(1), op(2), op(3)};
}
inline Float load_bf16(const uint16_t* p) {
  return each([&](int i) { return bf16_to_float(p[i]); });
}
inline Float load_half(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
inline Float load_u8(const uint8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}
inline Float load_u4(const uint8_t* p) {
  return each([&](int i) { return static_cast<float>((p[i / 2] >> (i % 2 * 4)) & 15); });
}
inline Float load_fp8_scaled(const uint8_t* p) {
  return each([&](int i) {
    const uint32_t magnitude = p[i] & 0x7F, sign = p[i] >> 7;
    if (magnitude == 0x7F) return std::numeric_limits<float>::quiet_NaN();
    const float x =
        magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-17f : bit_cast<float>((magnitude << 20) + (112u << 23));
    return sign != 0 ? -x : x;
  });
}
inline void store_bf16(uint16_t* p, Float x) {
  for (int i = 0; i < kWidth; ++i) p[i] = float_to_bf16(x[i]);
}
inline void store_half(uint16_t* p, Float x) {
  for (int i = 0; i < kWidth; ++i) p[i] = float_to_half(x[i]);
}
inline void store_u8(uint8_t* p, Float x) {
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
inline void store_u4(uint8_t* p, Float x) {
  for (int i = 0; i < kWidth / 2; ++i) {
    p[i] = static_cast<uint8_t>(static_cast<int>(x[2 * i]) | static_cast<int>(x[2 * i + 1]) << 4);
  }
}
// |x| <= 448. From 2^-6 up the mantissa is rounded to 3 bits in place; below, codes count multiples of 2^-9.
inline void store_fp8(uint8_t* p, Float x) {
  for (int i = 0; i < kWidth; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(x[i]), magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    const bool is_tiny = magnitude < (121u << 23);
    const uint32_t code = is_tiny ? static_cast<uint32_t>(std::nearbyint(std::fabs(x[i]) * 512.0f)) : normal;
    p[i] = static_cast<uint8_t>(code | bits >> 31 << 7);
  }
}
inline Float sum_each(const Float (&x)[kWidth]) {
  return each([&](int i) { return sum_of(x[i]); });
}

#endif

// --- functions for all instruction sets ------------------------------------------------------------------------------

// e^x for x <= 0 to about one unit in the last place; exactly 0 for x far below 0, NaN for NaN. x = n ln 2 + r with ln
// 2 in two parts, then a polynomial on |r| <= ln 2 / 2 (relative error 2^-28).
inline Float exp_of(Float x) {
  x = max_of(broadcast(-110.0f), x);
  const Float n = round_even(mul(x, broadcast(1.44269504f)));
  Float r = fma(n, broadcast(-0.693145752f), x);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Float poly = fma(broadcast(1.39506010e-3f), r, broadcast(8.36895406e-3f));
  poly = fma(poly, r, broadcast(4.16662060e-2f));
  poly = fma(poly, r, broadcast(1.66665182e-1f));
  poly = fma(poly, r, broadcast(0.5f));
  poly = add(fma(poly, mul(r, r), r), broadcast(1.0f));
  return scale_by_power(poly, n);
}

// tanh: an odd polynomial near 0, elsewhere 1 - 2 / (e^2|x| + 1), computed from e^-2|x|.
inline Float tanh_of(Float x) {
  const Float size = abs_of(x);
  const Float square = mul(x, x);
  Float poly = fma(broadcast(2.23105960e-3f), square, broadcast(-8.26708600e-3f));
  poly = fma(poly, square, broadcast(2.17344370e-2f));
  poly = fma(poly, square, broadcast(-5.39524741e-2f));
  poly = fma(poly, square, broadcast(1.33332476e-1f));
  poly = fma(poly, square, broadcast(-3.33333313e-1f));
  const Float small = fma(mul(poly, square), x, x);
  const Float falling = exp_of(mul(size, broadcast(-2.0f)));
  const Float large = div(sub(broadcast(1.0f), falling), add(broadcast(1.0f), falling));
  const Float signed_large = select_less(x, zeros(), sub(zeros(), large), large);
  return select_less(size, broadcast(0.6f), small, signed_large);
}

template <Dtype kDtype>
inline Float load_dense(const void* data, int64_t i) {
  if constexpr (kDtype == Dtype::fp32) return load(static_cast<const float*>(data) + i);
  if constexpr (kDtype == Dtype::bf16) return load_bf16(static_cast<const uint16_t*>(data) + i);
  if constexpr (kDtype == Dtype::fp16) return load_half(static_cast<const uint16_t*>(data) + i);
}

// `count` numbers of any dtype as float32, never reading past them.
inline void convert_dense(const void* data, Dtype dtype, int64_t offset, int count, float* result) {
  const auto convert = [&](auto load_at, auto one) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) store(result + i, load_at(offset + i));
    for (; i < count; ++i) result[i] = one(offset + i);
  };
  if (dtype == Dtype::fp32) {
    std::memcpy(result, static_cast<const float*>(data) + offset, sizeof(float) * count);
  } else if (dtype == Dtype::bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(data);
    convert([p](int64_t i) { return load_bf16(p + i); }, [p](int64_t i) { return bf16_to_float(p[i]); });
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(data);
    convert([p](int64_t i) { return load_half(p + i); }, [p](int64_t i) { return half_to_float(p[i]); });
  }
}

// `count` float32 numbers rounded to a dtype.
inline void round_dense(const float* x, int count, Dtype dtype, void* data, int64_t offset) {
  if (dtype == Dtype::fp32) {
    std::memcpy(static_cast<float*>(data) + offset, x, sizeof(float) * count);
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(data) + offset;
  const bool is_bf16 = dtype == Dtype::bf16;
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    if (is_bf16) {
      store_bf16(p + i, load(x + i));
    } else {
      store_half(p + i, load(x + i));
    }
  }
  for (; i < count; ++i) p[i] = is_bf16 ? float_to_bf16(x[i]) : float_to_half(x[i]);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
