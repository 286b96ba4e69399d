// One token of layers that keep a state instead of keys and values, one launch each: the convolution and the gated
// delta rule. Both work in place, in the slots of a cache, so a step reads and writes each state once. The separate
// kernels of PyTorch pass over the matrix of a head some twelve times, and those of fla need it gathered before and
// scattered after.
//
// States of 128 x 128 go through shared memory by bulk copies from compute capability 9.0 on (step_delta_bulk), others
// through registers (step_delta). Microseconds for 128 sequences of 32 such heads (H200, 2026-11, L2 cold): 141 in
// float32, 3.8 TB/s, and 73.6 in float16, 3.65 TB/s; through registers 163 and 132. Tried, with 8 to 256 sequences:
// all loads of a thread at once, float16 packed in registers, and whole columns for a warp (85 to 90 in float16,
// float32 no faster); thread blocks that stay and copy the next head meanwhile (146 and 77); hints that the L2 cache
// evicts states first (150 and 78).
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "../../fused.h"
#include "../common/bulk.cuh"
#include "../common/device.h"
#include "state.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarp = 32, kMaxParts = 16, kMaxDeltaThreads = kWarp * kMaxParts;
constexpr int kConvThreads = 256;

// Numbers of 16 bits that are loaded and stored at once.
constexpr int kPacked = 4, kPackedChannels = 2;  // the inputs of a channel, and the channels of a thread
using Packed = uint4;                            // all of them
using Pair = uint32_t;                           // a number of each channel
static_assert(sizeof(Packed) == kPacked * sizeof(Pair) && sizeof(Pair) == kPackedChannels * sizeof(uint16_t));

__device__ __forceinline__ void unpack_pair(Pair pair, Dtype dtype, float (&x)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint16_t bits = pair >> (16 * i);
    x[i] = dtype == Dtype::fp16 ? half_to_float(bits) : __uint_as_float(uint32_t{bits} << 16);
  }
}

// A thread for two channels of a sequence, where states and weights have four numbers for each, all of 16 bits and one
// dtype, and new inputs lie side by side.
__global__ void __launch_bounds__(kConvThreads) step_packed_conv(const __grid_constant__ ConvStepParams params) {
  const int b = blockIdx.y, c = (blockIdx.x * kConvThreads + threadIdx.x) * kPackedChannels;
  if (c >= params.channels) return;
  const int64_t read = slot_of(params.slots.read, b, params.slots.num_slots);
  const int64_t write = slot_of(params.slots.write, b, params.slots.num_slots);
  const Dtype dtype = params.dtype;
  const auto at = [c](const void* data, int64_t first) {
    return static_cast<const uint16_t*>(data) + first + int64_t{c} * kPacked;
  };
  Packed seen{0, 0, 0, 0};
  if (read >= 0) seen = *reinterpret_cast<const Packed*>(at(params.state, read * params.state_stride));
  const Packed weights = *reinterpret_cast<const Packed*>(at(params.weight, 0));
  const Pair inputs = *reinterpret_cast<const Pair*>(static_cast<const uint16_t*>(params.x) + b * params.stride_b + c);
  // Of each channel: its state without the oldest input, then the new one.
  const Pair moved[kPackedChannels][2] = {{__funnelshift_r(seen.x, seen.y, 16), seen.y >> 16 | inputs << 16},
                                          {__funnelshift_r(seen.z, seen.w, 16), seen.w >> 16 | (inputs & 0xffff0000u)}};
  const Pair weight[kPackedChannels][2] = {{weights.x, weights.y}, {weights.z, weights.w}};
  float sums[kPackedChannels] = {};
#pragma unroll
  for (int channel = 0; channel < kPackedChannels; ++channel) {
#pragma unroll
    for (int i = 0; i < kPacked / 2; ++i) {
      float x[2], w[2];
      unpack_pair(moved[channel][i], dtype, x);
      unpack_pair(weight[channel][i], dtype, w);
      sums[channel] = fmaf(w[1], x[1], fmaf(w[0], x[0], sums[channel]));
    }
    float& sum = sums[channel];
    if (params.bias != nullptr) sum += loaded(params.bias, dtype, c + channel);
    sum = rounded(dtype, sum);
    if (params.has_silu) sum = sum / (1.f + expf(-sum));
  }
  const int64_t to = int64_t{b} * params.channels + c;
  *reinterpret_cast<Pair*>(static_cast<uint16_t*>(params.out) + to) = narrow(dtype, sums[0], sums[1]);
  if (write < 0) return;
  uint16_t* const state = static_cast<uint16_t*>(params.state) + write * params.state_stride + int64_t{c} * kPacked;
  *reinterpret_cast<Packed*>(state) = {moved[0][0], moved[0][1], moved[1][0], moved[1][1]};
}

