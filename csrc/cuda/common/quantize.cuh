// Quantises on the device: from eight channels in a lane to scale, zero and codes, bit for bit as reference.quantize.
// Operations whose rounding matters are intrinsics, which no compiler option changes. `append_row` does all of it for
// one warp and one row; append.sm89.cu has the loops for prompts, and scales that several heads share.
//
// Why the division is exact. All channels of a row are divided by one scale, so x / scale is a product with y ≈ 1 /
// scale, accurate to 2^-22, and one Newton step: with q = x·y and the remainder q·scale - x, which is exact, q -
// remainder·y is x / scale to within a relative 2^-43, before its own rounding. Call a point where the code changes a
// border: n + 1/2, or halfway between two values of e4m3. A float16 scale has 11 significant bits, so float32 holds a
// border times the scale exactly. Any other x differs from this product by a float32 step at least, so its quotient is
// farther from the border, by more than 2^-35, than a float32 is rounded. So the quotient lands on the border exactly
// when x / scale, correctly rounded, does, and on the same side of it otherwise. The sign in the step keeps the -0 of x
// = -0. By the same argument span / L is correctly rounded for each L. test_append_rounds_as_a_division_does tries
// every significand of a scale with every border and its neighbours; an emulation (2026-11) has also tried reciprocals
// up to three steps off, and every span.
#pragma once

#include "transform.cuh"

namespace hf_kvquant::cuda {

// Unlike fminf and fmaxf, these propagate NaN, as torch's amin and amax do.
__device__ inline float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 1 / x to 2^-22 for a normal x.
__device__ inline float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// a / b for 0 <= a <= 32 and 1 <= b <= 32: half a step keeps the quotient away from integers.
__device__ inline int divide_lanes(int a, int b) {
  return static_cast<int>((static_cast<float>(a) + 0.5f) * approximate_reciprocal(static_cast<float>(b)));
}

// x / y where `reciprocal` is about 1 / y, as explained at the top of this file.
__device__ inline float divide(float x, float y, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  const float remainder = __fmaf_rn(quotient, y, -x);
  return __fmaf_rn(remainder, -reciprocal, quotient);
}

// --- loading

// Eight channels as loaded. Keeping them in 16 bits until the division saves registers and lets one instruction compare
// two of them.
template <Dtype kDtype>
struct Values {
  static constexpr int kNumWords = kDtype == Dtype::fp32 ? kChunk : kChunk / 2;
  uint32_t words[kNumWords];

  __device__ float operator[](int k) const {
    if constexpr (kDtype == Dtype::fp32) return __uint_as_float(words[k]);
    return widen(words[k / 2] >> (16 * (k % 2)) & 0xffffu);
  }

  __device__ static float widen(uint32_t bits) {
    return kDtype == Dtype::bf16 ? __uint_as_float(bits << 16) : half_to_float(static_cast<half_bits>(bits));
  }
};

// Loads channels of the first `num_rows` of kRows tokens, from element `first` on and stride_t apart; the other rows
// are 0. A single row may start anywhere, several must start at multiples of 16 bytes.
template <Dtype kDtype, int kRows>
__device__ inline void load_rows(const Dense& dense, int64_t first, int num_rows, Values<kDtype> (&x)[kRows]) {
  constexpr int kSize = kDtype == Dtype::fp32 ? 4 : 2;
  const char* row = static_cast<const char*>(dense.data) + first * kSize;
  if (kRows > 1 || reinterpret_cast<int64_t>(row) % 16 == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int w = 0; w < x[r].kNumWords; w += 4) {
        uint4 words = {0, 0, 0, 0};
        if (r < num_rows) words = reinterpret_cast<const uint4*>(row)[w / 4];
        x[r].words[w] = words.x, x[r].words[w + 1] = words.y, x[r].words[w + 2] = words.z, x[r].words[w + 3] = words.w;
      }
      row += dense.stride_t * kSize;
    }
  } else {
#pragma unroll
    for (int w = 0; w < x[0].kNumWords; ++w) {
      x[0].words[w] = 0;
      if (num_rows < 1) continue;
      if constexpr (kDtype == Dtype::fp32) {
        x[0].words[w] = reinterpret_cast<const uint32_t*>(row)[w];
      } else {
        const uint16_t* pair = reinterpret_cast<const uint16_t*>(row) + 2 * w;
        x[0].words[w] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
      }
    }
  }
}

