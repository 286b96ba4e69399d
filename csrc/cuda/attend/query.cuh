// Prepares the query for the products with keys: as 16-bit integers in two bytes for integer keys with one scale per
// row, as float16 for e4m3 keys and keys in groups or blocks, in the order of the words of keys (fragments.cuh).
#pragma once

#include "../common/transform.cuh"
#include "schedule.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

// Query rows in shared memory. Integer keys: 16 bits, q ≈ factor · (256 · high + low), as two planes of bytes
// [kRows][kHeadDim] in the order of key words: those channels first whose codes are the lowest of a byte, then the
// second lowest, and so on. e4m3 keys and keys in groups or blocks: float16, q = factor · half, the factor a power of
// two. Stored factors are also multiplied by the softmax scale and log2(e).
template <class Shape>
struct Query {
  static constexpr int kHeadDim = Shape::kHeadDim, kRows = Shape::kRows, kNumGroups = Shape::kNumGroups;
  static constexpr bool kIsInteger = is_integer(Shape::kKey) && !Shape::kIsGrouped && !Shape::kIsBlocked;

  static constexpr int kCodesPerByte = 8 / width_of(Shape::kKey);

  static __device__ __forceinline__ int place(int channel) {
    return (channel & (kCodesPerByte - 1)) * (kHeadDim / kCodesPerByte) + channel / kCodesPerByte;
  }

  static constexpr int kPerLane = kHeadDim / kLanes;  // 2, 4 or 8 channels
  using Transform = LaneTransform<kPerLane>;

  // Loads a lane's channels of one row, as the bits of 16-bit numbers. Rows and channels beyond the last are 0.
  static __device__ __forceinline__ void load_row(const DecodeParams& params, const DecodePlan& plan,
                                                  const Segment& segment, int slot, int lane,
                                                  uint32_t (&bits)[kPerLane]) {
    const Rows& rows = plan.rows;
    const int row = segment.row_tile * kRows + slot, token = rows.token(row);
    const int head = segment.h * static_cast<int>(rows.num_q_per_kv.value) + rows.head(row, token);
    const uint16_t* values =
        static_cast<const uint16_t*>(params.query.data) +
        (segment.b * plan.query_stride_b + head * plan.query_stride_h + token * plan.query_stride_t + lane * kPerLane);
    // Head dims are multiples of 8.
    const bool is_held = row < rows.num_rows && lane * kPerLane < params.key_side.head_dim;
    for_all<kPerLane>([&](int k) { bits[k] = is_held ? values[k] : 0; });
  }

  // One warp writes one untransformed row, for dense windows and storage type none: [kRows][kHeadDim] of 16 bits.
  static __device__ __forceinline__ void write_plain_row(const uint32_t (&bits)[kPerLane], int slot,
                                                         unsigned char* plain, int lane) {
    for_all<kPerLane>([&](int k) {
      reinterpret_cast<uint16_t*>(plain)[slot * kHeadDim + lane * kPerLane + k] = static_cast<uint16_t>(bits[k]);
    });
  }

