// One token of layers that keep a state instead of keys and values, one launch each: the convolution and the gated delta
// rule. Both work in place, in the slots of a cache, so a step reads and writes each state once. The separate kernels of
// PyTorch pass over the matrix of a head some twelve times, and those of fla need it gathered before and scattered after.
#include <cuda_runtime.h>

#include "../../fused.h"
#include "../common/device.h"
#include "state.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarp = 32, kMaxParts = 8, kMaxDeltaThreads = kWarp * kMaxParts;
constexpr int kConvThreads = 256;

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

// The sum over warps of a number that each of their lanes has, for that lane.
__device__ __forceinline__ float summed_by_lane(float x, float (&scratch)[kMaxParts][kWarp]) {
  const int lane = threadIdx.x % kWarp, num_warps = blockDim.x / kWarp;
  scratch[threadIdx.x / kWarp][lane] = x;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < num_warps; ++i) sum += scratch[i][lane];
  return sum;
}

// A thread block has 32 columns of the matrix of a head, a column for each lane, and kRows rows for each warp. They stay
// in registers from the load to the store.
template <int kRows>
__global__ void __launch_bounds__(kMaxDeltaThreads) step_delta(const __grid_constant__ DeltaStepParams params) {
  __shared__ float query[kMaxDeltaKeyDim], key[kMaxDeltaKeyDim];
  __shared__ float of_query[kMaxParts], of_key[kMaxParts];
  __shared__ float recalled_parts[kMaxParts][kWarp], out_parts[kMaxParts][kWarp];
  const int num_tiles = (params.value_dim + kWarp - 1) / kWarp, lane = threadIdx.x % kWarp;
  const int tile = static_cast<int>(blockIdx.x % num_tiles), row = static_cast<int>(blockIdx.x / num_tiles);
  const int b = row / params.num_heads, h = row % params.num_heads;
  const int k_head = h / (params.num_heads / params.num_k_heads);
  const int column = tile * kWarp + lane, first = static_cast<int>(threadIdx.x) / kWarp * kRows;
  const bool exists = column < params.value_dim;
  const int64_t read = slot_of(params.slots.read, b, params.slots.num_slots);
  const int64_t write = slot_of(params.slots.write, b, params.slots.num_slots);
  const int64_t in_slot = (int64_t{h} * params.key_dim + first) * params.value_dim + column;

  // First the loads that take longest.
  float state[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    state[i] = exists && read >= 0 ? params.state[read * params.state_stride + in_slot + i * params.value_dim] : 0.f;
  }
  float query_squares = 0.f, key_squares = 0.f;
  for (int c = threadIdx.x; c < params.key_dim; c += blockDim.x) {
    query[c] = loaded(params.query.data, params.query.dtype,
                      b * params.query.stride_b + k_head * params.query.stride_h + c);
    key[c] = loaded(params.key.data, params.key.dtype, b * params.key.stride_b + k_head * params.key.stride_h + c);
    query_squares = fmaf(query[c], query[c], query_squares);
    key_squares = fmaf(key[c], key[c], key_squares);
  }
  // These also wait for the rows of all threads.
  query_squares = summed(query_squares, of_query);
  key_squares = summed(key_squares, of_key);
  const float query_factor =
      (params.normalizes ? rsqrtf(query_squares + kNormEps) : 1.f) * rsqrtf(static_cast<float>(params.key_dim));
  const float key_factor = params.normalizes ? rsqrtf(key_squares + kNormEps) : 1.f;
  const float decay = expf(loaded(params.decay.data, params.decay.dtype,
                                  b * params.decay.stride_b + h * params.decay.stride_h));
  const float beta =
      loaded(params.beta.data, params.beta.dtype, b * params.beta.stride_b + h * params.beta.stride_h);
  const float value = exists ? loaded(params.value.data, params.value.dtype,
                                      b * params.value.stride_b + h * params.value.stride_h + column)
                             : 0.f;

  float recalled = 0.f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    state[i] *= decay;
    recalled = fmaf(state[i], key[first + i] * key_factor, recalled);
  }
  recalled = summed_by_lane(recalled, recalled_parts);
  const float change = (value - recalled) * beta;
  float out = 0.f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    state[i] = fmaf(key[first + i] * key_factor, change, state[i]);
    out = fmaf(state[i], query[first + i] * query_factor, out);
  }
  if (exists && write >= 0) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      params.target[write * params.target_stride + in_slot + i * params.value_dim] = state[i];
    }
  }
  out = summed_by_lane(out, out_parts);
  if (exists && first == 0) {
    store(params.out, params.query.dtype, int64_t{row} * params.value_dim + column, out);
  }
}

}  // namespace

void conv_step(const ConvStepParams& params, void* stream) {
  const int64_t num_threads = int64_t{params.batch} * params.channels;
  launch("conv_step", step_conv, (num_threads + kConvThreads - 1) / kConvThreads, kConvThreads, 0, stream, params);
}

void delta_step(const DeltaStepParams& params, void* stream) {
  constexpr int kManyRows = 32, kFewRows = 8;
  const bool has_many = params.key_dim % kManyRows == 0;
  const int num_warps = params.key_dim / (has_many ? kManyRows : kFewRows);
  const int64_t num_ctas =
      int64_t{params.batch} * params.num_heads * ((params.value_dim + kWarp - 1) / kWarp);
  launch("delta_step", has_many ? step_delta<kManyRows> : step_delta<kFewRows>, num_ctas, num_warps * kWarp, 0, stream,
         params);
}

}  // namespace hf_kvquant::cuda