// Eight channels of two bytes as float32.
__device__ inline Values<Dtype::fp32> widen(const uint32_t (&words)[kChunk / 2], Dtype dtype) {
  Values<Dtype::fp32> wide;
  const bool is_bf16 = dtype == Dtype::bf16;
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    const uint32_t bits = words[k / 2] >> (16 * (k % 2)) & 0xffffu;
    wide.words[k] = __float_as_uint(is_bf16 ? Values<Dtype::bf16>::widen(bits) : Values<Dtype::fp16>::widen(bits));
  }
  return wide;
}

// Loads rows of any dtype as float32, for code that should be compiled only once.
template <int kRows>
__device__ inline void load_widened(const Dense& dense, int64_t first, int num_rows, Values<Dtype::fp32> (&x)[kRows]) {
  if (dense.dtype == Dtype::fp32) return load_rows(dense, first, num_rows, x);
  Values<Dtype::bf16> narrow[kRows];  // or fp16, which is as wide
  load_rows(dense, first, num_rows, narrow);
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = widen(narrow[r].words, dense.dtype);
}

__device__ inline Values<Dtype::fp32> load_widened(const Dense& dense, int64_t first) {
  Values<Dtype::fp32> x[1];
  load_widened(dense, first, 1, x);
  return x[0];
}

// Transforms a lane's eight channels of new keys. `position` is the lane's place in the row, `inverted` holds its
// numbers. All lanes of the warp call this together.
template <int kRows>
__device__ inline void transform_rows(const KeyTransform& transform, const LaneTransform<kChunk>& inverted,
                                      int head_dim, int position, Values<Dtype::fp32> (&rows)[kRows]) {
  float x[kRows][kChunk];
#pragma unroll
  for (int i = 0; i < kRows * kChunk; ++i) x[i / kChunk][i % kChunk] = rows[i / kChunk][i % kChunk];
  transform_keys(transform, inverted, head_dim, threadIdx.x % kLanes, position, x);
#pragma unroll
  for (int i = 0; i < kRows * kChunk; ++i) {
    rows[i / kChunk].words[i % kChunk] = __float_as_uint(x[i / kChunk][i % kChunk]);
  }
}

// One key after its transform, for numbers that are used once only.
__device__ inline Values<Dtype::fp32> transformed(const KeyTransform& transform, int head_dim, int h,
                                                  const Values<Dtype::fp32>& key, int position) {
  LaneTransform<kChunk> inverted(transform, head_dim, h, position * kChunk);
  inverted.invert(transform);
  Values<Dtype::fp32> rows[1] = {key};
  transform_rows(transform, inverted, head_dim, position, rows);
  return rows[0];
}

// --- ranges and scales

// Smallest and largest of the values that share a scale; NaN if one of the values is.
template <bool kIsSymmetric>
struct Range {
  float low, high;  // symmetric: `high` is the largest magnitude and `low` is not used
};

// A range that is still growing. For 16-bit values, the high half holds the largest value and the low half the largest
// negated value (symmetric: both hold the largest magnitude), so that a shuffle and a maximum join two of them.
template <Dtype kDtype, bool kIsSymmetric>
struct Extent {
  uint32_t pair;

