// What the kernels of layers with states share: numbers of any dtype, and slots.
#pragma once

#include "../../fused.h"
#include "../common/codes.cuh"

namespace hf_kvquant::cuda {

constexpr float kNormEps = 1e-6f;  // as NORM_EPS in spec/state_steps.py

// The dtype differs from one tensor to the next, and these loads are few.
__device__ __forceinline__ float loaded(const void* data, Dtype dtype, int64_t i) {
  if (dtype == Dtype::fp32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == Dtype::fp16 ? half_to_float(bits) : __uint_as_float(uint32_t{bits} << 16);
}

__device__ __forceinline__ void store(void* data, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::fp32) {
    static_cast<float*>(data)[i] = x;
  } else {
    const uint16_t bits = dtype == Dtype::fp16 ? float_to_half(x) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    static_cast<uint16_t*>(data)[i] = bits;
  }
}

__device__ __forceinline__ float rounded(Dtype dtype, float x) {
  if (dtype == Dtype::fp32) return x;
  return dtype == Dtype::fp16 ? half_to_float(float_to_half(x)) : __bfloat162float(__float2bfloat16_rn(x));
}

// A number of a recurrent state, which is float32 or float16. Sums behind the largest float16 become that one, since
// infinity would make every later token NaN. NaN stays.
__device__ __forceinline__ float from_state(float x) { return x; }
__device__ __forceinline__ float from_state(half_bits bits) { return half_to_float(bits); }

__device__ __forceinline__ void to_state(float& to, float x) { to = x; }
__device__ __forceinline__ void to_state(half_bits& to, float x) {
  constexpr float kLargest = 65504.f;
  to = float_to_half(x > kLargest ? kLargest : x < -kLargest ? -kLargest : x);
}

// Two numbers of float16 by one instruction, `low` in the lower half.
__device__ __forceinline__ uint32_t to_state_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Calls a function with a pointer to the numbers of a state.
template <class Function>
__device__ __forceinline__ void with_state(void* state, Dtype dtype, Function&& function) {
  if (dtype == Dtype::fp32) {
    function(static_cast<float*>(state));
  } else {
    function(static_cast<half_bits*>(state));
  }
}

// A slot, or -1 if the number is none.
__device__ __forceinline__ int64_t checked_slot(int64_t slot, int64_t num_slots) {
  return slot >= 0 && slot < num_slots ? slot : -1;
}

__device__ __forceinline__ int64_t slot_of(const int64_t* slots, int b, int64_t num_slots) {
  return checked_slot(slots == nullptr ? b : slots[b], num_slots);
}

// The tokens of a sequence, [begin, end). Numbers that are no tokens are left out.
struct Span {
  int64_t begin, end;
};

__device__ __forceinline__ Span span_of(const int64_t* begins, int64_t num_tokens, int s) {
  const int64_t begin = min(max(begins[s], int64_t{0}), num_tokens);
  return {begin, min(max(begins[s + 1], begin), num_tokens)};
}

__device__ __forceinline__ Span span_of(const Sequences& sequences, int s) {
  return span_of(sequences.begins, sequences.num_tokens, s);
}

}  // namespace hf_kvquant::cuda
