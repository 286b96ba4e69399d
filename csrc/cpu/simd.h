// Vectors of float32 numbers, and what all kernels do with them: load and store every code type, round, sum over
// lanes. Kernels are written once with these names; kernels_*.cpp compile them for each instruction set.
//
// A vector is a type of GCC and Clang, so + - * / < ?: work on it, and everything that compiles to the same
// instructions as intrinsics is written once. What does not (conversions, fused multiply-add, rounding) has a version
// for each instruction set. libstdc++'s std::experimental::simd has neither float16 nor shuffles, and its functions are
// not in an anonymous namespace. That everything here is in one matters: a function compiled with AVX-512 must never be
// the copy that the linker keeps for a processor without it.
//
// A kernels_*.cpp defines KVQ_ISA, a name, and KVQ_WIDTH, the numbers in a vector: 16 for AVX-512, 8 for AVX2, 4 for
// what every processor has (SSE2, NEON).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../format.h"

#if KVQ_WIDTH > 4
#include <immintrin.h>
#endif

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Not by memcpy, through which GCC 12 keeps arrays of vectors in memory.
template <class T>
inline T load_as(const void* p) {
  typedef T Unaligned __attribute__((aligned(1), may_alias));
  return *static_cast<const Unaligned*>(p);
}
template <class T>
inline void store_as(void* p, T x) {
  typedef T Unaligned __attribute__((aligned(1), may_alias));
  *static_cast<Unaligned*>(p) = x;
}

// Into L2; harmless past the end of a buffer.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class T>
constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}
inline float abs_of(float x) { return std::fabs(x); }
constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Calls `use` with the constant among kValues that `value` is, so that it can be a template argument.
template <auto... kValues, class Value, class Use>
inline void with_constant(Value value, Use use) {
  (void)((value == kValues && (use(std::integral_constant<decltype(kValues), kValues>()), true)) || ...);
}
template <class Use>
inline void with_dtype(Dtype dtype, Use use) {
  with_constant<Dtype::fp32, Dtype::bf16, Dtype::fp16>(dtype, use);
}

// --- vectors ---------------------------------------------------------------------------------------------------------

constexpr int kWidth = KVQ_WIDTH;
typedef float Float __attribute__((vector_size(kWidth * 4)));
typedef int32_t Int __attribute__((vector_size(kWidth * 4)));
typedef int16_t Words __attribute__((vector_size(kWidth * 2)));

template <class Op, int... kLane>
inline Float each_of(Op op, std::integer_sequence<int, kLane...>) {
  return Float{op(kLane)...};
}
// Lane i is op(i).
template <class Op>
inline Float each(Op op) {
  return each_of(op, std::make_integer_sequence<int, kWidth>());
}

inline Float zeros() { return Float{}; }
inline Float broadcast(float x) { return x - Float{}; }
inline Float load(const float* p) { return load_as<Float>(p); }
inline void store(float* p, Float x) { store_as(p, x); }
inline Float abs_of(Float x) { return bit_cast<Float>(bit_cast<Int>(x) & 0x7FFFFFFF); }

// --- what differs between instruction sets ---------------------------------------------------------------------------
//   fma             a · b + c; in the portable set with two roundings
//   max_of, min_of  return b where either is NaN
//   load_words      bytes as 16-bit numbers
//   of_halves, of_bf16, to_halves, to_words   from and to 16-bit numbers; to_words keeps the low bits
//   load_u8, load_u4, store_bytes, store_nibbles   codes, for the last two as integers that fit; of a pair of nibbles,
//                   the low one is first

#if KVQ_WIDTH > 4

constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline float half_to_float(half_bits bits) { return _cvtsh_ss(bits); }
inline int16_t to_halves(float x) { return static_cast<int16_t>(_cvtss_sh(x, kToNearest)); }

#if KVQ_WIDTH == 16

inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
inline Float max_of(Float a, Float b) { return _mm512_max_ps(a, b); }
inline Float min_of(Float a, Float b) { return _mm512_min_ps(a, b); }
inline Float round_even(Float x) { return _mm512_roundscale_ps(x, kToNearest); }
inline Int round_to_int(Float x) { return (Int)_mm512_cvtps_epi32(x); }
inline Words load_words(const uint8_t* p) { return (Words)_mm256_cvtepu8_epi16(load_as<__m128i>(p)); }
inline Float of_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
inline Float of_halves(Words halves) { return _mm512_cvtph_ps((__m256i)halves); }
inline Float of_bf16(Words bits) { return (Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16); }
inline Words to_halves(Float x) { return (Words)_mm512_cvtps_ph(x, kToNearest); }
inline Words to_words(Int x) { return (Words)_mm512_cvtepi32_epi16((__m512i)x); }
inline __m128i to_bytes(Int x) { return _mm512_cvtepi32_epi8((__m512i)x); }
inline float sum_of(Float x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Float x) { return _mm512_reduce_max_ps(x); }
inline float smallest_of(Float x) { return _mm512_reduce_min_ps(x); }