// Any other layout: a thread for each channel of a sequence.
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

// Four numbers of a state that lie side by side.
template <class State>
using Four = std::conditional_t<sizeof(State) == sizeof(float), float4, uint2>;

template <class State>
__device__ __forceinline__ void unpack(const Four<State>& words, float (&x)[4]) {
  State numbers[4];
  memcpy(numbers, &words, sizeof words);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = from_state(numbers[i]);
}

__device__ __forceinline__ void pack(const float (&x)[4], float4& words) { words = {x[0], x[1], x[2], x[3]}; }
__device__ __forceinline__ void pack(const float (&x)[4], uint2& words) {
  words = {to_state_pair(x[0], x[1]), to_state_pair(x[2], x[3])};
}

// kCount numbers of a state that lie side by side: 1 or 4. Each is read once, so the L2 cache keeps others.
template <int kCount, class State>
__device__ __forceinline__ void load_numbers(const State* from, float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    x[0] = from_state(*from);
  } else {
    unpack<State>(__ldcs(reinterpret_cast<const Four<State>*>(from)), x);
  }
}

template <int kCount, class State>
__device__ __forceinline__ void store_numbers(State* to, const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    to_state(*to, x[0]);
  } else {
    Four<State> words;
    pack(x, words);
    __stcs(reinterpret_cast<Four<State>*>(to), words);
  }
}

// Which head of which sequence a thread block computes.
struct Place {
  int b, h, k_head;
  int64_t token;  // -1: none
};

__device__ __forceinline__ Place place_of(const DeltaStepParams& params, int row) {
  const int b = row / params.num_heads, h = row % params.num_heads;
  Place place{b, h, h / (params.num_heads / params.num_k_heads), b};
  if (params.begins != nullptr) {
    const Span span = span_of(params.begins, params.num_tokens, b);
    place.token = span.end == span.begin + 1 ? span.begin : -1;
  }
  return place;
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
  const auto [b, h, k_head, token] = place_of(params, row);
  if (token < 0) return;
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

// --- states of 128 x 128

constexpr int kBulkDim = 128, kBulkRows = 16, kBulkWarps = kBulkDim / kBulkRows, kBulkThreads = kBulkWarps * kWarp;
// Thread blocks of a multiprocessor, as many as its shared memory allows.
template <class State>
constexpr int kBulkCtas = sizeof(State) == sizeof(float) ? 3 : 5;

// A number of any dtype that is on its way. Loads and conversions are apart, so that no load waits for the conversion
// of another. It would if a branch on the dtype had both, as in `loaded`.
struct Loading {
  uint16_t low, high;
};

__device__ __forceinline__ Loading start_load(const void* data, Dtype dtype, int64_t i) {
  const int is_wide = dtype == Dtype::fp32;
  const char* const from = static_cast<const char*>(data) + (i << (is_wide ? 2 : 1));
  Loading x{0, 0};
  // Volatile, or the compiler moves loads behind the wait for the state, where each waits for the one before. Halves,
  // since a load of 32 bits and one of 16, of which one is needed, would share a register and wait for each other.
  asm volatile("{.reg .pred wide; setp.ne.b32 wide, %3, 0;\n"
               "ld.global.u16 %0, [%2];\n"
               "@wide ld.global.u16 %1, [%2 + 2];}"
               : "=h"(x.low), "+h"(x.high)
               : "l"(from), "r"(is_wide));
  return x;
}

__device__ __forceinline__ float converted(Loading x, Dtype dtype) {
  const uint32_t bits = uint32_t{x.high} << 16 | x.low;
  const float narrow = dtype == Dtype::fp16 ? half_to_float(x.low) : __uint_as_float(bits << 16);
  return dtype == Dtype::fp32 ? __uint_as_float(bits) : narrow;
}

// A slot to check later.
__device__ __forceinline__ int64_t start_slot(const int64_t* slots, int b) {
  if (slots == nullptr) return b;
  int64_t slot;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(slot) : "l"(slots + b));
  return slot;
}