  __device__ static uint32_t max_of(uint32_t a, uint32_t b) {
    uint32_t result;
    if constexpr (kDtype == Dtype::bf16) {
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
  }

  __device__ static uint32_t min_of(uint32_t a, uint32_t b) {
    uint32_t result;
    if constexpr (kDtype == Dtype::bf16) {
      asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
  }

  __device__ static Extent of(const Values<kDtype>& x) {
    if constexpr (kIsSymmetric) {
      uint32_t largest = x.words[0] & 0x7fff7fffu;
#pragma unroll
      for (int w = 1; w < x.kNumWords; ++w) largest = max_of(largest, x.words[w] & 0x7fff7fffu);
      return {max_of(largest, largest << 16 | largest >> 16)};
    }
    uint32_t largest = x.words[0], smallest = x.words[0];
#pragma unroll
    for (int w = 1; w < x.kNumWords; ++w) {
      largest = max_of(largest, x.words[w]);
      smallest = min_of(smallest, x.words[w]);
    }
    smallest ^= 0x80008000u;
    return {max_of(largest << 16 | (smallest & 0xffffu), (largest & 0xffff0000u) | smallest >> 16)};
  }

  __device__ void include(Extent other) { pair = max_of(pair, other.pair); }

  // The extent of another lane. All lanes of the warp call this together.
  __device__ Extent from_lane(int lane) const { return {__shfl_sync(kAllLanes, pair, lane)}; }

  __device__ Range<kIsSymmetric> range() const {
    return {-Values<kDtype>::widen(pair & 0xffffu), Values<kDtype>::widen(pair >> 16)};
  }
};

template <bool kIsSymmetric>
struct Extent<Dtype::fp32, kIsSymmetric> {
  float low, high;

  // Including this changes no other extent.
  __device__ static Extent empty() { return {INFINITY, kIsSymmetric ? 0.f : -INFINITY}; }

  __device__ static Extent of(const Values<Dtype::fp32>& x) {
    Extent extent = {x[0], kIsSymmetric ? fabsf(x[0]) : x[0]};
#pragma unroll
    for (int k = 1; k < kChunk; ++k) {
      extent.high = max_or_nan(extent.high, kIsSymmetric ? fabsf(x[k]) : x[k]);
      if constexpr (!kIsSymmetric) extent.low = min_or_nan(extent.low, x[k]);
    }
    return extent;
  }

  __device__ void include(Extent other) {
    high = max_or_nan(high, other.high);
    if constexpr (!kIsSymmetric) low = min_or_nan(low, other.low);
  }

  __device__ Extent from_lane(int lane) const {
    Extent other = *this;
    other.high = __shfl_sync(kAllLanes, high, lane);
    if constexpr (!kIsSymmetric) other.low = __shfl_sync(kAllLanes, low, lane);
    return other;
  }

  __device__ Range<kIsSymmetric> range() const { return {low, high}; }
};

// Joins the extents of `width` neighbouring lanes, of which this is number `position`. After the last lane comes the
// first; in each step a lane includes the one that is 1, 2, 4 ... further on. Values may be included twice, so any
// width works.
template <class AnyExtent, int kRows>
__device__ inline void join_lanes(AnyExtent (&extents)[kRows], int lane, int position, int width) {
  const int first = lane - position;
#pragma unroll 1
  for (int distance = 1; distance < width; distance *= 2) {
    const int next = position + distance;
    const int partner = first + (next < width ? next : next - width);
#pragma unroll
    for (int r = 0; r < kRows; ++r) extents[r].include(extents[r].from_lane(partner));
  }
}

// Scale and zero as stored: both NaN if one of them cannot be represented.
struct StoredScale {
  half_bits scale, zero;

  __device__ float factor() const { return half_to_float(scale); }
  __device__ float offset() const { return half_to_float(zero); }
  __device__ bool is_bad() const { return !is_finite_half(scale); }

  // The scale of another lane. All lanes of the warp call this together.
  __device__ StoredScale from_lane(int lane) const {
    const uint32_t pair = __shfl_sync(kAllLanes, scale | static_cast<uint32_t>(zero) << 16, lane);
    return {static_cast<half_bits>(pair), static_cast<half_bits>(pair >> 16)};
  }
};

template <Storage kStorage, bool kIsSymmetric>
__device__ inline StoredScale compute_scale(Range<kIsSymmetric> range, float clip_ratio) {
  constexpr float kLimit = max_code(kStorage, kIsSymmetric), kMinScale = 0x1p-24f;
  const float span = kIsSymmetric ? range.high : __fsub_rn(range.high, range.low);
  const float clipped = __fmul_rn(span, clip_ratio);
  const float scale = max_or_nan(divide(clipped, kLimit, 1.f / kLimit), kMinScale);
  const float zero = kIsSymmetric ? 0.f : __fadd_rn(range.low, __fmul_rn(__fsub_rn(span, clipped), 0.5f));
  const __half2 stored = __floats2half2_rn(scale, zero);
  // The sum of two float16 numbers is finite in float32, unless one of them is not.
  const bool is_finite = __fadd_rn(__low2float(stored), fabsf(__high2float(stored))) < INFINITY;
  return {is_finite ? __half_as_ushort(__low2half(stored)) : kHalfNan,
          is_finite ? __half_as_ushort(__high2half(stored)) : kHalfNan};
}

// Finds the scale of each of a lane's rows. The values of a row in `width` neighbouring lanes share it; this lane is
// number `position` of them. All lanes of the warp call this together.
//
// `width` is a power of two and at least kOwned. Each step halves the rows that a lane continues with, instead of
// joining all rows in all lanes. In the end a lane owns every kOwned-th row, computes its scale, and passes it to the
// others. An int4 prompt takes 102 us instead of 121, where a copy takes 81 (H200, 2026-11: 8 x 8k tokens, 8 heads of
// 128).
template <Storage kStorage, int kOwned, Dtype kDtype, bool kIsSymmetric, int kRows>
__device__ inline void share_scales(Extent<kDtype, kIsSymmetric> (&extents)[kRows], float clip_ratio, int lane,
                                    int position, int width, StoredScale (&values)[kRows]) {
  const int first = lane - position;
#pragma unroll
  for (int half = kOwned / 2; half > 0; half /= 2) {
    const bool is_upper = (position & half) != 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r % kOwned >= half) continue;
      const auto leaving = is_upper ? extents[r] : extents[r + half];
      if (is_upper) extents[r] = extents[r + half];
      extents[r].include(leaving.from_lane(first + (position ^ half)));
    }
  }
#pragma unroll 1
  for (int distance = kOwned; distance < width; distance *= 2) {
#pragma unroll
    for (int r = 0; r < kRows; r += kOwned) extents[r].include(extents[r].from_lane(first + (position ^ distance)));
  }
#pragma unroll
  for (int r = 0; r < kRows; r += kOwned) {
    const StoredScale own = compute_scale<kStorage>(extents[r].range(), clip_ratio);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) values[r + i] = own.from_lane(first + i);
  }
}

