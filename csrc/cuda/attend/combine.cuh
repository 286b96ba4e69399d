// Merges partial softmax results, of the warps of a thread block and of the thread blocks that share a unit, and writes
// the result.
//
// A partial result of a row is its maximum m (in log2 units), the sum l of 2^(score - m), and the sum of values with
// the same weights. They merge as in online softmax. Thread blocks write theirs to the workspace and increment a
// counter that wraps to 0. The one that completes the count merges all parts, in the order of the sequence, so the
// result does not depend on which one that is.
#pragma once

#include "../common/codes.cuh"
#include "schedule.cuh"

namespace hf_kvquant::cuda {

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

// The place of a part's result in the workspace.
template <class Partial>
__device__ __forceinline__ float* slot_of(const DecodePlan& plan, int64_t unit, int part, float* workspace) {
  return workspace + (unit * plan.num_splits.value + part) * Partial::kFloats;
}

// Counts one more part of a unit as written to the workspace. All threads of the thread block that wrote it call this.
// Returns whether it was the last part; if so, all parts may be read.
__device__ __forceinline__ bool arrive(const DecodeParams& params, const Segment& segment, int64_t unit) {
  __syncthreads();
  unsigned before = 0;
  const unsigned last = segment.num_parts - 1;
  if (threadIdx.x == 0) {
    // One instruction releases what was written and acquires what others wrote; two fences around an atomic cost more.
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(params.counters + unit), "r"(last)
                 : "memory");
  }
  return __syncthreads_or(threadIdx.x == 0 && before == last);
}

// Where four channels of a row's output go, found before their values are known.
struct Output {
  uint2* values = nullptr;  // nullptr: not an output
  float* lse = nullptr;     // only for the row's first channels
  float sink = -INFINITY;
  float constant = 0.f;  // missing from all scores, but not from a sink; in log2 units
  bool is_half = false;

  Output() = default;

  __device__ __forceinline__ Output(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                    const float* constants, int rows_per_tile, int row, int c) {
    const int index = segment.row_tile * rows_per_tile + row, i = plan.rows.token(index);
    if (row >= rows_per_tile || index >= plan.rows.num_rows || c >= params.value_side.head_dim) return;
    const int head = segment.h * static_cast<int>(plan.rows.num_q_per_kv.value) + plan.rows.head(index, i);
    const int64_t first =
        ((int64_t{segment.b} * params.q_len + i) * params.num_q_heads + head) * params.value_side.head_dim + c;
    // Head dims are multiples of 8, so four channels lie at a multiple of 8 bytes.
    values = reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + first);
    if (c == 0) lse = params.lse + (int64_t{segment.b} * params.num_q_heads + head) * params.q_len + i;
    // With a softcap, scores contain it already.
    if (params.softcap == 0.f) constant = constants[row];
    if (params.sinks != nullptr) sink = params.sinks[head] * kLog2E - constant;
    // Tokens are missing, and the host may not know. NaN, since a result without them would look like any other.
    if (params.lengths[segment.b] > plan.max_length) sink = NAN;
    is_half = params.query.dtype == Dtype::fp16;
  }

  __device__ __forceinline__ bool exists() const { return values != nullptr; }

  // Takes the maximum and the sum of weights. Writes the log of their sum, and returns what weighted sums are
  // multiplied with.
  __device__ __forceinline__ float finish(float maximum, float sum) const {
    constexpr float kLn2 = 0.6931471805599453f;
    float kept = 1.f;
    if (sink != -INFINITY) {
      const float before = maximum;
      maximum = fmaxf(before, sink);
      kept = exp2_below(before, maximum);
      // An infinite sink takes all the weight: infinity - infinity would be NaN.
      sum = sum * kept + (sink == maximum ? 1.f : exp2_below(sink, maximum));
    }
    if (lse != nullptr) *lse = sum == 0.f ? -INFINITY : (maximum + log2f(sum) + constant) * kLn2;
    return sum == 0.f ? 0.f : kept / sum;
  }

  // Four channels of a result as they are written.
  static __device__ __forceinline__ uint2 packed(float4 total, float factor, bool is_half) {
    const auto pack = [=](float low, float high) {
      return is_half ? pack_halves(low * factor, high * factor) : pack_bfloats(low * factor, high * factor);
    };
    return {pack(total.x, total.y), pack(total.z, total.w)};
  }

  // Writes the result of a weighted sum, the maximum and the sum of weights.
  __device__ __forceinline__ void write(float4 total, float maximum, float sum) const {
    *values = packed(total, finish(maximum, sum), is_half);
  }
};

