// Tokens of several sequences in one row, for layers that keep a state: the convolution and the gated delta rule. Both
// read each state from a slot and leave the new one in a slot. One launch has sequences of all lengths, and another one
// the delta rule of single tokens (state_steps.cu).
//
// The delta rule goes by chunks of 64 tokens (Yang et al. 2024, arXiv:2412.06464). With S the matrix before a chunk, c
// the sum of logarithms of decays up to a token, and L[i, j] = beta_i exp(c_i - c_j) k_i·k_j for j < i:
//   R = beta (V - exp(c) K S),   D = (1 + L)^-1 R,
//   out = exp(c) Q S + P D  with  P[i, j] = exp(c_i - c_j) q_i·k_j for j <= i,
//   S' = exp(c_last) S + (exp(c_last - c) K)^T D.
// A thread block has 64 columns of the matrix of a head, in float32 in shared memory, and a warp 16 tokens of a chunk.
//
// Precision: products go through bfloat16 tensor cores. Keys and queries of the model are exact there, since they are
// normalised afterwards. A float32 number becomes the sum of two bfloat16 numbers, which keeps 16 of its 24 bits;
// TF32 would keep 11. The inverse is float32 throughout.
#include <cuda_runtime.h>

#include <algorithm>

#include "../../fused.h"
#include "../common/device.h"
#include "../common/instructions.cuh"
#include "state.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kTokens = 64;         // of a chunk
constexpr int kColumns = 64;        // of the matrix of a head, in a thread block
constexpr int kOperand = 16;        // rows and summed numbers of a product
constexpr int kWarps = kTokens / kOperand, kDeltaThreads = kWarps * kLanes;
constexpr int kColumnTiles = kColumns / 8, kTokenTiles = kTokens / 8;
constexpr int kVector = 8;          // numbers of 16 bits that are loaded at a time
constexpr int kLineBytes = 128;     // of the L2 cache
constexpr int kConvThreads = 128, kConvTokens = 16, kConvLoads = 8;

// --- convolution

// The input at `position`, or what the state of its sequence holds of an earlier one.
__device__ __forceinline__ float input_at(const ConvChunksParams& params, const Span& span, int64_t read,
                                          int64_t position, int c) {
  if (position >= span.begin) {
    return loaded(params.x, params.dtype, position * params.stride_t + c * params.stride_c);
  }
  if (read < 0) return 0.f;
  const int64_t at = read * params.state_stride + int64_t{c} * params.state_len + params.state_len +
                     (position - span.begin);
  return loaded(params.state, params.state_dtype, at);
}

// SiLU, rounded to 16 bits afterwards or exact.
template <Dtype kDtype>
__device__ __forceinline__ float silu(float x) {
  if constexpr (kDtype == Dtype::fp32) {
    return x / (1.f + expf(-x));
  } else {
    return __fdividef(x, 1.f + __expf(-x));
  }
}