template <Storage kStorage, Dtype kDtype, bool kIsSymmetric, int kRows>
__device__ inline void compute_scales(Extent<kDtype, kIsSymmetric> (&extents)[kRows], float clip_ratio, int lane,
                                      int position, int width, StoredScale (&values)[kRows]) {
  if constexpr (kRows >= 4) {
    if ((width & (width - 1)) == 0 && width >= 4) {
      if (kRows == 4 || width == 4) {
        return share_scales<kStorage, 4>(extents, clip_ratio, lane, position, width, values);
      }
      return share_scales<kStorage, kRows>(extents, clip_ratio, lane, position, width, values);
    }
  }
  join_lanes(extents, lane, position, width);
#pragma unroll
  for (int r = 0; r < kRows; ++r) values[r] = compute_scale<kStorage>(extents[r].range(), clip_ratio);
}

template <bool kIsSymmetric>
__device__ inline StoredScale load_scale(const Side& side, int64_t b, int64_t h, int64_t g, int64_t t) {
  StoredScale result = {*scale_at(side, b, h, g, t), 0};
  if constexpr (!kIsSymmetric) result.zero = *zero_at(side, b, h, g, t);
  return result;
}

template <bool kIsSymmetric>
__device__ inline void store_scale(const Side& side, StoredScale value, int64_t b, int64_t h, int64_t g, int64_t t) {
  *scale_at(side, b, h, g, t) = value.scale;
  if constexpr (!kIsSymmetric) *zero_at(side, b, h, g, t) = value.zero;
}

