// The fused ops between the linear layers of a step, one launch each: RMSNorm, with the addition before it or the gate
// after it if there is one, rotary embedding, silu(gate) · up. Every rounding matches the separate PyTorch kernels that
// these replace, so that a captured step chooses the same tokens as an uncaptured one.
//
// Products and sums are intrinsics, since the compiler would contract them. That leaves the order in which a row is
// summed. In PyTorch (2.10 and later, ATen/native/cuda/Reduce.cuh), `width` x `height` threads read a row of squares;
// the shape sets both (`summing_threads`). Thread t takes vectors t, t + width · height, ... of four numbers, and sums
// each of the four separately. The four are added from the first to the last, then threads by halves along the width,
// then along the height. Here, a thread block has one row and at least width · height threads; spare threads help to
// load, to add and to write. Of short rows, a warp has one or more.
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
constexpr int kMostWarps = 8;      // of a thread block where each has rows of its own
constexpr int kRowsPerWarp = 4;    // of short rows, if there are many
constexpr int kManyShortRows = 64;  // for each multiprocessor

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

// Numbers that are loaded and stored at once. Pairs of 16 bits stay in a register of their own.
template <Dtype kDtype, int kNumbers = kFusedVector>
struct alignas(kNumbers * sizeof(Element<kDtype>)) Vector {
  static constexpr int kPerWord = kDtype == Dtype::fp32 || kNumbers == 1 ? 1 : 2;
  using Word = std::conditional_t<kPerWord == 2, uint32_t, Element<kDtype>>;
  Word words[kNumbers / kPerWord];

