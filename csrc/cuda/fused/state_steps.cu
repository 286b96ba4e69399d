// One token of layers that keep a state instead of keys and values, one launch each: the convolution and the gated
// delta rule. Both work in place, in the slots of a cache, so a step reads and writes each state once. The separate
// kernels of PyTorch pass over the matrix of a head some twelve times, and those of fla need it gathered before and
// scattered after.
//
// Where the time goes (H200, 2026-11, 128 sequences of 32 heads of 128 x 128): float32 takes 163 us, 3.3 TB/s, and
// float16 132, 2.0 TB/s, so memory limits it no longer. Tried together: float16 kept packed in registers, so that four
// thread blocks fit a multiprocessor instead of two, and each warp summing up squares by itself. 118 us in float16, but
// 217 in float32. Packed registers alone are open.
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "../../fused.h"
#include "../common/device.h"
#include "state.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarp = 32, kMaxParts = 16, kMaxDeltaThreads = kWarp * kMaxParts;
constexpr int kConvThreads = 256;

// Four numbers of 16 bits, which are loaded and stored at once.
constexpr int kPacked = 4;

__device__ __forceinline__ void load_packed(const void* data, Dtype dtype, int64_t first, float (&x)[kPacked]) {
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + first);
  const uint32_t pairs[2] = {words.x, words.y};
#pragma unroll
  for (int i = 0; i < kPacked; ++i) {
    const uint16_t bits = pairs[i / 2] >> (16 * (i % 2));
    x[i] = dtype == Dtype::fp16 ? half_to_float(bits) : __uint_as_float(uint32_t{bits} << 16);
  }
}

// The same for a state of four inputs and weights of as many, all of 16 bits and one dtype.
__global__ void __launch_bounds__(kConvThreads) step_packed_conv(const __grid_constant__ ConvStepParams params) {
  const int64_t number = int64_t{blockIdx.x} * kConvThreads + threadIdx.x;
  if (number >= int64_t{params.batch} * params.channels) return;
  const int b = static_cast<int>(number / params.channels), c = static_cast<int>(number % params.channels);
  const int64_t read = slot_of(params.slots.read, b, params.slots.num_slots);
  const int64_t write = slot_of(params.slots.write, b, params.slots.num_slots);
  const Dtype dtype = params.dtype;
  float seen[kPacked] = {}, weight[kPacked];
  if (read >= 0) load_packed(params.state, dtype, read * params.state_stride + int64_t{c} * kPacked, seen);
  load_packed(params.weight, dtype, int64_t{c} * kPacked, weight);
  const float x = loaded(params.x, dtype, b * params.stride_b + c * params.stride_c);
  const float inputs[kPacked] = {seen[1], seen[2], seen[3], x};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPacked; ++i) sum = fmaf(weight[i], inputs[i], sum);
  if (params.bias != nullptr) sum += loaded(params.bias, dtype, c);
  sum = rounded(dtype, sum);
  if (params.has_silu) sum = rounded(dtype, sum / (1.f + expf(-sum)));
  store(params.out, dtype, number, sum);
  if (write < 0) return;
  uint16_t* const to = static_cast<uint16_t*>(params.state) + write * params.state_stride + int64_t{c} * kPacked;
  *reinterpret_cast<uint2*>(to) = {narrow(dtype, inputs[0], inputs[1]), narrow(dtype, inputs[2], inputs[3])};
}

// A thread for each channel of a sequence.
__global__ void __launch_bounds__(kConvThreads) step_conv(const __grid_constant__ ConvStepParams params) {
  const int64_t number = int64_t{blockIdx.x} * kConvThreads + threadIdx.x;
  if (number >= int64_t{params.batch} * params.channels) return;
  const int b = static_cast<int>(number / params.channels), c = static_cast<int>(number % params.channels);
  const int64_t read = slot_of(params.slots.read, b, params.slots.num_slots);
  const int64_t write = slot_of(params.slots.write, b, params.slots.num_slots);
  const int length = params.state_len;
  const Dtype dtype = params.weight_dtype;
  float seen[kMaxConvWidth + 1];  // the state, then the new input
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i) {
    if (i < length) {
      const int64_t at = read * params.state_stride + int64_t{c} * length + i;
      seen[i] = read < 0 ? 0.f : loaded(params.state, params.state_dtype, at);
    }
  }
  const float x = loaded(params.x, params.dtype, b * params.stride_b + c * params.stride_c);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i) {
    const int age = params.width - 1 - i;  // of the input under weight i: 0 is the new one
    if (age < 0) continue;
    const float weight = loaded(params.weight, dtype, int64_t{c} * params.width + i);
    float input = x;
#pragma unroll
    for (int j = 0; j < kMaxConvWidth; ++j) {
      if (age > 0 && j == length - age) input = seen[j];
    }
    sum = fmaf(weight, rounded(dtype, input), sum);
  }
  if (params.bias != nullptr) sum += loaded(params.bias, dtype, c);
  sum = rounded(dtype, sum);
  if (params.has_silu) sum = rounded(dtype, sum / (1.f + expf(-sum)));
  store(params.out, params.dtype, number, sum);
  if (write < 0) return;
  const int64_t target = write * params.state_stride + int64_t{c} * length;
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i) {
    if (i + 1 < length) store(params.state, params.state_dtype, target + i, rounded(dtype, seen[i + 1]));
  }
  store(params.state, params.state_dtype, target + length - 1, rounded(dtype, x));
}