// --- codes

// e4m3 of two quotients of magnitude up to 448, the first in the low byte.
__device__ inline uint32_t encode_fp8(float a, float b) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
#else
  // By hand, since the header uses float64, which is slow on consumer GPUs. Below 2^-6, steps are 2^-9, and adding 2^14
  // rounds to them. Above, 20 of 23 bits are rounded away, half to even, and the exponent's bias is lowered by 120.
  uint32_t codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = __float_as_uint(i == 0 ? a : b), magnitude = bits & 0x7fffffffu;
    const uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) & 15u;
    const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    codes[i] = (magnitude < 0x3c800000u ? small : min(normal, 0x7eu)) | (bits >> 24 & 0x80u);
  }
  return codes[0] | codes[1] << 8;
#endif
}

template <Storage kStorage, bool kIsSymmetric, Dtype kDtype>
__device__ inline Codes<kStorage> encode(const Values<kDtype>& x, StoredScale value) {
  constexpr float kLimit = max_code(kStorage, kIsSymmetric);
  const float scale = value.factor(), reciprocal = approximate_reciprocal(scale);
  // Values are clamped before the division, in whose steps large ones would overflow float32. These limits are exact.
  // They matter if a scale is frozen or is a subnormal float16, which is rounded coarsely, or if a zero was rounded.
  const float upper = __fmul_rn(kLimit, scale), lower = kIsSymmetric ? -upper : 0.f;
  float quotients[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    const float distance = kIsSymmetric ? x[k] : __fsub_rn(x[k], value.offset());
    quotients[k] = divide(fminf(fmaxf(distance, lower), upper), scale, reciprocal);
  }
  Codes<kStorage> codes;
#pragma unroll
  for (int w = 0; w < codes.kNumWords; ++w) {
    const float* of_word = quotients + w * codes.kPerWord;
    uint32_t word = 0;
    if constexpr (kStorage == Storage::fp8) {
      word = encode_fp8(of_word[0], of_word[1]) | encode_fp8(of_word[2], of_word[3]) << 16;
    } else {
      // Adding 1.5 · 2^23 rounds half to even and leaves the integer in the low bits, with the offset of symmetric
      // codes. The bits above it are the same for all codes, and are subtracted from the whole word at once.
      constexpr float kRound = 12582912.f + code_offset(kStorage, kIsSymmetric);
      constexpr uint32_t kRoundBits = 0x4b400000u * Codes<kStorage>::kOnes;
#pragma unroll
      for (int k = codes.kPerWord - 1; k >= 0; --k) {
        word = (word << codes.kBits) + __float_as_uint(__fadd_rn(of_word[k], kRound));
      }
      word -= kRoundBits;
    }
    codes.words[w] = value.is_bad() ? 0 : word;
  }
  return codes;
}

// Quantises one row of one head to row `t` of the planes, which must be within the capacity; for granularities head and
// group. All lanes of a warp call this together, each with its place `chunk` in the row and the values there, zeros
// beyond the end. They may also take two rows side by side, of sides with the same number of channels and groups.
template <Storage kStorage, bool kIsSymmetric>
__device__ inline void append_row(const Side& side, const Values<Dtype::fp32>& x, int64_t b, int64_t h, int64_t t,
                                  int chunk) {
  const int lane = threadIdx.x % kLanes, lanes_per_row = side.head_dim / kChunk;
  const int lanes_per_group = divide_lanes(lanes_per_row, side.num_groups);
  const int g = divide_lanes(chunk, lanes_per_group), position = chunk - g * lanes_per_group;
  Extent<Dtype::fp32, kIsSymmetric> extents[1] = {Extent<Dtype::fp32, kIsSymmetric>::of(x)};
  join_lanes(extents, lane, position, lanes_per_group);
  const StoredScale value = compute_scale<kStorage>(extents[0].range(), side.clip_ratio);
  if (chunk >= lanes_per_row) return;
  if (position == 0) store_scale<kIsSymmetric>(side, value, b, h, g, t);
  encode<kStorage, kIsSymmetric>(x, value).store(Codes<kStorage>::at(code_row(side, b, h, t), chunk * kChunk));
}