  template <class Number>
  static __device__ __forceinline__ Vector of(Number number) {
    Vector result;
    for_all<kNumbers / kPerWord>([&](int w) {
      if constexpr (kPerWord == 2) {
        result.words[w] = narrow(kDtype, number(2 * w), number(2 * w + 1));
      } else {
        result.words[w] = narrowed<kDtype>(number(w));
      }
    });
    return result;
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kPerWord == 1) return widened<kDtype>(words[i]);
    else return widened<kDtype>(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
  }
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
__device__ __forceinline__ float summed(float sum, SummingThreads threads, float (&of_threads)[kMaxThreads]) {
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

// One row of a norm, by vectors.
template <Dtype kDtype, bool kAdds>
struct NormRow {
  using Numbers = Vector<kDtype>;
  const RmsNormParams& params;
  int64_t first, first_of_x;

  __device__ __forceinline__ NormRow(const RmsNormParams& params, int64_t number)
      : params(params),
        first(number * (params.num_channels / kFusedVector)),
        first_of_x(number * (params.row_stride / kFusedVector)) {}

  __device__ __forceinline__ Numbers load(int v) const {
    const Numbers x = static_cast<const Numbers*>(params.x)[first_of_x + v];
    if constexpr (kAdds) {
      const Numbers other = static_cast<const Numbers*>(params.other)[first + v];
      return Numbers::of([&](int i) { return __fadd_rn(x[i], other[i]); });
    } else {
      return x;
    }
  }

  __device__ __forceinline__ Numbers weight(int v) const { return static_cast<const Numbers*>(params.weight)[v]; }

  template <bool kGates>
  __device__ __forceinline__ void store(int v, const Numbers& x, const Numbers& weight, float inverse) const {
    Numbers gate{};
    if constexpr (kGates) gate = static_cast<const Numbers*>(params.gate)[first + v];
    static_cast<Numbers*>(params.out)[first + v] = Numbers::of([&](int i) {
      const float normed = __fmul_rn(x[i], inverse);
      const float scaled = __fmul_rn(params.is_zero_centered ? normed : rounded<kDtype>(normed),
                                     params.is_zero_centered ? __fadd_rn(1.f, weight[i]) : weight[i]);
      if constexpr (kGates) return __fmul_rn(rounded<kDtype>(scaled), silu(gate[i]));
      return scaled;
    });
    if constexpr (kAdds) static_cast<Numbers*>(params.total)[first + v] = x;
  }

  // Calls `use` with whether there is a gate, as a constant: a branch for each vector would hold back what is loaded.
  template <class Use>
  __device__ __forceinline__ void with_gate(Use use) const {
    if constexpr (!kAdds) {
      if (params.gate != nullptr) return use(std::true_type{});
    }
    use(std::false_type{});
  }
};

// The sum of the squares of a row that a thread block holds, thread t vectors t, t + blockDim, ...
// `squares`: shared memory for those of the row, used where PyTorch has fewer threads, as it does for 16 rows and more.
// A thread here sums what one there would sum of every fourth number. With one thread for all four, the others waited
// for four times as many additions, one behind the other, of numbers that were loaded again: for 8,192 rows of 4,096
// bf16 numbers with an addition 156 us instead of 68, for 64 rows 20 instead of 2.4 (H200, 2026-11).
template <Dtype kDtype, int kPerThread>
__device__ __forceinline__ float sum_of_squares(const Vector<kDtype> (&x)[kPerThread], int num_vectors,
                                                SummingThreads threads, float4* squares) {
  __shared__ float of_threads[kMaxThreads];
  const int t = threadIdx.x, num_threads = blockDim.x, num_summing = threads.width * threads.height;
  const auto square = [](float number) { return __fmul_rn(number, number); };
  if (num_summing == num_threads) {
    float sums[kFusedVector] = {};
    for_all<kPerThread>([&](int k) {
      if (t + k * num_threads >= num_vectors) return;
      for_all<kFusedVector>([&](int i) { sums[i] = __fadd_rn(sums[i], square(x[k][i])); });
    });
    return summed(__fadd_rn(__fadd_rn(__fadd_rn(sums[0], sums[1]), sums[2]), sums[3]), threads, of_threads);
  }
  for_all<kPerThread>([&](int k) {
    const int v = t + k * num_threads;
    if (v < num_vectors) squares[v] = {square(x[k][0]), square(x[k][1]), square(x[k][2]), square(x[k][3])};
  });
  __syncthreads();
  const auto* numbers = reinterpret_cast<const float*>(squares);
  const int num_sums = kFusedVector * num_summing;
  for (int first = 0; first < num_sums; first += num_threads) {
    float sum = 0.f;
    if (first + t < num_sums) {
#pragma unroll 8
      for (int c = first + t; c < kFusedVector * num_vectors; c += num_sums) sum = __fadd_rn(sum, numbers[c]);
    }
    float of_four = sum;
    for (int i = 1; i < kFusedVector; ++i) of_four = __fadd_rn(of_four, __shfl_down_sync(0xffffffffu, sum, i));
    if (first + t < num_sums && t % kFusedVector == 0) of_threads[(first + t) / kFusedVector] = of_four;
  }
  __syncthreads();
  return summed(t < num_summing ? of_threads[t] : 0.f, threads, of_threads);
}

// A thread block has a row. kPerThread: the most vectors per thread.
template <Dtype kDtype, int kPerThread, bool kAdds>
__global__ void __launch_bounds__(kMaxThreads)
    norm_row(const __grid_constant__ RmsNormParams params, SummingThreads threads, float factor) {
  extern __shared__ float4 squares[];
  const int num_vectors = params.num_channels / kFusedVector, t = threadIdx.x;
  const NormRow<kDtype, kAdds> row(params, blockIdx.x);

  const auto vector_of = [&](int k) { return t + k * static_cast<int>(blockDim.x); };
  const auto loadable = [&](int k) { return min(vector_of(k), num_vectors - 1); };  // a branch would wait for loads

  // Weights are loaded first, from memory; what the previous launch has written is in the L2 cache.
  Vector<kDtype> weight[kPerThread], x[kPerThread];
  for_all<kPerThread>([&](int k) { weight[k] = row.weight(loadable(k)); });
  wait_for_launch_before();
  for_all<kPerThread>([&](int k) { x[k] = row.load(loadable(k)); });
  const float mean = params.mean != nullptr
                         ? params.mean[blockIdx.x]
                         : __fmul_rn(sum_of_squares<kDtype>(x, num_vectors, threads, squares), factor);
  const float inverse = rsqrtf(__fadd_rn(mean, params.eps));
  row.with_gate([&](auto gates) {
    for_all<kPerThread>([&](int k) {
      if (vector_of(k) < num_vectors) row.template store<gates>(vector_of(k), x[k], weight[k], inverse);
    });
  });
}

// The kernel for `per_thread` vectors per thread.
template <Dtype kDtype, bool kAdds>
auto norm_for(int per_thread) {
  constexpr int kMost = kMaxNormChannels / (kMaxThreads * kFusedVector);
  static_assert(kMost * kMaxThreads * kFusedVector == kMaxNormChannels);
  return per_thread <= 2   ? norm_row<kDtype, 2, kAdds>
         : per_thread <= 4 ? norm_row<kDtype, 4, kAdds>
                           : norm_row<kDtype, kMost, kAdds>;
}

// A warp has kRows rows of at most 128 numbers. With one row for each warp, too few loads are on their way to fill a GPU.
template <Dtype kDtype, int kRows>
__global__ void __launch_bounds__(kMostWarps * kWarp)
    norm_short_rows(const __grid_constant__ RmsNormParams params, float factor) {
  const int num_vectors = params.num_channels / kFusedVector, t = threadIdx.x % kWarp;
  const int64_t first = (int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp) * kRows;
  using Row = NormRow<kDtype, false>;
  Vector<kDtype> weight{}, x[kRows] = {};
  if (t < num_vectors) weight = Row(params, 0).weight(t);
  wait_for_launch_before();
  for_all<kRows>([&](int r) {
    if (t < num_vectors && first + r < params.num_rows) x[r] = Row(params, first + r).load(t);
  });
  for_all<kRows>([&](int r) {
    if (first + r >= params.num_rows) return;
    float mean;
    if (params.mean != nullptr) {
      mean = params.mean[first + r];
    } else {
      float sum = __fmul_rn(x[r][0], x[r][0]);
      for (int i = 1; i < kFusedVector; ++i) sum = __fadd_rn(sum, __fmul_rn(x[r][i], x[r][i]));
      mean = __fmul_rn(summed_in_warp(sum), factor);
    }
    const float inverse = rsqrtf(__fadd_rn(mean, params.eps));
    const Row row(params, first + r);
    row.with_gate([&](auto gates) {
      if (t < num_vectors) row.template store<gates>(t, x[r], weight, inverse);
    });
  });
}

// --- rotary embedding

template <Dtype kDtype>
__device__ __forceinline__ const Element<kDtype>* row_of(const Dense& x, int b, int h, int t) {
  return static_cast<const Element<kDtype>*>(x.data) + (b * x.stride_b + h * x.stride_h + t * x.stride_t);
}

// A thread has kVector channels of the first half of what is rotated in a head and the channels of the second half that
// are rotated with them, and copies some of the others.
template <Dtype kDtype, int kVector>
__global__ void __launch_bounds__(kMaxRotaryHeadDim / 2)
    rotate_heads(const __grid_constant__ RotaryParams params, int heads_per_cta, int ctas_per_token) {
  using Numbers = Vector<kDtype, kVector>;
  const int half = params.rotary_dim / 2, threads_per_head = half / kVector;
  const int c = threadIdx.x % threads_per_head * kVector, slot = threadIdx.x / threads_per_head;
  const int t = blockIdx.x / ctas_per_token, b = blockIdx.y;
  const int head = blockIdx.x % ctas_per_token * heads_per_cta + slot;
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
  const auto at = [](auto* row, int channel) { return reinterpret_cast<const Numbers*>(row + channel); };
  const Numbers low = *at(from, c), high = *at(from, c + half);
  const auto turn = [&](int channel, const Numbers& x, const Numbers& other, float sign) {
    const Numbers cosines = *at(cos, channel), sines = *at(sin, channel);
    *reinterpret_cast<Numbers*>(to + channel) = Numbers::of([&](int i) {
      const float straight = rounded<kDtype>(__fmul_rn(x[i], cosines[i]));
      const float across = rounded<kDtype>(__fmul_rn(sign * other[i], sines[i]));
      return __fadd_rn(straight, across);
    });
  };
  turn(c, low, high, -1.f);
  turn(c + half, high, low, 1.f);
  for (int other = params.rotary_dim + c; other < params.head_dim; other += half) {
    *reinterpret_cast<Numbers*>(to + other) = *at(from, other);
  }
}

// --- silu(gate) · up

template <Dtype kDtype>
__global__ void __launch_bounds__(kElementwiseThreads) multiply_by_silu(const __grid_constant__ SiluMulParams params) {
  const int64_t v = int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x;
  wait_for_launch_before();
  if (v >= params.numel / kFusedVector) return;
  const auto gate = static_cast<const Vector<kDtype>*>(params.gate)[v];
  const auto up = static_cast<const Vector<kDtype>*>(params.up)[v];
  static_cast<Vector<kDtype>*>(params.out)[v] =
      Vector<kDtype>::of([&](int i) { return __fmul_rn(rounded<kDtype>(silu(gate[i])), up[i]); });
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
  const int num_vectors = params.num_channels / kFusedVector;
  SummingThreads threads = {kWarp, 1};
  if (params.mean == nullptr) threads = summing_threads(params.num_rows, params.num_channels);
  // As PyTorch computes it: number of outputs / number of inputs.
  const float factor = static_cast<float>(params.num_rows) / static_cast<float>(params.num_rows * params.num_channels);
  for_dtype(params.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    if (params.other == nullptr && num_vectors <= kWarp && threads.height == 1) {
      const bool is_many = params.num_rows >= int64_t{kManyShortRows} * current_device().num_multiprocessors;
      const auto kernel = is_many ? norm_short_rows<kDtype, kRowsPerWarp> : norm_short_rows<kDtype, 1>;
      const int64_t rows_per_cta = std::min<int64_t>(kMostWarps * (is_many ? kRowsPerWarp : 1), params.num_rows);
      const int num_threads = static_cast<int>(is_many ? kMostWarps : rows_per_cta) * kWarp;
      const dim3 grid = grid_of("rms_norm", (params.num_rows + rows_per_cta - 1) / rows_per_cta);
      return launch("rms_norm", kernel, early(kernel, grid, num_threads, 0, stream), params, factor);
    }
    const int num_threads = std::min((num_vectors + kWarp - 1) / kWarp * kWarp, kMaxThreads);
    const int per_thread = (num_vectors + num_threads - 1) / num_threads;
    const auto kernel =
        params.other == nullptr ? norm_for<kDtype, false>(per_thread) : norm_for<kDtype, true>(per_thread);
    const bool needs_squares = params.mean == nullptr && threads.width * threads.height != num_threads;
    // Below 48 KB, which every kernel may have: from 8192 channels on, PyTorch has as many threads.
    const size_t shared_bytes = needs_squares ? params.num_channels * sizeof(float) : 0;
    const dim3 grid = grid_of("rms_norm", params.num_rows);
    launch("rms_norm", kernel, early(kernel, grid, num_threads, shared_bytes, stream), params, threads, factor);
  });
}

namespace {

// Whether all that the kernel touches comes in whole vectors.
template <Dtype kDtype>
bool has_rotary_vectors(const RotaryParams& params) {
  const auto has_vectors = [](const Dense& x) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(x.data) % sizeof(Vector<kDtype>) == 0;
    return is_aligned && (x.stride_b | x.stride_h | x.stride_t) % kFusedVector == 0;
  };
  return params.rotary_dim % (2 * kFusedVector) == 0 && params.head_dim % kFusedVector == 0 &&
         has_vectors(params.query) && has_vectors(params.key) && has_vectors(params.cos) && has_vectors(params.sin) &&
         has_vectors(params.out_query) && has_vectors(params.out_key);
}

}  // namespace

void rotary(const RotaryParams& params, void* stream) {
  const int half = params.rotary_dim / 2, num_heads = params.num_q_heads + params.num_kv_heads;
  for_dtype(params.query.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    const bool has_vectors = has_rotary_vectors<kDtype>(params);
    const auto kernel = has_vectors ? rotate_heads<kDtype, kFusedVector> : rotate_heads<kDtype, 1>;
    const int threads_per_head = half / (has_vectors ? kFusedVector : 1);
    const int heads_per_cta = std::clamp(kElementwiseThreads / threads_per_head, 1, num_heads);
    const int ctas_per_token = (num_heads + heads_per_cta - 1) / heads_per_cta;
    dim3 grid = grid_of("rotary", int64_t{ctas_per_token} * params.q_len);
    grid.y = params.batch;
    launch("rotary", kernel, early(kernel, grid, threads_per_head * heads_per_cta, 0, stream), params, heads_per_cta,
           ctas_per_token);
  });
}

void silu_mul(const SiluMulParams& params, void* stream) {
  const int64_t num_vectors = params.numel / kFusedVector;
  const dim3 grid = grid_of("silu_mul", (num_vectors + kElementwiseThreads - 1) / kElementwiseThreads);
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