// The sum over all threads of a block of whole warps, in each of them. `scratch` is for this sum alone.
__device__ __forceinline__ float summed(float x, float (&scratch)[kMaxParts]) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  const int num_warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < num_warps; ++i) sum += scratch[i];
  return sum;
}

// The sums over warps of numbers that each of their lanes has, for that lane.
template <int kCount>
__device__ __forceinline__ void sum_by_lane(float (&x)[kCount], float (&scratch)[kMaxParts][kWarp * kCount]) {
  const int lane = threadIdx.x % kWarp, num_warps = blockDim.x / kWarp;
#pragma unroll
  for (int n = 0; n < kCount; ++n) scratch[threadIdx.x / kWarp][n * kWarp + lane] = x[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    x[n] = 0.f;
    for (int i = 0; i < num_warps; ++i) x[n] += scratch[i][n * kWarp + lane];
  }
}

// kCount numbers of a state that lie side by side: 1 or 4. Each is read once, so the L2 cache keeps others.
template <int kCount, class State>
__device__ __forceinline__ void load_numbers(const State* from, float (&x)[kCount]) {
  using Words = std::conditional_t<sizeof(State) == sizeof(float), float4, uint2>;
  static_assert(kCount == 1 || kCount * sizeof(State) == sizeof(Words));
  State numbers[kCount];
  if constexpr (kCount == 1) {
    numbers[0] = *from;
  } else {
    const Words words = __ldcs(reinterpret_cast<const Words*>(from));
    memcpy(numbers, &words, sizeof words);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = from_state(numbers[i]);
}

template <int kCount, class State>
__device__ __forceinline__ void store_numbers(State* to, const float (&x)[kCount]) {
  using Words = std::conditional_t<sizeof(State) == sizeof(float), float4, uint2>;
  State numbers[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) to_state(numbers[i], x[i]);
  if constexpr (kCount == 1) {
    *to = numbers[0];
  } else {
    Words words;
    memcpy(&words, numbers, sizeof words);
    __stcs(reinterpret_cast<Words*>(to), words);
  }
}

// A thread block has 32 · kColumns columns of the matrix of a head, kColumns for each lane, and kRows rows for each
// warp. They stay in registers from the load to the store.
template <int kRows, int kColumns, class State>
__global__ void __launch_bounds__(kMaxDeltaThreads) step_delta(const __grid_constant__ DeltaStepParams params) {
  constexpr int kTile = kWarp * kColumns;
  __shared__ float query[kMaxDeltaKeyDim], key[kMaxDeltaKeyDim];
  __shared__ float of_query[kMaxParts], of_key[kMaxParts];
  __shared__ float recalled_parts[kMaxParts][kTile], out_parts[kMaxParts][kTile];
  const int num_tiles = (params.value_dim + kTile - 1) / kTile, lane = threadIdx.x % kWarp;
  const int tile = static_cast<int>(blockIdx.x % num_tiles), row = static_cast<int>(blockIdx.x / num_tiles);
  const int b = row / params.num_heads, h = row % params.num_heads;
  const int k_head = h / (params.num_heads / params.num_k_heads);
  int64_t token = b;
  if (params.begins != nullptr) {
    const Span span = span_of(params.begins, params.num_tokens, b);
    if (span.end != span.begin + 1) return;
    token = span.begin;
  }
  const int column = tile * kTile + lane * kColumns, first = static_cast<int>(threadIdx.x) / kWarp * kRows;
  const bool exists = column < params.value_dim;
  const int64_t read = slot_of(params.slots.read, b, params.slots.num_slots);
  const int64_t write = slot_of(params.slots.write, b, params.slots.num_slots);
  const int64_t in_slot = (int64_t{h} * params.key_dim + first) * params.value_dim + column;

  // First the loads that take longest.
  float state[kRows][kColumns] = {};
  if (exists && read >= 0) {
    const State* const from = static_cast<const State*>(params.state) + read * params.state_stride + in_slot;
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_numbers(from + i * params.value_dim, state[i]);
  }
  float query_squares = 0.f, key_squares = 0.f;
  for (int c = threadIdx.x; c < params.key_dim; c += blockDim.x) {
    query[c] = loaded(params.query.data, params.query.dtype,
                      token * params.query.stride_b + k_head * params.query.stride_h + c);
    key[c] = loaded(params.key.data, params.key.dtype, token * params.key.stride_b + k_head * params.key.stride_h + c);
    query_squares = fmaf(query[c], query[c], query_squares);
    key_squares = fmaf(key[c], key[c], key_squares);
  }
  const float decay = expf(loaded(params.decay.data, params.decay.dtype,
                                  token * params.decay.stride_b + h * params.decay.stride_h));
  const float beta =
      loaded(params.beta.data, params.beta.dtype, token * params.beta.stride_b + h * params.beta.stride_h);
  float change[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    change[n] = exists ? loaded(params.value.data, params.value.dtype,
                                token * params.value.stride_b + h * params.value.stride_h + column + n)
                       : 0.f;
  }
  // These also wait for the rows of all threads.
  query_squares = summed(query_squares, of_query);
  key_squares = summed(key_squares, of_key);
  const float query_factor =
      (params.normalizes ? rsqrtf(query_squares + kNormEps) : 1.f) * rsqrtf(static_cast<float>(params.key_dim));
  const float key_factor = params.normalizes ? rsqrtf(key_squares + kNormEps) : 1.f;

  float recalled[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float factor = key[first + i] * key_factor;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      state[i][n] *= decay;
      recalled[n] = fmaf(state[i][n], factor, recalled[n]);
    }
  }
  sum_by_lane(recalled, recalled_parts);
#pragma unroll
  for (int n = 0; n < kColumns; ++n) change[n] = (change[n] - recalled[n]) * beta;
  float out[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float factor = key[first + i] * key_factor, weight = query[first + i] * query_factor;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      state[i][n] = fmaf(factor, change[n], state[i][n]);
      out[n] = fmaf(state[i][n], weight, out[n]);
    }
  }
  if (exists && write >= 0) {
    State* const to = static_cast<State*>(params.target) + write * params.target_stride + in_slot;
#pragma unroll
    for (int i = 0; i < kRows; ++i) store_numbers(to + i * params.value_dim, state[i]);
  }
  sum_by_lane(out, out_parts);
  if (exists && first == 0) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      store(params.out, params.query.dtype, (token * params.num_heads + h) * params.value_dim + column + n, out[n]);
    }
  }
}

