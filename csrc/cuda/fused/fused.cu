// The fused ops between the linear layers of a decode step, one launch each: RMSNorm, with the addition before it or the
// gate after it if there is one, rotary embedding, silu(gate) · up. Every rounding matches the separate PyTorch kernels that these
// replace, so that a captured step chooses the same tokens as an uncaptured one.
//
// Products and sums are intrinsics, since the compiler would contract them. That leaves the order in which a row is
// summed. In PyTorch (2.10 and later, ATen/native/cuda/Reduce.cuh), `width` x `height` threads read a row of squares;
// the shape sets both (`summing_threads`). Thread t takes vectors t, t + width · height, ... of four numbers, and sums
// each of the four separately. The four are added from the first to the last, then threads by halves along the width,
// then along the height. Here, a thread block has one row and at least width · height threads; spare threads help to
// load and to write.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../../fused.h"
#include "../common/codes.cuh"
#include "../common/device.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;  // in PyTorch's reductions, and in a row's thread block here
constexpr int kMaxHeight = kMaxThreads / kWarp;
constexpr int kElementwiseThreads = 128;
constexpr int kMostShortRows = 8;  // that a thread block has a warp for

// --- numbers

template <Dtype kDtype>
using Element = std::conditional_t<kDtype == Dtype::fp32, float, uint16_t>;

template <Dtype kDtype>
__device__ __forceinline__ float widened(Element<kDtype> bits) {
  if constexpr (kDtype == Dtype::fp32) {
    return bits;
  } else if constexpr (kDtype == Dtype::fp16) {
    return half_to_float(bits);
  } else {
    return __uint_as_float(uint32_t{bits} << 16);
  }
}

template <Dtype kDtype>
__device__ __forceinline__ Element<kDtype> narrowed(float x) {
  if constexpr (kDtype == Dtype::fp32) {
    return x;
  } else if constexpr (kDtype == Dtype::fp16) {
    return float_to_half(x);
  } else {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
}

// Rounds as a separate kernel would that writes the number for the next one to read.
template <Dtype kDtype>
__device__ __forceinline__ float rounded(float x) {
  return widened<kDtype>(narrowed<kDtype>(x));
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

template <Dtype kDtype>
struct alignas(kFusedVector * sizeof(Element<kDtype>)) Vector {
  Element<kDtype> elements[kFusedVector];
  __device__ __forceinline__ float operator[](int i) const { return widened<kDtype>(elements[i]); }
};

// --- launches

// Calls `use` with the dtype as a constant.
template <class Use>
void for_dtype(Dtype dtype, Use use) {
  switch (dtype) {
    case Dtype::fp32: return use(std::integral_constant<Dtype, Dtype::fp32>{});
    case Dtype::fp16: return use(std::integral_constant<Dtype, Dtype::fp16>{});
    case Dtype::bf16: return use(std::integral_constant<Dtype, Dtype::bf16>{});
  }
}

// --- RMSNorm

struct SummingThreads {
  int width, height;  // powers of two; width is at least a warp
};

int floor_power_of_two(int64_t x) {
  int power = 1;
  while (int64_t{2} * power <= x) power *= 2;
  return power;
}

// The threads of PyTorch's thread block that share a row, as in setReduceConfig. For rows of at least 128 numbers, a
// multiple of 4, and too short to be shared by several thread blocks, which takes 256 numbers per thread.
SummingThreads summing_threads(int64_t num_rows, int num_channels) {
  const int most_wide = std::min(floor_power_of_two(num_channels / kFusedVector), kMaxThreads);
  const int most_high = std::min(floor_power_of_two(std::min<int64_t>(num_rows, kMaxThreads)), kMaxThreads);
  const int height = std::min(most_high, kMaxThreads / std::min(most_wide, kWarp));
  const int width = std::min(most_wide, kMaxThreads / height);
  // Rows are not split along the height if a thread would have fewer than 16 numbers for each row of the thread block.
  const int per_thread = (num_channels + width - 1) / width;
  return {width, per_thread >= std::min(16 * height, 256) ? height : 1};
}

// The sum of the partial sums of a thread block's first width · height threads, returned in every thread.
__device__ __forceinline__ float summed(float sum, SummingThreads threads) {
  __shared__ float of_threads[kMaxThreads];
  __shared__ float of_rows[kMaxHeight];
  const int t = threadIdx.x, x = t & (threads.width - 1), lane = t % kWarp;
  const bool is_summing = t < threads.width * threads.height;
  if (threads.width > kWarp) {
    of_threads[t] = sum;
    for (int offset = threads.width / 2; offset >= kWarp; offset /= 2) {
      __syncthreads();
      if (is_summing && x < offset) {
        sum = __fadd_rn(sum, of_threads[t + offset]);
        of_threads[t] = sum;
      }
    }
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, offset));
  }
  if (is_summing && x == 0) of_rows[t / threads.width] = sum;
  __syncthreads();
  sum = lane < threads.height ? of_rows[lane] : 0.f;
  for (int offset = threads.height / 2; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, offset));
  }
  return __shfl_sync(0xffffffffu, sum, 0);
}