// A thread block has 16 tokens, which may be as many sequences, and a thread one channel of all of them. It loads
// several at a time. kWidth: of all weights; 0 if it is only known when the kernel runs, or if dtypes differ.
template <Dtype kDtype, int kWidth>
__global__ void __launch_bounds__(kConvThreads) conv_tokens(const __grid_constant__ ConvChunksParams params) {
  constexpr int kMost = kWidth == 0 ? kMaxConvWidth : kWidth;
  const int c = static_cast<int>(blockIdx.x) * kConvThreads + static_cast<int>(threadIdx.x);
  if (c >= params.channels) return;
  const Sequences& sequences = params.sequences;
  const int64_t first = int64_t{blockIdx.y} * kConvTokens;
  const int64_t last = min(first + kConvTokens, sequences.num_tokens);
  const int width = kWidth == 0 ? params.width : kWidth;
  const Dtype dtype = kWidth == 0 ? params.weight_dtype : kDtype;
  float weight[kMost], seen[kMost];  // seen: the inputs under the weights, oldest first
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i < width) weight[i] = loaded(params.weight, dtype, int64_t{c} * width + i);
  }
  const float bias = params.bias == nullptr ? 0.f : loaded(params.bias, dtype, c);

  // The last sequence that begins at the first token or before it.
  int s = 0;
  for (int end = sequences.count; end - s > 1;) {
    const int middle = (s + end) / 2;
    (sequences.begins[middle] <= first ? s : end) = middle;
  }
  for (int64_t t = first; t < last;) {
    Span span{last, last};
    while (s < sequences.count) {
      span = span_of(sequences, s);
      if (t < span.end) break;
      ++s, span = {last, last};
    }
    for (const int64_t stop = min(span.begin, last); t < stop; ++t) {  // tokens of none
      store(params.out, kDtype, t * params.channels + c, 0.f);
    }
    if (t == last) return;
    const int64_t read = slot_of(sequences.slots.read, s, sequences.slots.num_slots), stop = min(span.end, last);
#pragma unroll
    for (int i = 0; i + 1 < kMost; ++i) {
      if (i + 1 < width) seen[i + 1] = rounded(dtype, input_at(params, span, read, t - width + 1 + i, c));
    }
    for (; t < stop; t += kConvLoads) {
      float x[kConvLoads];
#pragma unroll
      for (int j = 0; j < kConvLoads; ++j) {
        x[j] = t + j < stop ? loaded(params.x, kDtype, (t + j) * params.stride_t + c * params.stride_c) : 0.f;
      }
#pragma unroll
      for (int j = 0; j < kConvLoads; ++j) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
          if (i + 1 < width) seen[i] = seen[i + 1];
          if (i + 1 == width) seen[i] = kWidth == 0 ? rounded(dtype, x[j]) : x[j];
          if (i < width) sum = fmaf(weight[i], seen[i], sum);
        }
        sum = rounded(dtype, sum + bias);
        if (params.has_silu) sum = rounded(dtype, silu<kDtype>(sum));
        if (t + j < stop) store(params.out, kDtype, (t + j) * params.channels + c, sum);
      }
    }
    t = stop;
  }
}

// The newest inputs of each sequence, after all tokens have read what was there.
__global__ void __launch_bounds__(kConvThreads) conv_states(const __grid_constant__ ConvChunksParams params) {
  const int c = static_cast<int>(blockIdx.x) * kConvThreads + static_cast<int>(threadIdx.x);
  if (c >= params.channels) return;
  const int s = static_cast<int>(blockIdx.y);
  const Span span = span_of(params.sequences, s);
  const int64_t read = slot_of(params.sequences.slots.read, s, params.sequences.slots.num_slots);
  const int64_t write = slot_of(params.sequences.slots.write, s, params.sequences.slots.num_slots);
  if (write < 0) return;
  float newest[kMaxConvWidth];
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i) {
    if (i < params.state_len) newest[i] = input_at(params, span, read, span.end - params.state_len + i, c);
  }
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i) {
    const int64_t at = write * params.state_stride + int64_t{c} * params.state_len + i;
    if (i < params.state_len) store(params.state, params.state_dtype, at, newest[i]);
  }
}

// --- operands

// Two float32 numbers, each as the sum of two bfloat16 numbers.
struct Split {
  uint32_t high, low;
};

__device__ __forceinline__ Split split(float x, float y) {
  const uint32_t high = pack_bfloats(x, y);
  return {high, pack_bfloats(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u))};
}

// An A operand of 16 x 16 numbers, each the sum of kParts bfloat16 numbers.
template <int kParts>
struct Operand {
  uint32_t words[kParts][4];
};

// c += a · b. `b` has the words of each part. Products of two low parts are below what the parts keep.
template <int kPartsA, int kPartsB>
__device__ __forceinline__ void add_product(float (&c)[4], const Operand<kPartsA>& a, const uint32_t (&b)[kPartsB][2]) {
#pragma unroll
  for (int i = 0; i < kPartsA; ++i) {
#pragma unroll
    for (int j = 0; j < kPartsB; ++j) {
      const uint32_t(&x)[4] = a.words[i];
      if (i + j < 2) multiply_bfloats(c, x[0], x[1], x[2], x[3], b[j][0], b[j][1]);
    }
  }
}