#else

inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
inline Float max_of(Float a, Float b) { return _mm256_max_ps(a, b); }
inline Float min_of(Float a, Float b) { return _mm256_min_ps(a, b); }
inline Float round_even(Float x) { return _mm256_round_ps(x, kToNearest); }
inline Int round_to_int(Float x) { return (Int)_mm256_cvtps_epi32(x); }
inline Words load_words(const uint8_t* p) { return (Words)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)); }
inline Float of_bytes(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }
inline Float of_halves(Words halves) { return _mm256_cvtph_ps((__m128i)halves); }
inline Float of_bf16(Words bits) { return (Float)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16); }
inline Words to_halves(Float x) { return (Words)_mm256_cvtps_ph(x, kToNearest); }
inline Words to_words(Int x) {
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  return (Words)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline __m128i to_bytes(Int x) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  return _mm_packus_epi16(words, words);
}
template <class Op>
inline float fold(Float x, Op op) {
  __m128 y = op(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = op(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(op(y, _mm_shuffle_ps(y, y, 1)));
}
inline float sum_of(Float x) { return fold(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }); }
inline float largest_of(Float x) { return fold(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }); }
inline float smallest_of(Float x) { return fold(x, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); }); }

#endif

// kCount bytes, 0 up to 16.
template <int kCount>
inline __m128i load_bytes(const uint8_t* p) {
  if constexpr (kCount == 16) return load_as<__m128i>(p);
  if constexpr (kCount == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  if constexpr (kCount == 4) return _mm_cvtsi32_si128(load_as<int32_t>(p));
}
inline Float load_u8(const uint8_t* p) { return of_bytes(load_bytes<kWidth>(p)); }
inline Float load_u4(const uint8_t* p) {
  const __m128i packed = load_bytes<kWidth / 2>(p), mask = _mm_set1_epi8(15);
  return of_bytes(_mm_unpacklo_epi8(_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask)));
}
// The first kCount bytes. With intrinsics: GCC 12 merges a memcpy with to_bytes into one slower instruction.
template <int kCount>
inline void store_first(uint8_t* p, __m128i bytes) {
  if constexpr (kCount == 16) _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  if constexpr (kCount == 8) _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
  if constexpr (kCount == 4) std::memcpy(p, &bytes, 4);
}
inline void store_bytes(uint8_t* p, Int x) { store_first<kWidth>(p, to_bytes(x)); }
inline void store_nibbles(uint8_t* p, Int x) {
  const __m128i pairs = _mm_maddubs_epi16(to_bytes(x), _mm_set1_epi16(0x1001));  // even + 16 odd
  store_first<kWidth / 2>(p, _mm_packus_epi16(pairs, pairs));
}

#else

inline float half_to_float(half_bits bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) return bit_cast<float>(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13));
  if (magnitude >= 0x400) return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float x = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -x : x;
}

inline int16_t to_halves(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<int16_t>(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return static_cast<int16_t>(sign | 0x7C00);  // 65520 and more round to infinity
  if (magnitude < 0x38800000) {  // below 2^-14: multiples of 2^-24, which adding 0.5 leaves in the low mantissa bits
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<int16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000));
  }
  return static_cast<int16_t>(sign | ((magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13));
}