// The same where one warp has a row.
__device__ __forceinline__ float summed_in_warp(float sum) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, offset));
  }
  return __shfl_sync(0xffffffffu, sum, 0);
}

// kPerThread: the most vectors per thread. kIsWarp: a thread block has a row for each warp, else one.
template <Dtype kDtype, int kPerThread, bool kAdds, bool kIsWarp>
__global__ void __launch_bounds__(kMaxThreads)
    norm_row(const __grid_constant__ RmsNormParams params, SummingThreads threads, float factor) {
  const int num_vectors = params.num_channels / kFusedVector, num_threads = kIsWarp ? kWarp : blockDim.x;
  const int t = threadIdx.x % num_threads;
  const int64_t number = kIsWarp ? int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp : blockIdx.x;
  if (kIsWarp && number >= params.num_rows) return;
  const int64_t first = number * num_vectors, first_of_x = number * (params.row_stride / kFusedVector);
  const auto row = [&params, first, first_of_x](int v) {
    Vector<kDtype> x = static_cast<const Vector<kDtype>*>(params.x)[first_of_x + v];
    if constexpr (kAdds) {
      const Vector<kDtype> other = static_cast<const Vector<kDtype>*>(params.other)[first + v];
      for_all<kFusedVector>([&](int i) { x.elements[i] = narrowed<kDtype>(__fadd_rn(x[i], other[i])); });
    }
    return x;
  };

  // Weights are loaded first, from memory; what the previous launch has written is in the L2 cache.
  Vector<kDtype> weight[kPerThread], x[kPerThread];
  for_all<kPerThread>([&](int k) {
    const int v = t + k * num_threads;
    if (v < num_vectors) weight[k] = static_cast<const Vector<kDtype>*>(params.weight)[v];
  });
  wait_for_launch_before();
  for_all<kPerThread>([&](int k) {
    const int v = t + k * num_threads;
    if (v < num_vectors) x[k] = row(v);
  });

  float mean;
  if (params.mean != nullptr) {
    mean = params.mean[number];
  } else {
    // Other threads have just loaded these, so they come from the L1 cache.
    float sums[kFusedVector] = {};
    const int num_summing = threads.width * threads.height;
    if (t < num_summing) {
#pragma unroll 4
      for (int v = t; v < num_vectors; v += num_summing) {
        const Vector<kDtype> numbers = row(v);
        for_all<kFusedVector>([&](int i) { sums[i] = __fadd_rn(sums[i], __fmul_rn(numbers[i], numbers[i])); });
      }
    }
    const float sum = __fadd_rn(__fadd_rn(__fadd_rn(sums[0], sums[1]), sums[2]), sums[3]);
    mean = __fmul_rn(kIsWarp ? summed_in_warp(sum) : summed(sum, threads), factor);
  }
  const float inverse = rsqrtf(__fadd_rn(mean, params.eps));

  for_all<kPerThread>([&](int k) {
    const int v = t + k * num_threads;
    Vector<kDtype> out, gate{};
    if (params.gate != nullptr && v < num_vectors) gate = static_cast<const Vector<kDtype>*>(params.gate)[first + v];
    for_all<kFusedVector>([&](int i) {
      const float normed = __fmul_rn(x[k][i], inverse);
      float scaled = params.is_zero_centered ? __fmul_rn(normed, __fadd_rn(1.f, weight[k][i]))
                                             : __fmul_rn(weight[k][i], rounded<kDtype>(normed));
      if (params.gate != nullptr) scaled = __fmul_rn(rounded<kDtype>(scaled), silu(gate[i]));
      out.elements[i] = narrowed<kDtype>(scaled);
    });
    if (v < num_vectors) {
      static_cast<Vector<kDtype>*>(params.out)[first + v] = out;
      if constexpr (kAdds) static_cast<Vector<kDtype>*>(params.total)[first + v] = x[k];
    }
  });
}