// Rows of 16-bit numbers in shared memory, so far apart that eight of them meet no bank conflict.
template <int kLength>
struct Rows {
  uint16_t at[kTokens][kLength + 8];
};

// Rows `row` ... row + 15 and numbers `first` ... first + 15 as A operand.
template <int kParts, int kLength>
__device__ __forceinline__ Operand<kParts> rows_of(const Rows<kLength> (&x)[kParts], int row, int first, int lane) {
  Operand<kParts> a;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    load_matrices<false>(shared_address(&x[i].at[row + lane % 16][first + lane / 16 * 8]), a.words[i]);
  }
  return a;
}

// The same transposed: numbers become rows.
template <int kParts, int kLength>
__device__ __forceinline__ Operand<kParts> columns_of(const Rows<kLength> (&x)[kParts], int row, int first, int lane) {
  Operand<kParts> a;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    load_matrices<true>(shared_address(&x[i].at[row + lane % 8 + lane / 16 * 8][first + lane / 8 % 2 * 8]), a.words[i]);
  }
  return a;
}

// Two B operands at once. Summed numbers are numbers of a row; the columns are rows `row` ... row + 15.
template <int kParts, int kLength>
__device__ __forceinline__ void load_by_rows(const Rows<kLength> (&x)[kParts], int row, int first, int lane,
                                             uint32_t (&b)[2][kParts][2]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    uint32_t words[4];
    load_matrices<false>(shared_address(&x[i].at[row + lane % 8 + lane / 16 * 8][first + lane / 8 % 2 * 8]), words);
    b[0][i][0] = words[0], b[0][i][1] = words[1], b[1][i][0] = words[2], b[1][i][1] = words[3];
  }
}

// Two B operands at once. Summed numbers are rows `row` ... row + 15; the columns are numbers of a row.
template <int kParts, int kLength>
__device__ __forceinline__ void load_by_columns(const Rows<kLength> (&x)[kParts], int row, int first, int lane,
                                                uint32_t (&b)[2][kParts][2]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    uint32_t words[4];
    load_matrices<true>(shared_address(&x[i].at[row + lane % 16][first + lane / 16 * 8]), words);
    b[0][i][0] = words[0], b[0][i][1] = words[1], b[1][i][0] = words[2], b[1][i][1] = words[3];
  }
}

// --- the delta rule

template <int kKeyDim, int kParts>
struct DeltaShared {
  static constexpr int kInverseStride = kTokens + 8, kStateStride = kColumns + 12;
  union {
    Rows<kKeyDim> query[kParts];
    float inverse[kTokens][kInverseStride];  // first L
  };
  Rows<kKeyDim> key[kParts];
  float state[kKeyDim][kStateStride];
  Rows<kColumns> values[2];  // R, then D, then D as S' takes it
  float decay[kTokens];      // c
  float beta[kTokens], query_factor[kTokens], key_factor[kTokens];
};

// Loads queries or keys of a chunk, with zeros behind the last token and channel.
template <int kParts, int kLength>
__device__ __forceinline__ void load_rows(Rows<kLength> (&to)[kParts], const Dense& x, int64_t first, int count,
                                          int head, int num_channels) {
  constexpr int kVectors = kLength / kVector, kLoads = kTokens * kVectors / kDeltaThreads;
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + first * x.stride_t + head * x.stride_h;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int number = i * kDeltaThreads + static_cast<int>(threadIdx.x), row = number / kVectors;
    const int c = number % kVectors * kVector;
    uint4 words{};
    if (row < count && c < num_channels) words = *reinterpret_cast<const uint4*>(from + row * x.stride_t + c);
    if constexpr (kParts == 1) {
      *reinterpret_cast<uint4*>(&to[0].at[row][c]) = words;
    } else {
      float numbers[kVector];
      widen(words, Dtype::fp16, numbers);
      uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Split both = split(numbers[2 * j], numbers[2 * j + 1]);
        high[j] = both.high, low[j] = both.low;
      }
      *reinterpret_cast<uint4*>(&to[0].at[row][c]) = {high[0], high[1], high[2], high[3]};
      *reinterpret_cast<uint4*>(&to[1].at[row][c]) = {low[0], low[1], low[2], low[3]};
    }
  }
}