__device__ __forceinline__ void load_four(const float* from, float (&x)[4]) {
  unpack<float>(*reinterpret_cast<const float4*>(from), x);
}

__device__ __forceinline__ void store_four(float* to, const float (&x)[4]) {
  pack(x, *reinterpret_cast<float4*>(to));
}

template <class State>
struct alignas(128) BulkShared {
  State state[kBulkDim][kBulkDim];
  float query_and_key[2][kBulkDim], value[kBulkDim];
  float squares[2][kBulkDim / kWarp];  // sums over the warps that have the query, and the key
  float recalled[kBulkWarps][kBulkDim], out[kBulkWarps][kBulkDim];
  Barrier arrived[kBulkWarps];
};

// Each warp copies its rows, changes them in place and copies them back by itself; warps meet for sums alone. A lane
// has four columns. Values are recalled in the order of step_delta with as many rows, so states are the same bits.
template <class State>
__global__ void __launch_bounds__(kBulkThreads, kBulkCtas<State>)
    step_delta_bulk(const __grid_constant__ DeltaStepParams params) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<BulkShared<State>*>(memory);
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp, first = warp * kBulkRows;
  Barrier& arrived = shared.arrived[warp];
  if (lane == 0) {  // before all loads, since the fence waits for these, too
    arrived.init(1);
    show_shared_to_copies();
  }
  const auto [b, h, k_head, token] = place_of(params, static_cast<int>(blockIdx.x));
  if (token < 0) return;

  const int64_t read_slot = start_slot(params.slots.read, b), write_slot = start_slot(params.slots.write, b);
  const bool has_query = thread < kBulkDim;  // the other threads have the key
  const int channel = thread % kBulkDim;
  const auto start = [&, token = token](const Dense& x, int64_t head, int i) {
    return start_load(x.data, x.dtype, token * x.stride_b + head * x.stride_h + i);
  };
  const Dense own = has_query ? params.query : params.key;
  const Loading own_number = start(own, k_head, channel);
  Loading own_value{};
  if (has_query) own_value = start(params.value, h, channel);
  const Loading decay_number = start(params.decay, h, 0), beta_number = start(params.beta, h, 0);

  const int64_t read = checked_slot(read_slot, params.slots.num_slots);
  const int64_t write = checked_slot(write_slot, params.slots.num_slots);
  const int64_t in_slot = (int64_t{h} * kBulkDim + first) * kBulkDim;
  constexpr int kBytes = kBulkRows * kBulkDim * sizeof(State);
  State* const rows = shared.state[first];
  if (lane == 0 && read >= 0) {
    arrived.arrive_and_expect(kBytes);
    copy_bulk(rows, static_cast<const State*>(params.state) + read * params.state_stride + in_slot, kBytes, arrived);
  }

  const float number = converted(own_number, own.dtype);
  shared.query_and_key[!has_query][channel] = number;
  if (has_query) shared.value[channel] = converted(own_value, params.value.dtype);
  float squares = number * number;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (lane == 0) shared.squares[!has_query][channel / kWarp] = squares;
  __syncthreads();  // also shows the barriers to the warps
  const auto norm = [&](int i) {
    float x[4];
    load_four(shared.squares[i], x);
    return params.normalizes ? rsqrtf(x[0] + x[1] + x[2] + x[3] + kNormEps) : 1.f;
  };
  const float query_factor = norm(0) * rsqrtf(static_cast<float>(kBulkDim)), key_factor = norm(1);
  const float decay = expf(converted(decay_number, params.decay.dtype));

  auto* const fours = reinterpret_cast<Four<State>*>(rows) + lane;  // kWarp of them are a row
  if (read >= 0) {
    arrived.wait(0);
  } else {
#pragma unroll
    for (int i = 0; i < kBulkRows; ++i) fours[i * kWarp] = {};
  }
  float recalled[4] = {};
#pragma unroll
  for (int i = 0; i < kBulkRows; i += 4) {
    float keys[4];
    load_four(shared.query_and_key[1] + first + i, keys);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float state[4];
      unpack<State>(fours[(i + j) * kWarp], state);
      const float factor = keys[j] * key_factor;
#pragma unroll
      for (int n = 0; n < 4; ++n) recalled[n] = fmaf(state[n] * decay, factor, recalled[n]);
    }
  }
  store_four(shared.recalled[warp] + lane * 4, recalled);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 4; ++n) recalled[n] = 0.f;