inline Float fma(Float a, Float b, Float c) { return a * b + c; }
// Adding 1.5 · 2^23 leaves no bits for a fraction. Numbers beyond 2^22, here always far out of range, are left as is.
inline Float round_even(Float x) {
  constexpr float kMagic = 12582912.0f;
  return abs_of(x) < 4194304.0f ? (x + kMagic) - kMagic : x;
}
inline Int round_to_int(Float x) { return __builtin_convertvector(round_even(x), Int); }
inline Words load_words(const uint8_t* p) { return Words{p[0], p[1], p[2], p[3]}; }
inline Float of_halves(Words halves) {
  return each([&](int i) { return half_to_float(static_cast<half_bits>(halves[i])); });
}
inline Float of_bf16(Words bits) { return bit_cast<Float>(__builtin_convertvector(bits, Int) << 16); }
inline Float load_u8(const uint8_t* p) { return __builtin_convertvector((Int{p[0], p[1], p[2], p[3]}), Float); }
inline Float load_u4(const uint8_t* p) {
  return __builtin_convertvector((Int{p[0] & 15, p[0] >> 4, p[1] & 15, p[1] >> 4}), Float);
}
inline Words to_halves(Float x) {
  Words halves;
  for (int i = 0; i < kWidth; ++i) halves[i] = to_halves(x[i]);
  return halves;
}
inline Words to_words(Int x) { return __builtin_convertvector(x, Words); }
inline float sum_of(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest_of(Float x) { return max_of(max_of(x[0], x[2]), max_of(x[1], x[3])); }
inline float smallest_of(Float x) { return min_of(min_of(x[0], x[2]), min_of(x[1], x[3])); }
inline void store_bytes(uint8_t* p, Int x) {
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
inline void store_nibbles(uint8_t* p, Int x) {
  for (int i = 0; i < kWidth / 2; ++i) p[i] = static_cast<uint8_t>(x[2 * i] | x[2 * i + 1] << 4);
}

#endif

// --- lanes -----------------------------------------------------------------------------------------------------------

// Calls use(c, size) for channels `begin` ... `end` - 1, a vector at a time. `size`, a constant, is kWidth, or 8 for
// what is left at the end: rows and groups have a multiple of 8 channels.
template <class Use>
inline void for_vectors(int begin, int end, Use use) {
  int c = begin;
  for (; c + kWidth <= end; c += kWidth) use(c, std::integral_constant<int, kWidth>());
  if (kWidth > 8 && c < end) use(c, std::integral_constant<int, min_of(kWidth, 8)>());
}
// kCount numbers and zeros.
template <int kCount, class T>
inline auto load_part(const T* p) {
  std::conditional_t<sizeof(T) == 4, Float, Words> x{};
  std::memcpy(&x, p, sizeof(T) * kCount);
  return x;
}
template <int kCount, class T, class Vector>
inline void store_part(T* p, Vector x) {
  std::memcpy(p, &x, sizeof(T) * kCount);
}

// Collects in `flaws` whether numbers are finite: x - x is 0 or NaN. Adding these would wait for every addition.
inline void check_finite(Float x, Float& flaws) {
  flaws = bit_cast<Float>(bit_cast<Int>(flaws) | bit_cast<Int>(x - x));
}

// Exchanges lanes that are kStride apart.
template <int kStride>
inline Float swap_lanes(Float x) {
  return each([x](int i) { return x[i ^ kStride]; });
}

// b in lanes whose number has the bit kStride, a in the others.
template <int kStride>
inline Float blend_lanes(Float a, Float b) {
  return each([](int i) { return i & kStride ? 1.0f : 0.0f; }) != 0.0f ? b : a;
}

// Numbers a and b that are kStride lanes apart (1, 2, 4 or 8, a in the lower one) become a + b and a - b.
template <int kStride>
inline Float butterfly(Float x) {
  const Float other = swap_lanes<kStride>(x);
  return blend_lanes<kStride>(x + other, other - x);
}

inline bool is_finite(Float flaws) { return sum_of(flaws) == 0.0f; }

// x · 2^n for integral n; n far below the range of exponents gives 0.
inline Float scale_by_power(Float x, Float n) {
#if KVQ_WIDTH == 16
  return _mm512_scalef_ps(x, n);
#else
  const Int exponent = __builtin_convertvector(n < -126.0f ? zeros() : n, Int) + 127;
  return n < -126.0f ? zeros() : x * bit_cast<Float>(exponent << 23);
#endif
}

// Lane i of the result is the sum of the lanes of x[i]. With intrinsics: GCC 12 otherwise keeps `x` in memory.
inline Float sum_each(const Float (&x)[kWidth]) {
#if KVQ_WIDTH == 16
  Float halves[8], quarters[4];
  for (int i = 0; i < 4; ++i) {
    for (int pair = 0; pair < 2; ++pair) {  // lanes of 128 bits: two of x[i + 8 pair], two of x[i + 8 pair + 4]
      const Float a = x[i + 8 * pair], b = x[i + 8 * pair + 4];
      halves[2 * i + pair] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xEE);
    }
    const Float a = halves[2 * i], b = halves[2 * i + 1];
    quarters[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xDD);
  }
  const auto add_halves = [](Float a, Float b) {
    return _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xEE);
  };
  const Float low = add_halves(quarters[0], quarters[1]), high = add_halves(quarters[2], quarters[3]);
  return _mm512_shuffle_ps(low, high, 0x88) + _mm512_shuffle_ps(low, high, 0xDD);
#elif KVQ_WIDTH == 8
  const Float low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Float high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
#else
  return each([&](int i) { return sum_of(x[i]); });
#endif
}