template <int kParts, int kLength>
__device__ __forceinline__ float sum_of_squares(const Rows<kLength> (&x)[kParts], int row) {
  float sum = 0.f;
#pragma unroll 4
  for (int c = 0; c < kLength; c += kVector) {
    float numbers[kVector];
    widen(*reinterpret_cast<const uint4*>(&x[0].at[row][c]), Dtype::bf16, numbers);
    if constexpr (kParts == 2) {
      float low[kVector];
      widen(*reinterpret_cast<const uint4*>(&x[1].at[row][c]), Dtype::bf16, low);
#pragma unroll
      for (int j = 0; j < kVector; ++j) numbers[j] += low[j];
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum = fmaf(numbers[j], numbers[j], sum);
  }
  return sum;
}

// Sums up logarithms of decays over the chunk. For one warp.
__device__ __forceinline__ void load_decays(float (&to)[kTokens], const DeltaChunksParams& params, int64_t first,
                                            int count, int head, int lane) {
  float before = 0.f;
#pragma unroll
  for (int part = 0; part < kTokens / kLanes; ++part) {
    const int row = part * kLanes + lane;
    float sum = row < count ? loaded(params.decay.data, params.decay.dtype,
                                     (first + row) * params.decay.stride_t + head * params.decay.stride_h)
                            : 0.f;
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += other;
    }
    to[row] = sum + before;
    before += __shfl_sync(kAllLanes, sum, kLanes - 1);
  }
}

template <int kStride>
__device__ __forceinline__ void invert_diagonal(float (&x)[kTokens][kStride], int base, int lane) {
  // A lane has a column of the inverse of 1 + L.
  float column[kOperand];
#pragma unroll
  for (int i = 0; i < kOperand; ++i) {
    float sum = i == lane ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) sum = fmaf(-x[base + i][base + j], column[j], sum);
    column[i] = sum;
  }
  __syncwarp();
  if (lane < kOperand) {
#pragma unroll
    for (int i = 0; i < kOperand; ++i) x[base + i][base + lane] = column[i];
  }
}

// x[i][j ...] of a product of two blocks of kSize x kSize numbers.
template <int kSize, int kCount, int kStride>
__device__ __forceinline__ void product_of_blocks(const float (&x)[kTokens][kStride], int i, int first, int column,
                                                  int summed, float (&sum)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) sum[n] = 0.f;
#pragma unroll 8
  for (int k = 0; k < kSize; ++k) {
    const float a = x[i][first + k];
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float4 b = *reinterpret_cast<const float4*>(&x[summed + k][column + n]);
      sum[n] = fmaf(a, b.x, sum[n]), sum[n + 1] = fmaf(a, b.y, sum[n + 1]);
      sum[n + 2] = fmaf(a, b.z, sum[n + 2]), sum[n + 3] = fmaf(a, b.w, sum[n + 3]);
    }
  }
}

// From the inverses of diagonal blocks of kSize to those of twice the size: below them comes -T2 (L21 T1).
template <int kSize, int kStride>
__device__ __forceinline__ void merge_blocks(float (&x)[kTokens][kStride]) {
  constexpr int kCount = kSize / 4;  // numbers of a row for each thread
  static_assert(kTokens / (2 * kSize) * kSize * 4 == kDeltaThreads);
  const int number = static_cast<int>(threadIdx.x), base = number / (kSize * 4) * 2 * kSize;
  const int row = base + kSize + number / 4 % kSize, column = base + number % 4 * kCount;
  float sum[kCount];
  product_of_blocks<kSize>(x, row, base, column, base, sum);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[row][column + n] = sum[n];
  __syncthreads();
  product_of_blocks<kSize>(x, row, base + kSize, column, base + kSize, sum);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[row][column + n] = -sum[n];
}

