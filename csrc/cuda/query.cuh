// The query, as the products with keys want it: 16-bit integers in two bytes for integer keys, float16 for e4m3 ones,
// in the order in which the words of keys meet it (fragments.cuh).
#pragma once

#include "schedule.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

// Query rows in shared memory. Integer keys: 16 bits, q ≈ factor · (256 · high + low), as two planes of bytes
// [kRows][kHeadDim] in the order in which key words meet them: for int4 even channels first, then odd ones. e4m3 keys:
// float16, q = factor · half, factor a power of two. Factors include the softmax scale and log2(e).
template <class Shape>
struct Query {
  static constexpr int kHeadDim = Shape::kHeadDim, kRows = Shape::kRows, kNumGroups = Shape::kNumGroups;
  static constexpr bool kIsInteger = Shape::kKey != Storage::fp8;

  static __device__ __forceinline__ int place(int channel) {
    return Shape::kKey == Storage::int4 ? (channel & 1) * (kHeadDim / 2) + channel / 2 : channel;
  }

  // One warp writes one row; rows beyond the last are zeros. `sums` are factor · Σ query, group by group.
  static __device__ __forceinline__ void write_row(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                                   int slot, unsigned char* planes, float* factors, float* sums,
                                                   int lane) {
    const int row = segment.row_tile * kRows + slot;
    const bool is_row = row < rows.num_rows, is_half = params.query.dtype == Dtype::fp16;
    constexpr int kPerLane = kHeadDim / kLanes;  // 2, 4 or 8 channels
    const uint16_t* values =
        static_cast<const uint16_t*>(params.query.data) + segment.b * params.query.stride_b +
        int64_t{segment.h * static_cast<int>(rows.num_q_per_kv.value) + rows.head(row)} * params.query.stride_h +
        int64_t{rows.token(row)} * params.query.stride_t + lane * kPerLane;
    float x[kPerLane], largest = 0.f, bad = 0.f;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const uint32_t bits = is_row && lane * kPerLane + k < params.key_side.head_dim ? values[k] : 0;
      x[k] = is_half ? half_to_float(bits) : __uint_as_float(bits << 16);
      largest = fmaxf(largest, fabsf(x[k]));
      bad += x[k] - x[k];  // NaN if anything is not finite
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
      bad += __shfl_xor_sync(kAllLanes, bad, distance);
    }
    const float scale = params.softmax_scale * kLog2E + bad;
    // Below, every logit is zero in float32 anyway, and the reciprocal might not be finite.
    const bool is_zero = !(largest >= 1e-30f);
    if constexpr (kIsInteger) {
      constexpr float kLargest = 32512.f;  // 127 · 256: the high byte stays within ±127
      const float to_integer = is_zero ? 0.f : kLargest / largest;
      const float factor = scale * (largest / kLargest);
      int sum = 0;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int q = __float2int_rn(x[k] * to_integer), high = (q + 128) >> 8;
        const int at = slot * kHeadDim + place(lane * kPerLane + k);
        planes[at] = static_cast<unsigned char>(high);
        planes[kRows * kHeadDim + at] = static_cast<unsigned char>(q - high * 256);
        sum += q;
      }
      // Lanes of a group of channels are neighbours.
#pragma unroll
      for (int distance = kLanes / kNumGroups / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      if (lane % (kLanes / kNumGroups) == 0) {
        sums[slot * kNumGroups + lane / (kLanes / kNumGroups)] = factor * static_cast<float>(sum);
      }
      if (lane == 0) factors[slot] = factor;
    } else {
      int exponent = 0;
      frexpf(largest, &exponent);
      const float to_half = is_zero ? 0.f : ldexpf(1.f, 8 - exponent);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        reinterpret_cast<half_bits*>(planes)[slot * kHeadDim + lane * kPerLane + k] = float_to_half(x[k] * to_half);
      }
      if (lane == 0) factors[slot] = is_zero ? scale * 0.f : scale * ldexpf(1.f, exponent - 8);
    }
  }
};

// The B operands of query · key, for all words of a lane's share of a row.
template <class Shape>
struct QueryOperands {
  using Words = KeyWords<Shape::kKeyRowBytes, Shape::kIsGrouped>;
  static constexpr bool kIsInt4 = Shape::kKey == Storage::int4;
  static constexpr int kParts = Shape::kKey == Storage::fp8 ? 1 : Shape::kIsPaired ? 1 : 2;  // high, low bytes
  static constexpr int kPerWord = Shape::kKey == Storage::int8 ? 1 : 2;
  uint32_t words[Shape::kColumnTiles][kParts][Words::kWords][kPerWord];

  __device__ __forceinline__ void load(const unsigned char* planes, int g, int t) {
    constexpr int kHeadDim = Shape::kHeadDim;
#pragma unroll
    for (int n = 0; n < Shape::kColumnTiles; ++n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int row = Shape::kIsPaired ? g >> 1 : 8 * n + g;
        const unsigned char* plane = planes + ((Shape::kIsPaired ? g & 1 : part) * Shape::kRows + row) * kHeadDim;
#pragma unroll
        for (int w = 0; w < Words::kWords; ++w) {
          const int byte = Words::word_byte(t, w);
          if constexpr (Shape::kKey == Storage::fp8) {
            const unsigned char* halves = planes + (row * kHeadDim + byte) * 2;
            words[n][part][w][0] = *reinterpret_cast<const uint32_t*>(halves);
            words[n][part][w][1] = *reinterpret_cast<const uint32_t*>(halves + 4);
          } else {
            words[n][part][w][0] = *reinterpret_cast<const uint32_t*>(plane + byte);
            if constexpr (kIsInt4) {
              words[n][part][w][1] = *reinterpret_cast<const uint32_t*>(plane + kHeadDim / 2 + byte);
            }
          }
        }
      }
    }
  }
};

}  // namespace hf_kvquant::cuda