  // One warp writes one row. `sums` are factor · Σ query, or Σ of the float16 numbers of each group. `constants` are
  // what every logit lacks because keys are stored without their center, in log2 units.
  static __device__ __forceinline__ void write_row(const DecodeParams& params, bool is_transformed,
                                                   const Transform& transform, const uint32_t (&bits)[kPerLane],
                                                   int slot, unsigned char* planes, float* factors, float* constants,
                                                   float* sums, int lane) {
    if constexpr (Shape::kIsPlain) {
      if (lane == 0) constants[slot] = 0.f;
      return write_plain_row(bits, slot, planes, lane);
    }
    const bool is_half = params.query.dtype == Dtype::fp16;
    float x[kPerLane], constant = 0.f;
    for_all<kPerLane>([&](int k) { x[k] = is_half ? half_to_float(bits[k]) : __uint_as_float(bits[k] << 16); });
    if (is_transformed) {
      constant = transform_query(params.key_transform, transform, params.key_side.head_dim, lane, lane, kLanes, x);
    }
    if (lane == 0) constants[slot] = constant * params.softmax_scale * kLog2E;
    uint32_t magnitude = 0;
    for_all<kPerLane>([&](int k) { magnitude = max(magnitude, __float_as_uint(x[k]) & 0x7fffffffu); });
    // Compared as integers, finite magnitudes are below infinity, and infinity is below NaN.
    constexpr uint32_t kInfinity = 0x7f800000u;
    magnitude = __reduce_max_sync(kAllLanes, magnitude);
    const float largest = __uint_as_float(magnitude);
    const float scale = magnitude < kInfinity ? params.softmax_scale * kLog2E : NAN;
    // For smaller queries every logit is zero in float32 anyway, and the reciprocal might not be finite.
    const bool is_zero = !(largest >= 1e-30f);
    if constexpr (kIsInteger) {
      constexpr float kLargest = 32512.f;  // 127 · 256: the high byte stays within ±127
      // Both divided by 4: for divisors beyond 2^126 the fast division gives 0, and all tokens would weigh the same.
      const float to_integer = is_zero ? 0.f : __fdividef(kLargest / 4, largest / 4);
      const float factor = scale * (largest * (1.f / kLargest));
      int q[kPerLane], sum = 0;
      for_all<kPerLane>([&](int k) {
        q[k] = __float2int_rn(x[k] * to_integer);
        sum += q[k];
      });
      constexpr int kStep = kCodesPerByte;
      static_assert(kPerLane % kStep == 0);
#pragma unroll
      for (int first = 0; first < kStep; ++first) {
        unsigned char* at = planes + slot * kHeadDim + place(lane * kPerLane + first);
        store_bytes<kStep>(at, q, first, [](int x) { return (x + 128) >> 8; });
        store_bytes<kStep>(at + kRows * kHeadDim, q, first, [](int x) { return x; });
      }
      sum = __reduce_add_sync(kAllLanes, sum);
      if (lane == 0) {
        sums[slot] = factor * static_cast<float>(sum);
        factors[slot] = factor;
      }
    } else {
      // Multiplies by the power of two that brings the largest number to 2^kExponent ... 2^(kExponent + 1), found from
      // its exponent bits. Rounding may reach the upper end, so that must be less than 2^16. In granularity channel,
      // where scales of channels multiply the query, numbers are at most 1, so that no scale makes them infinite.
      // Scales below 2^-9 lose bits, which matters if the keys of all channels are so small. (Bringing scales near 1,
      // by a power of two for each block, cost 3 to 6 % of the time.)
      constexpr uint32_t kExponent = Shape::kIsGrouped ? 14 : Shape::kIsBlocked ? 1 : 7;
      constexpr float kFit = Shape::kIsBlocked ? 0.25f : 1.f;  // separate, so that the largest exponents work, too
      const uint32_t exponent = magnitude >> 23;
      const float to_half = is_zero ? 0.f : kFit * __uint_as_float((254 + kExponent - exponent) << 23);
      float sum = 0.f;
      for_all<kPerLane>([&](int k) {
        const half_bits half = float_to_half(x[k] * to_half);
        sum += half_to_float(half);
        reinterpret_cast<half_bits*>(planes)[slot * kHeadDim + lane * kPerLane + k] = half;
      });
      if constexpr (Shape::kIsGrouped) {
        // Lanes of a group of channels are neighbours.
#pragma unroll
        for (int distance = kLanes / kNumGroups / 2; distance > 0; distance /= 2) {
          sum += __shfl_xor_sync(kAllLanes, sum, distance);
        }
        if (lane % (kLanes / kNumGroups) == 0) sums[slot * kNumGroups + lane / (kLanes / kNumGroups)] = sum;
      }
      if (lane == 0) factors[slot] = scale / kFit * (is_zero ? 0.f : __uint_as_float((exponent - kExponent) << 23));
    }
  }

 private:
  // Stores the low bytes of every kStep-th number from `first` on, one after the other.
  template <int kStep, class Byte>
  static __device__ __forceinline__ void store_bytes(unsigned char* to, const int (&q)[kPerLane], int first,
                                                     Byte byte) {
    constexpr int kBytes = kPerLane / kStep;
    uint32_t words[(kBytes + 3) / 4] = {};
    for_all<kBytes>(
        [&](int i) { words[i / 4] |= static_cast<uint32_t>(byte(q[i * kStep + first]) & 0xff) << (8 * (i % 4)); });
    if constexpr (kBytes == 1) {
      *to = static_cast<unsigned char>(words[0]);
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
    } else {
      for_all<kBytes / 4>([&](int w) { reinterpret_cast<uint32_t*>(to)[w] = words[w]; });
    }
  }
};

// The B operands of query · key without groups, for all words of a lane's share of a row.
template <class Shape>
struct QueryOperands {
  using Words = KeyWords<Shape::kKeyRowBytes>;
  static constexpr int kParts = Shape::kKey == Storage::fp8 ? 1 : Shape::kIsPaired ? 1 : 2;  // high, low bytes
  static constexpr int kPerWord = Shape::kKey == Storage::fp8 ? 2 : 8 / bits_of(Shape::kKey);
  uint32_t words[Shape::kColumnTiles][kParts][Words::kWords][kPerWord];

  __device__ __forceinline__ void load(const unsigned char* planes, int g, int t) {
    constexpr int kHeadDim = Shape::kHeadDim;
    for_all<Shape::kColumnTiles, kParts>([&](int n, int part) {
      const int row = Shape::kIsPaired ? g >> 1 : 8 * n + g;
      const unsigned char* plane = planes + ((Shape::kIsPaired ? g & 1 : part) * Shape::kRows + row) * kHeadDim;
      for_all<Words::kWords>([&](int w) {
        const int byte = Words::word_byte(t, w);
        if constexpr (Shape::kKey == Storage::fp8) {
          const unsigned char* halves = planes + (row * kHeadDim + byte) * 2;
          words[n][part][w][0] = *reinterpret_cast<const uint32_t*>(halves);
          words[n][part][w][1] = *reinterpret_cast<const uint32_t*>(halves + 4);
        } else {
          for_all<kPerWord>([&](int k) {
            words[n][part][w][k] = *reinterpret_cast<const uint32_t*>(plane + kHeadDim / kPerWord * k + byte);
          });
        }
      });
    });
  }
};