// --- codes and other number types ------------------------------------------------------------------------------------

// e4m3 times 2^-8; callers multiply the scale by 2^8. The exponent of e4m3 has one bit less than float16's, so the
// seven lower bits moved up by seven are this number as a float16, subnormals included. Only NaN is a special case.
inline Float load_fp8_scaled(const uint8_t* p) {
  const Words wide = load_words(p);
  // The shift to the right leaves two copies of the sign; the lower one is cleared.
  return of_halves((((wide << 8) >> 1) & ~0x4000) | (((wide & 0x7F) == 0x7F) & 0x7E00));
}

// Integers of a width without instructions of its own. The codes of eight channels are one number of kBits bytes. Each
// lane shifts a word that holds its code, and the codes of as many channels as fit.
template <int kBits>
inline Float load_bits(const uint8_t* row, int c) {
  typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
  constexpr int kOfWord = kWidth >= 8 && kBits * kWidth <= 32 ? kWidth : 8;  // channels
  constexpr int kBytes = kOfWord * kBits / 8, kWords = (kWidth + kOfWord - 1) / kOfWord;
  static_assert(kWords <= 2);
  const uint8_t* const first = row + c / 8 * kBits;
  uint32_t words[2] = {};
  for (int i = 0; i < kWords; ++i) std::memcpy(words + i, first + i * kBytes, kBytes);
  Bits codes = Bits{} + words[0], shifts;
  for (int i = 0; i < kWidth; ++i) shifts[i] = i % kOfWord * kBits;
  if constexpr (kWords == 2) {
    for (int i = kOfWord; i < kWidth; ++i) codes[i] = words[1];
  }
  if constexpr (kWidth < 8) shifts += static_cast<uint32_t>(c % 8 * kBits);
  return __builtin_convertvector((Int)(codes >> shifts & ((1u << kBits) - 1)), Float);
}
template <int kBits, int kCount>
inline void store_bits(uint8_t* row, int c, Int x) {
  for (int begin = 0; begin < kCount; begin += 8) {
    uint8_t* bytes = row + (c + begin) / 8 * kBits;
    uint64_t eight = 0;
    if (c % 8 != 0) std::memcpy(&eight, bytes, kBits);
    for (int i = begin; i < min_of(begin + 8, kCount); ++i) {
      eight |= static_cast<uint64_t>(x[i]) << (c + i) % 8 * kBits;
    }
    std::memcpy(bytes, &eight, kBits);
  }
}

// |x| <= 448. From 2^-6 up the mantissa is rounded to 3 bits in place; below, codes count multiples of 2^-9.
inline void store_fp8(uint8_t* p, Float x) {
  const Int bits = bit_cast<Int>(x), magnitude = bits & 0x7FFFFFFF;
  const Int normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const Int tiny = round_to_int(abs_of(x) * 512.0f);
  store_bytes(p, (magnitude < (121 << 23) ? tiny : normal) | ((bits >> 24) & 0x80));
}
inline Words to_bf16(Float x) {
  const Int bits = bit_cast<Int>(x), magnitude = bits & 0x7FFFFFFF;
  const Int rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16;
  return to_words((x == x ? rounded | ((bits >> 16) & 0x8000) : Int{} + 0x7FC0));
}

// Numbers i ... i + kCount - 1 of any dtype as float32, and back.
template <Dtype kDtype, int kCount = kWidth>
inline Float load_dense(const void* data, int64_t i) {
  if constexpr (kDtype == Dtype::fp32) return load_part<kCount>(static_cast<const float*>(data) + i);
  if constexpr (kDtype == Dtype::bf16) return of_bf16(load_part<kCount>(static_cast<const int16_t*>(data) + i));
  if constexpr (kDtype == Dtype::fp16) return of_halves(load_part<kCount>(static_cast<const int16_t*>(data) + i));
}
template <Dtype kDtype, int kCount = kWidth>
inline void store_dense(void* data, int64_t i, Float x) {
  if constexpr (kDtype == Dtype::fp32) store_part<kCount>(static_cast<float*>(data) + i, x);
  if constexpr (kDtype == Dtype::bf16) store_part<kCount>(static_cast<int16_t*>(data) + i, to_bf16(x));
  if constexpr (kDtype == Dtype::fp16) store_part<kCount>(static_cast<int16_t*>(data) + i, to_halves(x));
}
inline void round_dense(const float* x, int count, Dtype dtype, void* data, int64_t offset) {
  with_dtype(dtype, [&](auto kind) {
    for_vectors(0, count, [&](int i, auto size) { store_dense<kind, size>(data, offset + i, load_part<size>(x + i)); });
  });
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