// --- rotary embedding

template <Dtype kDtype>
__device__ __forceinline__ const Element<kDtype>* row_of(const Dense& x, int b, int h, int t) {
  return static_cast<const Element<kDtype>*>(x.data) + (b * x.stride_b + h * x.stride_h + t * x.stride_t);
}

// A thread has one channel of the first half of what is rotated in a head and the channel of the second half that is
// rotated with it, and copies some of the others.
template <Dtype kDtype>
__global__ void __launch_bounds__(kMaxRotaryHeadDim / 2)
    rotate_heads(const __grid_constant__ RotaryParams params, int heads_per_cta) {
  const int half = params.rotary_dim / 2, c = threadIdx.x % half, slot = threadIdx.x / half;
  const int head = blockIdx.x * heads_per_cta + slot, t = blockIdx.y, b = blockIdx.z;
  wait_for_launch_before();
  // Attention comes next, and runs hundreds of instructions before it reads what this kernel writes: a captured step of
  // 32 layers takes 5.31 ms instead of 5.33 (H200, 2026-11: Llama 3 8B, int4, 1 x 2k).
  start_launch_behind();
  if (head >= params.num_q_heads + params.num_kv_heads) return;
  const bool is_query = head < params.num_q_heads;
  const int h = is_query ? head : head - params.num_q_heads;
  const auto* from = row_of<kDtype>(is_query ? params.query : params.key, b, h, t);
  const auto *cos = row_of<kDtype>(params.cos, b, 0, t), *sin = row_of<kDtype>(params.sin, b, 0, t);
  auto* to = const_cast<Element<kDtype>*>(row_of<kDtype>(is_query ? params.out_query : params.out_key, b, h, t));
  const float low = widened<kDtype>(from[c]), high = widened<kDtype>(from[c + half]);
  const auto turned = [&](int channel, float x, float other) {
    const float straight = rounded<kDtype>(__fmul_rn(x, widened<kDtype>(cos[channel])));
    const float across = rounded<kDtype>(__fmul_rn(other, widened<kDtype>(sin[channel])));
    return narrowed<kDtype>(__fadd_rn(straight, across));
  };
  to[c] = turned(c, low, -high);
  to[c + half] = turned(c + half, high, low);
  for (int other = params.rotary_dim + c; other < params.head_dim; other += half) to[other] = from[other];
}

// --- silu(gate) · up

template <Dtype kDtype>
__global__ void __launch_bounds__(kElementwiseThreads) multiply_by_silu(const __grid_constant__ SiluMulParams params) {
  const int64_t v = int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x;
  wait_for_launch_before();
  if (v >= params.numel / kFusedVector) return;
  const auto gate = static_cast<const Vector<kDtype>*>(params.gate)[v];
  const auto up = static_cast<const Vector<kDtype>*>(params.up)[v];
  Vector<kDtype> out;
  for_all<kFusedVector>([&](int i) {
    out.elements[i] = narrowed<kDtype>(__fmul_rn(rounded<kDtype>(silu(gate[i])), up[i]));
  });
  static_cast<Vector<kDtype>*>(params.out)[v] = out;
}

// --- prefetch