template <class State>
void launch_step(const DeltaStepParams& params, void* stream) {
  // Rows of 128 numbers for each warp. Few heads need all the thread blocks that there can be instead.
  constexpr int kWide = 4, kWideRows = 16, kManyRows = 32, kFewRows = 8;
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  const auto count = [&](int tile) { return heads * ((params.value_dim + tile - 1) / tile); };
  const auto is_even = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % (kWide * sizeof(State)) == 0 && stride % kWide == 0;
  };
  const bool is_wide = params.key_dim % kWideRows == 0 && params.value_dim % kWide == 0 &&
                       is_even(params.state, params.state_stride) && is_even(params.target, params.target_stride) &&
                       count(kWide * kWarp) >= 2 * current_device().num_multiprocessors;
  const bool has_many = params.key_dim % kManyRows == 0;
  const int rows = is_wide ? kWideRows : has_many ? kManyRows : kFewRows;
  const auto kernel = is_wide    ? step_delta<kWideRows, kWide, State>
                      : has_many ? step_delta<kManyRows, 1, State>
                                 : step_delta<kFewRows, 1, State>;
  launch("delta_step", kernel, count(is_wide ? kWide * kWarp : kWarp), params.key_dim / rows * kWarp, 0, stream,
         params);
}

}  // namespace

void conv_step(const ConvStepParams& params, void* stream) {
  const int64_t num_threads = int64_t{params.batch} * params.channels;
  const auto is_even = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (kPacked * sizeof(uint16_t)) == 0;
  };
  const bool is_packed = params.dtype != Dtype::fp32 && params.state_dtype == params.dtype &&
                         params.weight_dtype == params.dtype && params.state_len == kPacked &&
                         params.width == kPacked && params.state_stride % kPacked == 0 && is_even(params.state) &&
                         is_even(params.weight);
  launch("conv_step", is_packed ? step_packed_conv : step_conv, (num_threads + kConvThreads - 1) / kConvThreads,
         kConvThreads, 0, stream, params);
}

void delta_step(const DeltaStepParams& params, void* stream) {
  (params.state_dtype == Dtype::fp32 ? launch_step<float> : launch_step<half_bits>)(params, stream);
}

}  // namespace hf_kvquant::cuda
