// What keys go through before they are quantised, and queries before they meet such keys, where the channels of a row are
// spread over neighbouring lanes: rounding by rounding as reference.transform_key and transform_query, which is why every
// operation is an intrinsic that the compiler does not contract. Whose rows these are is decided in append.cu and
// attend.cuh (keys), query.cuh and decode_general.cu (queries); nothing of this is in a loop over stored tokens.
#pragma once

#include "codes.cuh"

namespace hf_kvquant::cuda {

// Multiplies a row by a Hadamard matrix over blocks of rotation_block(head_dim) channels. This lane, at `position` in
// its row, has kChannels of them, a power of two of at most 8. All lanes of the warp call this; what those beyond a row
// receive means nothing.
template <int kChannels>
__device__ inline void rotate(float (&x)[kChannels], int head_dim, int lane, int position) {
#pragma unroll
  for (int stride = 1; stride < kChannels; stride *= 2) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      if ((k & stride) != 0) continue;
      const float a = x[k], b = x[k + stride];
      x[k] = __fadd_rn(a, b);
      x[k + stride] = __fsub_rn(a, b);
    }
  }
  const int block = rotation_block(head_dim);
#pragma unroll 1
  for (int distance = 1; distance * kChannels < block; distance *= 2) {
    const int partner = lane + ((position ^ distance) - position);
    const bool is_upper = (position & distance) != 0;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      const float other = __shfl_sync(kAllLanes, x[k], partner);
      x[k] = is_upper ? __fsub_rn(other, x[k]) : __fadd_rn(x[k], other);
    }
  }
  // 1 / sqrt(block), of which an odd power of two leaves 1 / sqrt(2): a factor of two more does not change how it rounds.
  const int log2_block = 31 - __clz(block);
  const float power = __uint_as_float(static_cast<uint32_t>(127 - (log2_block >> 1)) << 23);
  const float factor = log2_block % 2 == 0 ? power : power * 0.70710678118654752f;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) x[k] = __fmul_rn(x[k], factor);
}

// A transform as it concerns the channels of one lane. Where a part is absent, its numbers change nothing, not even a
// sign of zero. To be read long before it is used: a step finds none of it in any cache.
template <int kChannels>
struct LaneTransform {
  float center[kChannels], smoothing[kChannels];

  LaneTransform() = default;

  // Of the channels from `c` on of key-value head `h`; rows may end before.
  __device__ __forceinline__ LaneTransform(const KeyTransform& transform, int head_dim, int h, int c) {
    const int first = h * head_dim + c;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      center[k] = transform.center != nullptr && c < head_dim ? transform.center[first + k] : 0.f;
      smoothing[k] = transform.smoothing != nullptr && c < head_dim ? transform.smoothing[first + k] : 1.f;
    }
  }

  // What keys are multiplied by takes the place of the factors.
  __device__ __forceinline__ void invert() {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) smoothing[k] = __frcp_rn(smoothing[k]);
  }
};

// A lane's channels of a new key, `inverted` being the transform for keys. All lanes of the warp together.
template <int kChannels>
__device__ __forceinline__ void transform_key(const LaneTransform<kChannels>& inverted, bool is_rotated, int head_dim,
                                              int lane, int position, float (&x)[kChannels]) {
#pragma unroll
  for (int k = 0; k < kChannels; ++k) x[k] = __fmul_rn(__fsub_rn(x[k], inverted.center[k]), inverted.smoothing[k]);
  if (is_rotated) rotate(x, head_dim, lane, position);
}

// A lane's channels of a query. Returns the lane's share of query · center. All lanes of the warp together.
template <int kChannels>
__device__ __forceinline__ float transform_query(const LaneTransform<kChannels>& transform, bool is_rotated,
                                                 int head_dim, int lane, int position, float (&x)[kChannels]) {
  float constant = 0.f;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    constant = fmaf(x[k], transform.center[k], constant);
    x[k] = __fmul_rn(x[k], transform.smoothing[k]);
  }
  if (is_rotated) rotate(x, head_dim, lane, position);
  return constant;
}

}  // namespace hf_kvquant::cuda