// --- scales of channels

// A block of tokens to quantise, from row `row` of the planes on, whose first axis is at `slot`. Tokens before
// `first_new` are read from the tail at `tail_slot`, behind its sinks; others are new. Tokens before `first_counted` do
// not count for scales and get codes of 0.
struct BlockOfTokens {
  int begin, slot, row, first_new, first_counted, tail_slot, sink_length;
};

// The warps that quantise a block together, and shared memory for the ranges of each: [head_dim], `stride` apart.
struct BlockWarps {
  int warp, num_warps;
  float2* ranges;
  int stride;
};

// All warps of a thread block quantise a block of tokens in one head. A warp takes whole rows, eight channels a lane, so
// that a rotation finds all channels. `dense` begins with token `first_new`. kIsWide: the tail and new tokens are
// float32, else 16 bits. Rows are loaded twice: for the ranges, then from the cache for the codes.
template <bool kIsWide>
__device__ __noinline__ void quantize_columns(const Side& side, const KeyTransform& transform, const Dense& dense,
                                              int64_t b, int64_t h, const BlockOfTokens& tokens,
                                              const BlockWarps& warps) {
  using Raw = Values<kIsWide ? Dtype::fp32 : Dtype::bf16>;  // or fp16, which is as wide
  constexpr int kAtOnce = kIsWide ? 4 : 8, kTransformed = 4;  // rows of a lane that are loaded, and transformed
  const int lane = threadIdx.x % kLanes, lanes_per_row = side.head_dim / kChunk;
  const int rows = divide_lanes(kLanes, lanes_per_row), row_of_lane = divide_lanes(lane, lanes_per_row);
  const int chunk = lane - row_of_lane * lanes_per_row, c = chunk * kChunk, begin = tokens.begin;
  const bool has_row = row_of_lane < rows, is_transformed = !is_identity(transform);
  const int num_padding = min(max(tokens.first_counted - begin, 0), kBlockSize);
  const int num_old = min(max(tokens.first_new - begin, 0), kBlockSize);
  const Dense tail = {side.tail, side.tail_dtype, side.tail_stride_b, side.tail_stride_h, side.tail_stride_t};
  const int64_t from_tail =
      tokens.tail_slot * tail.stride_b + h * tail.stride_h + tokens.sink_length * tail.stride_t + c;
  const int first_of_ring = begin % side.ring;  // of the rows behind sinks; a block may begin again at the first
  const int64_t from_new =
      b * dense.stride_b + h * dense.stride_h + int64_t{begin - tokens.first_new} * dense.stride_t + c;
  LaneTransform<kChunk> inverted;
  if (is_transformed) {
    inverted = {transform, side.head_dim, static_cast<int>(h), c};
    inverted.invert(transform);
  }
  // Calls `use(row, x)` for the rows of this lane, except padding.
  const auto for_rows = [&](auto use) {
    const int stride = warps.num_warps * rows;
#pragma unroll 1
    for (int batch = warps.warp * rows; batch < kBlockSize; batch += kAtOnce * stride) {
      Raw x[kAtOnce][1];
      const auto row_at = [&](int i) { return batch + i * stride + row_of_lane; };
      const auto counts = [&](int i) { return has_row && row_at(i) >= num_padding && row_at(i) < kBlockSize; };
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = row_at(i);
        const bool is_old = row < num_old;
        const int of_ring = first_of_ring + row - (first_of_ring + row < side.ring ? 0 : side.ring);
        load_rows(is_old ? tail : dense, is_old ? from_tail + of_ring * tail.stride_t : from_new + row * dense.stride_t,
                  counts(i), x[i]);
      }
#pragma unroll
      for (int first = 0; first < kAtOnce; first += kTransformed) {
        Values<Dtype::fp32> wide[kTransformed];
#pragma unroll
        for (int i = 0; i < kTransformed; ++i) {
          if constexpr (kIsWide) wide[i] = x[first + i][0];
          if constexpr (!kIsWide) wide[i] = widen(x[first + i][0].words, side.tail_dtype);
        }
        if (is_transformed) transform_rows(transform, inverted, side.head_dim, chunk, wide);
#pragma unroll
        for (int i = 0; i < kTransformed; ++i) {
          if (counts(first + i)) use(row_at(first + i), wide[i]);
        }
      }
    }
  };

  // --- ranges of this lane's rows, then of the warp's, then of all
  Range<false> ranges[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) ranges[k] = {INFINITY, -INFINITY};
  const auto include = [&](int k, float low, float high) {
    ranges[k] = {min_or_nan(ranges[k].low, low), max_or_nan(ranges[k].high, high)};
  };
  for_rows([&](int, const Values<Dtype::fp32>& x) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) include(k, x[k], x[k]);
  });
