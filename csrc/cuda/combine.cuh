// Merging partial softmax results, of the warps of a block and of the blocks that share a unit, and writing the result.
//
// A partial result of a row is its maximum m (in log2 units), the sum l of 2^(score - m), and the sum of values under
// the same weights; several merge as in online softmax. Blocks leave theirs in the workspace and count their arrival at
// a counter that wraps to 0; whoever completes the count merges all parts, in the order of the sequence, so the result
// does not depend on who that is.
#pragma once

#include "codes.cuh"
#include "schedule.cuh"

namespace hf_kvquant::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// 2^(x - maximum), 0 where nothing has been seen yet (both -inf).
__device__ __forceinline__ float exp2_below(float x, float maximum) {
  return exp2_approx(x - (maximum == -INFINITY ? 0.f : maximum));
}

// The layout of a partial result in the workspace: kRows · kHeadDim values, then (m, l) of each row.
template <int kRows, int kHeadDim>
struct Partial {
  static constexpr int64_t kFloats = int64_t{kRows} * (kHeadDim + 2);

  static __device__ __forceinline__ float4* values(float* slot, int row, int c) {
    return reinterpret_cast<float4*>(slot + row * kHeadDim + c);
  }
  static __device__ __forceinline__ float2* sums(float* slot, int row) {
    return reinterpret_cast<float2*>(slot + kRows * kHeadDim) + row;
  }
};

// Where a part's result is in the workspace, in multiples of Partial::kFloats.
__device__ __forceinline__ int64_t slot_of(const DecodePlan& plan, const Segment& segment, int part) {
  return int64_t{segment.unit} * plan.num_splits.value + part;
}

// Counts one more part of a unit that is in the workspace. By one thread, after a barrier with those who wrote it.
// Whether it was the last one; then all parts may be read.
__device__ __forceinline__ bool arrive(const DecodeParams& params, const Segment& segment) {
  const unsigned last = segment.num_parts - 1;
  unsigned before;
  // One instruction that releases what was written and acquires what others wrote; two fences around an atomic cost
  // more.
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(params.counters + segment.unit), "r"(last)
               : "memory");
  return before == last;
}

// Four channels of a row's output, from their weighted sum, the maximum and the sum of weights; whoever has the first
// ones also writes the row's lse.
template <int kRows>
__device__ __forceinline__ void write_output(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                             int row, int c, float4 total, float maximum, float sum) {
  constexpr float kLn2 = 0.6931471805599453f;
  const int index = segment.row_tile * kRows + row, i = plan.rows.token(index);
  const int head = segment.h * static_cast<int>(plan.rows.num_q_per_kv.value) + plan.rows.head(index);
  if (params.sinks != nullptr) {
    const float sink = params.sinks[head] * kLog2E, before = maximum;
    maximum = fmaxf(before, sink);
    const float kept = exp2_below(before, maximum);
    total.x *= kept, total.y *= kept, total.z *= kept, total.w *= kept;
    sum = sum * kept + exp2_below(sink, maximum);
  }
  const float factor = sum == 0.f ? 0.f : 1.f / sum;
  const int64_t first =
      ((int64_t{segment.b} * params.q_len + i) * params.num_q_heads + head) * params.value_side.head_dim + c;
  // Head dims are multiples of 8, so four channels lie at a multiple of 8 bytes.
  uint2 words;
  if (params.query.dtype == Dtype::fp16) {
    words = {pack_halves(total.x * factor, total.y * factor), pack_halves(total.z * factor, total.w * factor)};
  } else {
    words = {pack_bfloats(total.x * factor, total.y * factor), pack_bfloats(total.z * factor, total.w * factor)};
  }
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + first) = words;
  if (c == 0) {
    params.lse[(int64_t{segment.b} * params.num_q_heads + head) * params.q_len + i] =
        sum == 0.f ? -INFINITY : (maximum + log2f(sum)) * kLn2;
  }
}

__device__ __forceinline__ void add_weighted(float4& total, const float4& x, float weight) {
  total.x = fmaf(x.x, weight, total.x);
  total.y = fmaf(x.y, weight, total.y);
  total.z = fmaf(x.z, weight, total.z);
  total.w = fmaf(x.w, weight, total.w);
}

// How the warps of a block merge, and how the last block combines parts.
template <int kRows, int kHeadDim, int kNumThreads>
class Combine {
  using Slot = Partial<kRows, kHeadDim>;
  static constexpr int kWarps = kNumThreads / kLanes;
  static constexpr int kParts = 64;  // taken at a time
  static constexpr int kQuads = kHeadDim / 4;
  static constexpr int kItems = (kRows * kQuads + kNumThreads - 1) / kNumThreads;  // of four channels, a thread's
  static constexpr int kAhead = kItems == 1 ? 8 : kItems == 2 ? 4 : 2;

 public:
  static constexpr int kSharedBytes = (kRows * kParts + 3 * kRows + 4) * 4;

  // `memory` is shared, kSharedBytes.
  __device__ __forceinline__ explicit Combine(void* memory)
      : weights_(static_cast<float*>(memory)),
        maxima_(weights_ + kRows * kParts),
        sums_(maxima_ + kRows),
        kept_(sums_ + kRows),
        is_last_(reinterpret_cast<int*>(kept_ + kRows)) {}