// Merges the warps of a thread block, at least `kMinWarps`, and in the last thread block all parts. Loads that wait for
// memory are all issued at once, since nothing else is left to do.
template <int kRows, int kHeadDim, int kMinWarps, bool kIsPaged>
class Combine {
  using Slot = Partial<kRows, kHeadDim>;
  static constexpr int kQuads = kHeadDim / 4, kAllItems = kRows * kQuads;  // of four channels
  static constexpr int kMinThreads = kMinWarps * kLanes;
  static constexpr int kItems = (kAllItems + kMinThreads - 1) / kMinThreads;  // per thread, at most
  static constexpr int kAtOnce = kItems >= 8 ? 2 : 16 / kItems;               // parts

 public:
  // Merges the results of the warps in shared memory: `values` is [warp][kRows][channels], `sums` [warp][kRows] of (m,
  // l). Writes the unit's output, or this thread block's part of it, and then the output if this part is the last. To
  // be called after a barrier.
  static __device__ __forceinline__ void merge(const DecodeParams& params, const DecodePlan& plan,
                                               const Segment& segment, const float* values, int warp_stride,
                                               int row_stride, const float2* sums, const float* constants,
                                               float* workspace) {
    const bool is_planned = kIsPaged && plan.split_plan != nullptr;
    const int64_t unit = is_planned ? planned_unit_of(plan, segment) : unit_of(plan, segment);
    const bool is_whole = segment.num_parts == 1;
    float* slot = slot_of<Slot>(plan, unit, segment.part, workspace);
    for_all<kItems>([&](int item) {
      const int index = item * blockDim.x + threadIdx.x, row = index / kQuads, c = index % kQuads * 4;
      const Output output(params, plan, segment, constants, kRows, row, c);
      if (!output.exists()) return;
      float maximum = -INFINITY, sum = 0.f;
      float4 total = {};
      // Some warps at a time, so that most is known at compile time.
#pragma unroll 1
      for (int first = 0; first < 1 << plan.warps_log2; first += kMinWarps) {
        float2 own[kMinWarps];
        const float before = maximum;
        for_all<kMinWarps>([&](int i) {
          own[i] = sums[(first + i) * kRows + row];
          maximum = fmaxf(maximum, own[i].x);
        });
        scale(total, sum, exp2_below(before, maximum));
        for_all<kMinWarps>([&](int i) {
          add(total, sum, own[i],
              *reinterpret_cast<const float4*>(values + (first + i) * warp_stride + row * row_stride + c), maximum);
        });
      }
      if (is_whole) {
        output.write(total, maximum, sum);
      } else {
        __stcg(Slot::values(slot, row, c), total);
        if (c == 0) __stcg(Slot::sums(slot, row), make_float2(maximum, sum));
      }
    });
    if (is_whole) return;

    // Spare threads help: `helpers` neighbours take the parts of an item in turn.
    const int helpers_log2 = 31 - __clz(max(1, static_cast<int>(blockDim.x) / kAllItems));
    Output outputs[kItems];
    for_all<kItems>([&](int item) {
      const int index = item_of_thread(item, helpers_log2);
      outputs[item] = Output(params, plan, segment, constants, kRows, index / kQuads, index % kQuads * 4);
    });
    if (!arrive(params, segment, unit)) return;
    slot = slot_of<Slot>(plan, unit, 0, workspace);
    // A thread with few items mostly waits for memory, so there is separate code for few parts, which loads fewer at a
    // time.
    if constexpr (kItems <= 2) {
      if (segment.num_parts <= kAtOnce / 2 << helpers_log2) {
        merge_parts<kAtOnce / 2>(outputs, slot, segment.num_parts, helpers_log2);
        return;
      }
    }
    merge_parts<kAtOnce>(outputs, slot, segment.num_parts, helpers_log2);
  }