// Writes results of a warp as rows of two parts.
__device__ __forceinline__ void store_split(Rows<kColumns> (&to)[2], const float (&x)[kColumnTiles][4], int row, int g,
                                            int t) {
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Split both = split(x[n][2 * half], x[n][2 * half + 1]);
      *reinterpret_cast<uint32_t*>(&to[0].at[row + g + 8 * half][n * 8 + 2 * t]) = both.high;
      *reinterpret_cast<uint32_t*>(&to[1].at[row + g + 8 * half][n * 8 + 2 * t]) = both.low;
    }
  }
}

template <int kKeyDim, int kParts>
__global__ void __launch_bounds__(kDeltaThreads, 2) delta_tokens(const __grid_constant__ DeltaChunksParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Shared = DeltaShared<kKeyDim, kParts>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  const int g = lane / 4, t = lane % 4, row = warp * kOperand;  // its first token in a chunk
  const int num_parts = (params.value_dim + kColumns - 1) / kColumns;
  const int first_column = static_cast<int>(blockIdx.x) % num_parts * kColumns;
  const int h = static_cast<int>(blockIdx.x) / num_parts % params.num_heads;
  const int s = static_cast<int>(blockIdx.x) / num_parts / params.num_heads;
  const int k_head = h / (params.num_heads / params.num_k_heads);
  const Sequences& sequences = params.sequences;
  const Span span = span_of(sequences, s);
  const int64_t read = slot_of(sequences.slots.read, s, sequences.slots.num_slots);
  const int64_t write = slot_of(sequences.slots.write, s, sequences.slots.num_slots);
  const bool is_one = span.end == span.begin + 1;  // `step_delta` computes those
  const bool is_half = params.query.dtype == Dtype::fp16;
  const uint16_t* const value = static_cast<const uint16_t*>(params.value.data) + h * params.value.stride_h;
  uint16_t* const out = static_cast<uint16_t*>(params.out) + int64_t{h} * params.value_dim;
  const int64_t out_stride = int64_t{params.num_heads} * params.value_dim;

  // The state.
  const int own_column = thread % kColumns;
  const bool has_column = first_column + own_column < params.value_dim;
  const int64_t in_slot = int64_t{h} * params.key_dim * params.value_dim + first_column + own_column;
  with_state(params.state, params.state_dtype, [&](const auto* from) {
#pragma unroll 16
    for (int c = thread / kColumns; c < kKeyDim; c += kDeltaThreads / kColumns) {
      const bool exists = has_column && read >= 0 && c < params.key_dim && !is_one;
      shared.state[c][own_column] =
          exists ? from_state(from[read * params.state_stride + in_slot + int64_t{c} * params.value_dim]) : 0.f;
    }
  });

  for (int64_t first = span.begin; first < span.end && !is_one; first += kTokens) {
    const int count = static_cast<int>(min(span.end - first, int64_t{kTokens}));
    const int num_tiles = (count + kOperand - 1) / kOperand;
    const bool is_busy = warp < num_tiles;
    load_rows(shared.key, params.key, first, count, k_head, params.key_dim);
    load_rows(shared.query, params.query, first, count, k_head, params.key_dim);
    if (warp == 0) load_decays(shared.decay, params, first, count, h, lane);
    if (warp == 1) {
      for (int i = lane; i < kTokens; i += kLanes) {
        shared.beta[i] = i < count ? loaded(params.beta.data, params.beta.dtype,
                                            (first + i) * params.beta.stride_t + h * params.beta.stride_h)
                                   : 0.f;
      }
    }
    uint32_t new_values[kColumnTiles][2];
    for_all<kColumnTiles, 2>([&](int n, int half) {
      const int i = row + g + 8 * half, column = first_column + n * 8 + 2 * t;
      const uint16_t* const from = value + (first + i) * params.value.stride_t + column;
      new_values[n][half] = i < count && column < params.value_dim ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    });
    __syncthreads();
    if (const int64_t next = first + kTokens + thread % kTokens; next < span.end) {
      const Dense& x = thread < kTokens ? params.key : params.query;
      const uint16_t* const from = static_cast<const uint16_t*>(x.data) + next * x.stride_t + k_head * x.stride_h;
      for (int c = 0; c < params.key_dim; c += kLineBytes / 2) prefetch(from + c);
      if (thread < kTokens) prefetch(value + next * params.value.stride_t + first_column);
    }
    {
      const int i = thread % kTokens;
      const float squares =
          thread < kTokens ? sum_of_squares(shared.key, i) : sum_of_squares(shared.query, i);
      const float factor = params.normalizes ? rsqrtf(squares + kNormEps) : 1.f;
      if (thread < kTokens) {
        shared.key_factor[i] = factor;
      } else {
        shared.query_factor[i] = factor * rsqrtf(static_cast<float>(params.key_dim));
      }
    }

    // Q S and K S.
    float result[kColumnTiles][4] = {}, change[kColumnTiles][4] = {};
    if (is_busy) {
#pragma unroll 1
      for (int k = 0; k < kKeyDim; k += kOperand) {
        const Operand<kParts> query = rows_of(shared.query, row, k, lane), key = rows_of(shared.key, row, k, lane);
        for_all<kColumnTiles>([&](int n) {
          const float* const from = &shared.state[k + 2 * t][n * 8 + g];
          constexpr int kStride = Shared::kStateStride;
          const Split near = split(from[0], from[kStride]), far = split(from[8 * kStride], from[9 * kStride]);
          const uint32_t b[2][2] = {{near.high, far.high}, {near.low, far.low}};
          add_product(result[n], query, b);
          add_product(change[n], key, b);
        });
      }
    }
    __syncthreads();
    float exp_decay[2], beta[2], query_factor[2];
    for_all<2>([&](int half) {
      const int i = row + g + 8 * half;
      exp_decay[half] = expf(shared.decay[i]);
      beta[half] = shared.beta[i], query_factor[half] = shared.query_factor[i];
    });
    if (is_busy) {
      for_all<kColumnTiles, 4>([&](int n, int e) {
        const int half = e / 2, i = row + g + 8 * half;
        const uint16_t bits = new_values[n][half] >> (16 * (e % 2));
        const float x = is_half ? half_to_float(bits) : __uint_as_float(uint32_t{bits} << 16);
        change[n][e] = beta[half] * (x - shared.key_factor[i] * exp_decay[half] * change[n][e]);
        result[n][e] *= query_factor[half] * exp_decay[half];
      });
      store_split(shared.values, change, row, g, t);
    }

    // K Kᵀ and Q Kᵀ, up to the diagonal.
    float similar[kTokenTiles][4] = {}, attended[kTokenTiles][4] = {};
    if (is_busy) {
#pragma unroll 1
      for (int k = 0; k < kKeyDim; k += kOperand) {
        const Operand<kParts> query = rows_of(shared.query, row, k, lane), key = rows_of(shared.key, row, k, lane);
        for_all<kTokenTiles / 2>([&](int n) {
          if (n > warp) return;
          uint32_t b[2][kParts][2];
          load_by_rows(shared.key, n * kOperand, k, lane, b);
          for_all<2>([&](int i) {
            add_product(similar[2 * n + i], key, b[i]);
            add_product(attended[2 * n + i], query, b[i]);
          });
        });
      }
    }
    __syncthreads();  // the inverse takes the place of the queries
    for_all<kTokenTiles, 2>([&](int n, int half) {
      const int i = row + g + 8 * half, j = n * 8 + 2 * t;
      float lower[2];
      for_all<2>([&](int e) {
        const int at = j + e;
        const float decay = at <= i ? __expf(shared.decay[i] - shared.decay[at]) * shared.key_factor[at] : 0.f;
        lower[e] = at < i ? beta[half] * shared.key_factor[i] * decay * similar[n][2 * half + e] : 0.f;
        attended[n][2 * half + e] *= decay * query_factor[half];
      });
      *reinterpret_cast<float2*>(&shared.inverse[i][j]) = {lower[0], lower[1]};
    });
    __syncwarp();
    invert_diagonal(shared.inverse, row, lane);
    if (num_tiles > 1) {
      __syncthreads();
      merge_blocks<16>(shared.inverse);
      __syncthreads();
      merge_blocks<32>(shared.inverse);
    }
    __syncthreads();

    // D = (1 + L)^-1 R.
    for_all<kColumnTiles, 4>([&](int n, int e) { change[n][e] = 0.f; });
    if (is_busy) {
#pragma unroll 1
      for (int k = 0; k <= warp; ++k) {
        Operand<2> inverse;
        for_all<4>([&](int i) {
          const float2 both = *reinterpret_cast<const float2*>(
              &shared.inverse[row + g + i % 2 * 8][k * kOperand + 2 * t + i / 2 * 8]);
          const Split parts = split(both.x, both.y);
          inverse.words[0][i] = parts.high, inverse.words[1][i] = parts.low;
        });
        for_all<kColumnTiles / 2>([&](int n) {
          uint32_t b[2][2][2];
          load_by_columns(shared.values, k * kOperand, n * kOperand, lane, b);
          for_all<2>([&](int i) { add_product(change[2 * n + i], inverse, b[i]); });
        });
      }
    }
    __syncthreads();
    if (is_busy) store_split(shared.values, change, row, g, t);
    __syncthreads();

    // The results.
    if (is_busy) {
      for_all<kTokenTiles / 2>([&](int k) {
        if (k > warp) return;
        Operand<2> weights;
        for_all<4>([&](int i) {
          const float(&from)[4] = attended[2 * k + i / 2];
          const Split parts = split(from[i % 2 * 2], from[i % 2 * 2 + 1]);
          weights.words[0][i] = parts.high, weights.words[1][i] = parts.low;
        });
        for_all<kColumnTiles / 2>([&](int n) {
          uint32_t b[2][2][2];
          load_by_columns(shared.values, k * kOperand, n * kOperand, lane, b);
          for_all<2>([&](int i) { add_product(result[2 * n + i], weights, b[i]); });
        });
      });
      for_all<kColumnTiles, 2>([&](int n, int half) {
        const int i = row + g + 8 * half, column = first_column + n * 8 + 2 * t;
        if (i >= count || column >= params.value_dim) return;
        const float low = result[n][2 * half], high = result[n][2 * half + 1];
        *reinterpret_cast<uint32_t*>(out + (first + i) * out_stride + column) =
            is_half ? pack_halves(low, high) : pack_bfloats(low, high);
      });
    }
    __syncthreads();

    // The state behind the chunk.
    const float last_decay = shared.decay[kTokens - 1];
    if (is_busy) {
      for_all<2>([&](int half) {
        const int i = row + g + 8 * half;
        const float factor = shared.key_factor[i] * expf(last_decay - shared.decay[i]);
        for_all<kColumnTiles, 2>([&](int n, int e) { change[n][2 * half + e] *= factor; });
      });
      store_split(shared.values, change, row, g, t);
    }
    __syncthreads();
    const float kept = expf(last_decay);
#pragma unroll 1
    for (int m = warp * (kKeyDim / kWarps); m < (warp + 1) * (kKeyDim / kWarps); m += kOperand) {
      float next[kColumnTiles][4];
      for_all<kColumnTiles, 2>([&](int n, int half) {
        const float2 both = *reinterpret_cast<const float2*>(&shared.state[m + g + 8 * half][n * 8 + 2 * t]);
        next[n][2 * half] = kept * both.x, next[n][2 * half + 1] = kept * both.y;
      });
#pragma unroll 1
      for (int k = 0; k < num_tiles; ++k) {
        const Operand<kParts> key = columns_of(shared.key, k * kOperand, m, lane);
        for_all<kColumnTiles / 2>([&](int n) {
          uint32_t b[2][2][2];
          load_by_columns(shared.values, k * kOperand, n * kOperand, lane, b);
          for_all<2>([&](int i) { add_product(next[2 * n + i], key, b[i]); });
        });
      }
      for_all<kColumnTiles, 2>([&](int n, int half) {
        *reinterpret_cast<float2*>(&shared.state[m + g + 8 * half][n * 8 + 2 * t]) = {next[n][2 * half],
                                                                                      next[n][2 * half + 1]};
      });
    }
    __syncthreads();
  }

  if (has_column && write >= 0 && !is_one) {
    with_state(params.state, params.state_dtype, [&](auto* to) {
#pragma unroll 4
      for (int c = thread / kColumns; c < params.key_dim; c += kDeltaThreads / kColumns) {
        const int64_t at = write * params.state_stride + in_slot + int64_t{c} * params.value_dim;
        to_state(to[at], shared.state[c][own_column]);
      }
    });
  }
  if (s + 1 == sequences.count && has_column) {  // padding behind all sequences
    for (int64_t i = span.end + thread / kColumns; i < sequences.num_tokens; i += kDeltaThreads / kColumns) {
      out[i * out_stride + first_column + own_column] = 0;
    }
  }
}