// --- dense keys

// The B operand of products with dense keys: channels c ... c + 7 of a lane's query row in column tile n, from
// `queries`, which are untransformed, [kRows][kHeadDim] of 16 bits.
template <class Shape>
__device__ __forceinline__ uint4 plain_query(const unsigned char* queries, int n, int c, int g) {
  const int row = Shape::kIsPaired ? g >> 1 : 8 * n + g;
  const uint4 query = *reinterpret_cast<const uint4*>(queries + (row * Shape::kHeadDim + c) * 2);
  return Shape::kIsPaired && (g & 1) != 0 ? uint4{0, 0, 0, 0} : query;
}

// sum += keys · query over 32 channels: `low` is the lane's share of row g, `high` of row g + 8.
__device__ __forceinline__ void multiply_dense(Dtype dtype, float (&sum)[4], const uint4& low, const uint4& high,
                                               const uint4& query) {
  if (dtype == Dtype::bf16) {
    multiply_bfloats(sum, low.x, high.x, low.y, high.y, query.x, query.y);
    multiply_bfloats(sum, low.z, high.z, low.w, high.w, query.z, query.w);
  } else {
    multiply_halves(sum, low.x, high.x, low.y, high.y, query.x, query.y);
    multiply_halves(sum, low.z, high.z, low.w, high.w, query.z, query.w);
  }
}

// Channels that a lane has of a dense key, for multiply_dense. `mask`: 0 if there are none, else all bits.
__device__ __forceinline__ uint4 masked(const uint32_t (&words)[4], uint32_t mask) {
  return {words[0] & mask, words[1] & mask, words[2] & mask, words[3] & mask};
}

// --- keys in groups or blocks

// a / 16 in float16, both halves.
__device__ __forceinline__ uint32_t sixteenth(uint32_t halves) { return multiply_halves(halves, 0x2c002c00u); }

// Eight float16 numbers in the order in which masks unpack a word of keys: pairs (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ void in_pairs(const uint4& x, uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(x.x, x.z, 0x5410), pairs[1] = __byte_perm(x.x, x.z, 0x7632);
  pairs[2] = __byte_perm(x.y, x.w, 0x5410), pairs[3] = __byte_perm(x.y, x.w, 0x7632);
}

// The query for 32 channels of int4 keys, from channel 32 · `part` on: float16, four words. A lane's word of keys,
// channels 8t ... 8t + 7 of the part, is unpacked in pairs, of which the second and fourth count sixteenfold.
template <class Shape>
__device__ __forceinline__ void load_query_words(const unsigned char* planes, int row, int part, int t, bool is_held,
                                                 uint32_t (&words)[4]) {
  uint4 x = *reinterpret_cast<const uint4*>(planes + (row * Shape::kHeadDim + 32 * part + 8 * t) * 2);
  if (!is_held) x = {0, 0, 0, 0};
  in_pairs(x, words);
  words[1] = sixteenth(words[1]), words[3] = sixteenth(words[3]);
}

// The same for all groups of 32 channels.
template <class Shape>
struct GroupedQueryOperands {
  static constexpr int kNumGroups = Shape::kNumGroups;
  uint32_t words[Shape::kColumnTiles][kNumGroups][4];
  // For the product with zeros (or with scales, where there are no zeros but codes have an offset): B operands of eight
  // rows. Rows 0 ... 3 are the sums of the query over four groups, rows 4 ... 7 what these sums lose as float16.
  static constexpr int kQuads = (kNumGroups + 3) / 4;
  uint32_t sums[Shape::kColumnTiles][kQuads];
  static constexpr float kSumUnit = 0x1p-8f;  // sums of 32 numbers up to 2^15, eightfold for an offset, fit in float16

  __device__ __forceinline__ void load(const unsigned char* planes, const float* sums_of_query, float offset, int g,
                                       int t) {
    for_all<Shape::kColumnTiles>([&](int n) {
      const int row = Shape::kIsPaired ? g >> 1 : 8 * n + g;
      const bool is_held = !Shape::kIsPaired || (g & 1) == 0;
      for_all<kNumGroups>([&](int j) { load_query_words<Shape>(planes, row, j, t, is_held, words[n][j]); });
      for_all<kQuads>([&](int quad) {
        float sum[2];
        for_all<2>([&](int i) {
          const int group = quad * 4 + (t & 1) * 2 + i;
          const bool is_group = is_held && group < kNumGroups;
          sum[i] = is_group ? sums_of_query[row * kNumGroups + group] * (offset * kSumUnit) : 0.f;
          if (t >= 2) sum[i] -= half_to_float(float_to_half(sum[i]));
        });
        sums[n][quad] = pack_halves(sum[0], sum[1]);
      });
    });
  }
};

}  // namespace hf_kvquant::cuda