  // Merges kSources results in shared memory, `values` being [kSources][kRows][stride] and `sums` [kSources][kRows] of
  // (m, l), and writes the unit's output, or this block's part of it, and then the output if this part came last.
  template <int kSources>
  __device__ __forceinline__ void merge(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                        const float* values, int stride, const float2* sums, float* workspace) {
    const int num_rows = min(kRows, plan.rows.num_rows - segment.row_tile * kRows);
    if (threadIdx.x < kRows) {
      const int row = threadIdx.x;
      float maximum = -INFINITY, sum = 0.f;
#pragma unroll
      for (int i = 0; i < kSources; ++i) maximum = fmaxf(maximum, sums[i * kRows + row].x);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const float weight = exp2_below(sums[i * kRows + row].x, maximum);
        weights_[i * kRows + row] = weight;
        sum += sums[i * kRows + row].y * weight;
      }
      maxima_[row] = maximum;
      sums_[row] = sum;
    }
    __syncthreads();
    float* slot = workspace + slot_of(plan, segment, segment.part) * Slot::kFloats;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int index = item * kNumThreads + threadIdx.x, row = index / kQuads, c = index % kQuads * 4;
      if (row >= num_rows || c >= params.value_side.head_dim) continue;
      float4 total = {};
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        add_weighted(total, *reinterpret_cast<const float4*>(values + (i * kRows + row) * stride + c),
                     weights_[i * kRows + row]);
      }
      if (segment.num_parts == 1) {
        write_output<kRows>(params, plan, segment, row, c, total, maxima_[row], sums_[row]);
      } else {
        __stcg(Slot::values(slot, row, c), total);
        if (c == 0) __stcg(Slot::sums(slot, row), make_float2(maxima_[row], sums_[row]));
      }
    }
    if (segment.num_parts == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) *is_last_ = arrive(params, segment);
    __syncthreads();
    if (*is_last_) merge_parts(params, plan, segment, num_rows, workspace);
  }

 private:
  __device__ __forceinline__ void merge_parts(const DecodeParams& params, const DecodePlan& plan,
                                              const Segment& segment, int num_rows, float* workspace) {
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    float4 total[kItems] = {};
    // What most calls need in all is under way before anybody knows the weights.
    float4 ahead[kItems][kAhead];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int index = item * kNumThreads + threadIdx.x, row = index / kQuads, c = index % kQuads * 4;
#pragma unroll
      for (int part = 0; part < kAhead; ++part) {
        if (part >= segment.num_parts || row >= num_rows) continue;
        float* slot = workspace + slot_of(plan, segment, part) * Slot::kFloats;
        ahead[item][part] = __ldcg(Slot::values(slot, row, c));
      }
    }
    if (threadIdx.x < kRows) maxima_[threadIdx.x] = -INFINITY, sums_[threadIdx.x] = 0.f;
    for (int first = 0; first < segment.num_parts; first += kParts) {
      const int count = min(kParts, segment.num_parts - first);
      __syncthreads();
      // A warp takes a row: the weight of every part, and what is kept of what was merged before.
      for (int row = warp; row < num_rows; row += kWarps) {
        float2 own[kParts / kLanes];
        float maximum = maxima_[row];
#pragma unroll
        for (int k = 0; k < kParts / kLanes; ++k) {
          const int part = k * kLanes + lane;
          own[k] = make_float2(-INFINITY, 0.f);
          if (part < count) {
            float* slot = workspace + slot_of(plan, segment, first + part) * Slot::kFloats;
            own[k] = __ldcg(Slot::sums(slot, row));
          }
          maximum = fmaxf(maximum, own[k].x);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
        }
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < kParts / kLanes; ++k) {
          const float weight = exp2_below(own[k].x, maximum);
          weights_[(k * kLanes + lane) * kRows + row] = weight;
          sum += own[k].y * weight;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        if (lane == 0) {
          kept_[row] = exp2_below(maxima_[row], maximum);
          sums_[row] = sums_[row] * kept_[row] + sum;
          maxima_[row] = maximum;
        }
      }
      __syncthreads();
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int index = item * kNumThreads + threadIdx.x, row = index / kQuads, c = index % kQuads * 4;
        if (row >= num_rows || c >= params.value_side.head_dim) continue;
        const float kept = kept_[row];
        total[item].x *= kept, total[item].y *= kept, total[item].z *= kept, total[item].w *= kept;
        int part = 0;
        if (first == 0) {
#pragma unroll
          for (; part < kAhead; ++part) {
            if (part < count) add_weighted(total[item], ahead[item][part], weights_[part * kRows + row]);
          }
        }
#pragma unroll 8
        for (; part < count; ++part) {
          float* slot = workspace + slot_of(plan, segment, first + part) * Slot::kFloats;
          add_weighted(total[item], __ldcg(Slot::values(slot, row, c)), weights_[part * kRows + row]);
        }
      }
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int index = item * kNumThreads + threadIdx.x, row = index / kQuads, c = index % kQuads * 4;
      if (row < num_rows && c < params.value_side.head_dim) {
        write_output<kRows>(params, plan, segment, row, c, total[item], maxima_[row], sums_[row]);
      }
    }
  }

  float *weights_, *maxima_, *sums_, *kept_;
  int* is_last_;
};

}  // namespace hf_kvquant::cuda