template <int kKeyDim, int kParts>
void launch_delta(const DeltaChunksParams& params, int64_t num_ctas, void* stream) {
  constexpr const char* kWhere = "delta_chunks";
  constexpr size_t kBytes = sizeof(DeltaShared<kKeyDim, kParts>);
  const auto kernel = delta_tokens<kKeyDim, kParts>;
  remember(current_device().number, [kernel] {
    check_cuda(kWhere, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
               "a thread block must get its shared memory");
    return true;
  });
  launch(kWhere, kernel, num_ctas, kDeltaThreads, kBytes, stream, params);
}

// Widths 3 and 4 are those of the models that transformers has (5.24).
template <Dtype kDtype>
auto conv_kernel(const ConvChunksParams& params) {
  const int width = params.weight_dtype == kDtype ? params.width : 0;
  return width == 4 ? conv_tokens<kDtype, 4> : width == 3 ? conv_tokens<kDtype, 3> : conv_tokens<kDtype, 0>;
}

}  // namespace

void conv_chunks(const ConvChunksParams& params, void* stream) {
  constexpr const char* kWhere = "conv_chunks";
  const auto launch_over = [&](auto kernel, int64_t rows) {
    dim3 grid = grid_of(kWhere, (params.channels + kConvThreads - 1) / kConvThreads);
    grid.y = static_cast<unsigned>(rows);
    launch(kWhere, kernel, {grid, kConvThreads, 0, stream, false}, params);
  };
  if (params.sequences.num_tokens > 0) {
    const auto kernel = params.dtype == Dtype::fp32   ? conv_kernel<Dtype::fp32>(params)
                        : params.dtype == Dtype::fp16 ? conv_kernel<Dtype::fp16>(params)
                                                      : conv_kernel<Dtype::bf16>(params);
    launch_over(kernel, (params.sequences.num_tokens + kConvTokens - 1) / kConvTokens);
  }
  launch_over(conv_states, params.sequences.count);
}