#pragma unroll 1
  for (int row = 1; row < rows; ++row) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      // Lanes of the first row read the other rows' own ranges: no lane that is read has joined another.
      const float low = __shfl_down_sync(kAllLanes, ranges[k].low, row * lanes_per_row);
      const float high = __shfl_down_sync(kAllLanes, ranges[k].high, row * lanes_per_row);
      if (row_of_lane == 0) include(k, low, high);
    }
  }
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    if (row_of_lane == 0) warps.ranges[warps.warp * warps.stride + c + k] = {ranges[k].low, ranges[k].high};
    ranges[k] = {INFINITY, -INFINITY};
  }
  __syncthreads();
#pragma unroll 1
  for (int warp = 0; has_row && warp < warps.num_warps; ++warp) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      const float2 range = warps.ranges[warp * warps.stride + c + k];
      include(k, range.x, range.y);
    }
  }

  // --- scales, and codes
  StoredScale values[kChunk];
  float reciprocals[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    if (num_padding == kBlockSize) ranges[k] = {0.f, 0.f};
    values[k] = compute_scale<Storage::int4>(ranges[k], side.clip_ratio);
    reciprocals[k] = approximate_reciprocal(values[k].factor());
  }
  if (warps.warp == 0 && row_of_lane == 0) {
    half_bits* scale = scale_at(side, tokens.slot, h, tokens.row / kBlockSize, 0) + c;
    half_bits* zero = zero_at(side, tokens.slot, h, tokens.row / kBlockSize, 0) + c;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) scale[k] = values[k].scale, zero[k] = values[k].zero;
  }
  uint8_t* codes = code_row(side, tokens.slot, h, tokens.row) + c / 2;
  for (int row = warps.warp * rows + row_of_lane; has_row && row < num_padding; row += warps.num_warps * rows) {
    *reinterpret_cast<uint32_t*>(codes + row * side.codes_stride_t) = 0;
  }
  for_rows([&](int row, const Values<Dtype::fp32>& x) {
    constexpr float kLimit = max_code(Storage::int4, false);
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      const float scale = values[k].factor(), distance = __fsub_rn(x[k], values[k].offset());
      const float clamped = fminf(fmaxf(distance, 0.f), __fmul_rn(kLimit, scale));  // as in encode
      const int code = __float2int_rn(divide(clamped, scale, reciprocals[k]));
      word |= (values[k].is_bad() ? 0u : static_cast<uint32_t>(code)) << (4 * k);
    }
    *reinterpret_cast<uint32_t*>(codes + row * side.codes_stride_t) = word;
  });
  __syncthreads();  // the next block may take the memory of ranges, and its codes are there
}

}  // namespace hf_kvquant::cuda
