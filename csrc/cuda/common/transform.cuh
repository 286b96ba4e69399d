// Transforms keys before they are quantised, and queries to match, where the channels of a row are spread over
// neighbouring lanes. Every rounding matches reference.transform_key and transform_query, so every operation is an
// intrinsic that the compiler does not contract. append.sm89.cu and attend.cuh call this for keys, query.cuh and
// decode_general.cu for queries, never in a loop over stored tokens.
#pragma once

#include "codes.cuh"

namespace hf_kvquant::cuda {

// Multiplies rows by a Hadamard matrix over blocks of rotation_block(head_dim) channels. This lane, at `position` in
// its row, has kChannels of each row, a power of two of at most 8. All lanes of the warp call this together; results of
// lanes beyond a row are meaningless. All rows go through a step together, because each step waits for shuffles between
// lanes.
template <int kRows, int kChannels>
__device__ inline void rotate(float (&x)[kRows][kChannels], int head_dim, int lane, int position) {
#pragma unroll
  for (int stride = 1; stride < kChannels; stride *= 2) {
    for_all<kRows, kChannels>([&](int r, int k) {
      if ((k & stride) != 0) return;
      const float a = x[r][k], b = x[r][k + stride];
      x[r][k] = __fadd_rn(a, b);
      x[r][k + stride] = __fsub_rn(a, b);
    });
  }
  const int block = rotation_block(head_dim);
#pragma unroll 1
  for (int distance = 1; distance * kChannels < block; distance *= 2) {
    const int partner = lane + ((position ^ distance) - position);
    // A product with 1 or -1 is exact, so this is the sum or the difference, in one instruction.
    const float sign = (position & distance) != 0 ? -1.f : 1.f;
    for_all<kRows, kChannels>(
        [&](int r, int k) { x[r][k] = __fmaf_rn(x[r][k], sign, __shfl_sync(kAllLanes, x[r][k], partner)); });
  }
  // 1 / sqrt(block) is a power of two, times 1 / sqrt(2) if log2(block) is odd. The power of two changes no rounding.
  const int log2_block = 31 - __clz(block);
  const float power = __uint_as_float(static_cast<uint32_t>(127 - (log2_block >> 1)) << 23);
  const float factor = log2_block % 2 == 0 ? power : power * 0.70710678118654752f;
  for_all<kRows, kChannels>([&](int r, int k) { x[r][k] = __fmul_rn(x[r][k], factor); });
}

// The same for a single row.
template <int kChannels>
__device__ inline void rotate(float (&x)[kChannels], int head_dim, int lane, int position) {
  rotate(reinterpret_cast<float (&)[1][kChannels]>(x), head_dim, lane, position);
}

// The numbers of a transform for the channels of one lane. They are loaded apart from their use, so that a kernel can
// load them early: at the start of a step none of them are in any cache.
template <int kChannels>
struct LaneTransform {
  float center[kChannels], smoothing[kChannels];

  LaneTransform() = default;

  // For the channels of key-value head `h` from `c` on, which may be beyond the row.
  __device__ __forceinline__ LaneTransform(const KeyTransform& transform, int head_dim, int h, int c) {
    const int first = h * head_dim + c;
    for_all<kChannels>([&](int k) {
      center[k] = transform.center != nullptr && c < head_dim ? transform.center[first + k] : 0.f;
      smoothing[k] = transform.smoothing != nullptr && c < head_dim ? transform.smoothing[first + k] : 1.f;
    });
  }

  // Replaces the factors by their inverses, which multiply keys.
  __device__ __forceinline__ void invert(const KeyTransform& transform) {
    if (transform.smoothing == nullptr) return;
    for_all<kChannels>([&](int k) { smoothing[k] = __frcp_rn(smoothing[k]); });
  }
};

// Transforms a lane's channels of new keys; `inverted` holds their numbers. All lanes of the warp call this together.
template <int kRows, int kChannels>
__device__ __forceinline__ void transform_keys(const KeyTransform& transform, const LaneTransform<kChannels>& inverted,
                                               int head_dim, int lane, int position, float (&x)[kRows][kChannels]) {
  if (transform.center != nullptr) {
    for_all<kRows, kChannels>([&](int r, int k) { x[r][k] = __fsub_rn(x[r][k], inverted.center[k]); });
  }
  if (transform.smoothing != nullptr) {
    for_all<kRows, kChannels>([&](int r, int k) { x[r][k] = __fmul_rn(x[r][k], inverted.smoothing[k]); });
  }
  if (transform.is_rotated) rotate(x, head_dim, lane, position);
}

// Transforms a lane's channels of a query; `own` holds their numbers. Returns query · center, summed over the `width`
// neighbouring lanes of a row, a power of two. All lanes of the warp call this together.
template <int kChannels>
__device__ __forceinline__ float transform_query(const KeyTransform& transform, const LaneTransform<kChannels>& own,
                                                 int head_dim, int lane, int position, int width,
                                                 float (&x)[kChannels]) {
  float constant = 0.f;
  if (transform.center != nullptr) {
    for_all<kChannels>([&](int k) { constant = fmaf(x[k], own.center[k], constant); });
#pragma unroll 1
    for (int distance = width / 2; distance > 0; distance /= 2) {
      constant += __shfl_xor_sync(kAllLanes, constant, distance);
    }
  }
  if (transform.smoothing != nullptr) {
    for_all<kChannels>([&](int k) { x[k] = __fmul_rn(x[k], own.smoothing[k]); });
  }
  if (transform.is_rotated) rotate(x, head_dim, lane, position);
  return constant;
}

}  // namespace hf_kvquant::cuda