// A line of the L2 cache. One instruction prefetches one.
constexpr int kLineBytes = 128;
// Enough thread blocks to be in time, and few enough to leave multiprocessors to attention, which runs at the same
// time: a captured step takes 0.06 ms longer with 4 of them, 0.1 ms with 64 or 128 (H200, 2026-11: Llama 3 8B, int4, 1
// x 2k).
constexpr int kPrefetchThreads = 128, kMostCtas = 16;
constexpr int64_t kCtaBytes = kPrefetchThreads * kLineBytes;

__global__ void __launch_bounds__(kPrefetchThreads) prefetch_lines(const char* memory, int64_t num_bytes) {
  for (int64_t at = blockIdx.x * kCtaBytes + threadIdx.x * kLineBytes; at < num_bytes; at += gridDim.x * kCtaBytes) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(memory + at) : "memory");
  }
}

}  // namespace

void rms_norm(const RmsNormParams& params, void* stream) {
  constexpr int kFew = 2, kMany = 8;  // vectors per thread: for rows of up to 4096 numbers, and for the longest
  static_assert(kMany * kMaxThreads * kFusedVector >= kMaxNormChannels);
  const int num_vectors = params.num_channels / kFusedVector;
  const int num_threads = std::min((num_vectors + kWarp - 1) / kWarp * kWarp, kMaxThreads);
  SummingThreads threads = {kWarp, 1};
  if (params.mean == nullptr) threads = summing_threads(params.num_rows, params.num_channels);
  // As PyTorch computes it: number of outputs / number of inputs.
  const float factor = static_cast<float>(params.num_rows) / static_cast<float>(params.num_rows * params.num_channels);
  for_dtype(params.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    const bool is_short = num_vectors <= kFew * num_threads;
    const bool is_warp = params.other == nullptr && num_threads == kWarp && threads.height == 1;
    const auto kernel = is_warp ? norm_row<kDtype, 1, false, true>
                        : params.other == nullptr
                            ? (is_short ? norm_row<kDtype, kFew, false, false> : norm_row<kDtype, kMany, false, false>)
                            : (is_short ? norm_row<kDtype, kFew, true, false> : norm_row<kDtype, kMany, true, false>);
    const int64_t rows_per_cta = is_warp ? std::min<int64_t>(kMostShortRows, params.num_rows) : 1;
    const dim3 grid(static_cast<unsigned>((params.num_rows + rows_per_cta - 1) / rows_per_cta));
    const int cta_threads = static_cast<int>(rows_per_cta) * num_threads;
    launch("rms_norm", kernel, early(kernel, grid, cta_threads, 0, stream), params, threads, factor);
  });
}

void rotary(const RotaryParams& params, void* stream) {
  const int half = params.rotary_dim / 2, num_heads = params.num_q_heads + params.num_kv_heads;
  const int heads_per_cta = std::max(1, kElementwiseThreads / half);
  const dim3 grid((num_heads + heads_per_cta - 1) / heads_per_cta, params.q_len, params.batch);
  for_dtype(params.query.dtype, [&](auto dtype) {
    const auto kernel = rotate_heads<decltype(dtype)::value>;
    launch("rotary", kernel, early(kernel, grid, half * heads_per_cta, 0, stream), params, heads_per_cta);
  });
}

void silu_mul(const SiluMulParams& params, void* stream) {
  const int64_t num_vectors = params.numel / kFusedVector;
  const dim3 grid(static_cast<unsigned>((num_vectors + kElementwiseThreads - 1) / kElementwiseThreads));
  for_dtype(params.dtype, [&](auto dtype) {
    const auto kernel = multiply_by_silu<decltype(dtype)::value>;
    launch("silu_mul", kernel, early(kernel, grid, kElementwiseThreads, 0, stream), params);
  });
}

void prefetch(const void* memory, int64_t num_bytes, void* stream) {
  if (num_bytes == 0) return;
  const int64_t num_ctas = std::min<int64_t>((num_bytes + kCtaBytes - 1) / kCtaBytes, kMostCtas);
  launch("prefetch", prefetch_lines, num_ctas, kPrefetchThreads, 0, stream, static_cast<const char*>(memory),
         num_bytes);
}

}  // namespace hf_kvquant::cuda