 private:
  static __device__ __forceinline__ void scale(float4& total, float& sum, float factor) {
    total.x *= factor, total.y *= factor, total.z *= factor, total.w *= factor;
    sum *= factor;
  }

  // Adds a result with maximum and sum `own` to one with `maximum`, which is not smaller.
  static __device__ __forceinline__ void add(float4& total, float& sum, float2 own, float4 values, float maximum) {
    const float weight = exp2_below(own.x, maximum);
    sum = fmaf(own.y, weight, sum);
    total.x = fmaf(values.x, weight, total.x);
    total.y = fmaf(values.y, weight, total.y);
    total.z = fmaf(values.z, weight, total.z);
    total.w = fmaf(values.w, weight, total.w);
  }

  // Loads `kCount` parts at a time.
  template <int kCount>
  static __device__ __forceinline__ void merge_parts(const Output (&outputs)[kItems], float* slots, int num_parts,
                                                     int helpers_log2) {
    const int helpers = 1 << helpers_log2, helper = threadIdx.x & (helpers - 1), last = num_parts - 1;
    float4 total[kItems] = {};
    float maximum[kItems], sum[kItems] = {};
    for_all<kItems>([&](int item) { maximum[item] = -INFINITY; });
#pragma unroll 1
    for (int first = helper; first <= last; first += kCount << helpers_log2) {
      float4 values[kItems][kCount];
      float2 own[kItems][kCount];
      for_all<kItems>([&](int item) {
        if (!outputs[item].exists()) return;
        const int index = item_of_thread(item, helpers_log2), row = index / kQuads, c = index % kQuads * 4;
        for_all<kCount>([&](int i) {
          float* slot = slots + min(first + (i << helpers_log2), last) * static_cast<int>(Slot::kFloats);
          own[item][i] = __ldcg(Slot::sums(slot, row));
          values[item][i] = __ldcg(Slot::values(slot, row, c));
        });
      });
      for_all<kItems>([&](int item) {
        const float before = maximum[item];
        for_all<kCount>([&](int i) {
          if (first + (i << helpers_log2) > last) own[item][i] = make_float2(-INFINITY, 0.f);
          maximum[item] = fmaxf(maximum[item], own[item][i].x);
        });
        scale(total[item], sum[item], exp2_below(before, maximum[item]));
        for_all<kCount>([&](int i) { add(total[item], sum[item], own[item][i], values[item][i], maximum[item]); });
      });
    }
    for (int distance = 1; distance < helpers; distance *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, maximum[0], distance), before = maximum[0];
      maximum[0] = fmaxf(before, other);
      scale(total[0], sum[0], exp2_below(before, maximum[0]));
      total[0].x += __shfl_xor_sync(kAllLanes, total[0].x, distance);
      total[0].y += __shfl_xor_sync(kAllLanes, total[0].y, distance);
      total[0].z += __shfl_xor_sync(kAllLanes, total[0].z, distance);
      total[0].w += __shfl_xor_sync(kAllLanes, total[0].w, distance);
      sum[0] += __shfl_xor_sync(kAllLanes, sum[0], distance);
    }
    for_all<kItems>([&](int item) {
      if (helper != 0 || !outputs[item].exists()) return;
      outputs[item].write(total[item], maximum[item], sum[item]);
    });
  }

  static __device__ __forceinline__ int item_of_thread(int item, int helpers_log2) {
    return (item * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) >> helpers_log2;
  }
};

}  // namespace hf_kvquant::cuda