void delta_chunks(const DeltaChunksParams& params, void* stream) {
  const int64_t num_parts = (params.value_dim + kColumns - 1) / kColumns;
  const int64_t num_ctas = num_parts * params.num_heads * params.sequences.count;
  const bool is_half = params.query.dtype == Dtype::fp16, is_small = params.key_dim <= 64;
  DeltaStepParams ones{};
  const auto by_token = [](Dense x) { return Dense{x.data, x.dtype, x.stride_t, x.stride_h, 0}; };
  ones.query = by_token(params.query), ones.key = by_token(params.key), ones.value = by_token(params.value);
  ones.decay = by_token(params.decay), ones.beta = by_token(params.beta);
  ones.state = params.state, ones.target = params.state;
  ones.state_dtype = params.state_dtype;
  ones.state_stride = params.state_stride, ones.target_stride = params.state_stride;
  ones.slots = params.sequences.slots;
  ones.out = params.out;
  ones.begins = params.sequences.begins, ones.num_tokens = params.sequences.num_tokens;
  ones.batch = params.sequences.count;
  ones.num_k_heads = params.num_k_heads, ones.num_heads = params.num_heads;
  ones.key_dim = params.key_dim, ones.value_dim = params.value_dim;
  ones.normalizes = params.normalizes;
  delta_step(ones, stream);
  if (is_half) {
    (is_small ? launch_delta<64, 2> : launch_delta<128, 2>)(params, num_ctas, stream);
  } else {
    (is_small ? launch_delta<64, 1> : launch_delta<128, 1>)(params, num_ctas, stream);
  }
}

}  // namespace hf_kvquant::cuda