#pragma unroll
  for (int i = 0; i < kBulkWarps; ++i) {
    float part[4];
    load_four(shared.recalled[i] + lane * 4, part);
#pragma unroll
    for (int n = 0; n < 4; ++n) recalled[n] += part[n];
  }
  float change[4], out[4] = {};
  load_four(shared.value + lane * 4, change);
  const float beta = converted(beta_number, params.beta.dtype);
#pragma unroll
  for (int n = 0; n < 4; ++n) change[n] = (change[n] - recalled[n]) * beta;
#pragma unroll
  for (int i = 0; i < kBulkRows; i += 4) {
    float keys[4], queries[4];
    load_four(shared.query_and_key[1] + first + i, keys);
    load_four(shared.query_and_key[0] + first + i, queries);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float state[4];
      unpack<State>(fours[(i + j) * kWarp], state);
      const float factor = keys[j] * key_factor, weight = queries[j] * query_factor;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        state[n] = fmaf(factor, change[n], state[n] * decay);
        out[n] = fmaf(state[n], weight, out[n]);
      }
      pack(state, fours[(i + j) * kWarp]);
    }
  }
  show_shared_to_copies();
  __syncwarp();
  if (lane == 0 && write >= 0) {
    store_bulk(static_cast<State*>(params.target) + write * params.target_stride + in_slot, rows, kBytes);
    commit_bulk_stores();
  }
  store_four(shared.out[warp] + lane * 4, out);
  __syncthreads();
  if (thread < kBulkDim) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kBulkWarps; ++i) sum += shared.out[i][thread];
    store(params.out, params.query.dtype, (token * params.num_heads + h) * kBulkDim + thread, sum);
  }
  if (lane == 0) wait_for_bulk_reads();
#endif
}

// Launches that kernel where the GPU, the extension's code for it and the call allow.
template <class State>
bool launch_bulk(const DeltaStepParams& params, void* stream) {
  constexpr const char* kWhere = "delta_step";
  constexpr int kBytes = sizeof(BulkShared<State>), kAlignment = 16;
  const auto is_even = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && stride * sizeof(State) % kAlignment == 0;
  };
  const auto kernel = step_delta_bulk<State>;
  const bool fits = params.key_dim == kBulkDim && params.value_dim == kBulkDim &&
                    is_even(params.state, params.state_stride) && is_even(params.target, params.target_stride) &&
                    code_capability(reinterpret_cast<const void*>(kernel)) >= 90;
  if (!fits) return false;
  remember(current_device().number, [kernel] {
    constexpr const char* kWhat = "a thread block must get its shared memory";
    check_cuda(kWhere, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kWhat);
    check_cuda(kWhere, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100), kWhat);
    return true;
  });
  launch(kWhere, kernel, int64_t{params.batch} * params.num_heads, kBulkThreads, kBytes, stream, params);
  return true;
}

template <class State>
void launch_step(const DeltaStepParams& params, void* stream) {
  if (launch_bulk<State>(params, stream)) return;
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
  const auto is_even = [](const void* data, int64_t stride, size_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride * sizeof(uint16_t) % bytes == 0;
  };
  const bool is_packed = params.dtype != Dtype::fp32 && params.state_dtype == params.dtype &&
                         params.weight_dtype == params.dtype && params.state_len == kPacked &&
                         params.width == kPacked && params.channels % kPackedChannels == 0 && params.stride_c == 1 &&
                         is_even(params.x, params.stride_b, sizeof(Pair)) &&
                         is_even(params.state, params.state_stride, sizeof(Packed)) &&
                         is_even(params.weight, 0, sizeof(Packed));
  constexpr int kMostSequences = 65535;  // of an axis of a grid
  if (is_packed && params.batch <= kMostSequences) {
    dim3 grid = grid_of("conv_step", (params.channels / kPackedChannels + kConvThreads - 1) / kConvThreads);
    grid.y = params.batch;
    launch("conv_step", step_packed_conv, {grid, kConvThreads, 0, stream, false}, params);
    return;
  }
  const int64_t num_threads = int64_t{params.batch} * params.channels;
  launch("conv_step", step_conv, (num_threads + kConvThreads - 1) / kConvThreads, kConvThreads, 0, stream, params);
}

void delta_step(const DeltaStepParams& params, void* stream) {
  (params.state_dtype == Dtype::fp32 ? launch_step<float> : launch_step<half_bits>)(params, stream);
}

}  // namespace hf_kvquant::cuda
