// Attention of the newest tokens over codes: the kernel template. One instantiation serves a
// pair of storage types, a head dim (64, 128, 256; narrower heads run in the next larger one) and up to kRows query
// rows.
//
// A block of four warps takes a segment of a unit (schedule.cuh). Each warp is a worker of its own in the manner of
// Flash-Decoding: it takes every fourth step, streams it through its ring (ring.cuh), and keeps its own maximum, sum
// and output; the four merge through shared memory at the end, and parts of a unit through the workspace (combine.cuh).
// In the loop there are no barriers, only unpacking, tensor-core products and an online softmax; scales, zeros and
// offsets act on scores and probabilities, outside of the products (fragments.cuh).
//
// Instructions are scarce: at 4.5 TB/s, an H200 has 3.7 thread instructions for an int4 code, and a busy multiprocessor
// lowers its clock. Hence bytes instead of float16 for query · key, and a fast body for steps that all rows see in
// whole; others (edges, windows, causal bounds within a chunk, softcap, ALiBi) take a second body. They are no longer
// what limits: without any product the kernel would be 3 % faster (H200, 2026-11, int4). What remains is how long a
// block takes to start and to end, see schedule.cuh.
#pragma once

#include "quantize.cuh"
#include "worker.cuh"

namespace hf_kvquant::cuda {

// Blocks of a multiprocessor: few warps, with as many registers as there are. Each then has instructions enough to hide
// its own latencies; four blocks of 128 registers were slower (H200, 2026-11: int4 at 64 x 8k 88 % of bandwidth against
// 90 %).
constexpr int kMinBlocks = 2;

// The query and the new tokens come into the L2 cache while the length is waited for. Two lines of 128 bytes a row are
// what most heads have; of others, the rest comes later.
template <class Shape>
__device__ __forceinline__ void prefetch_inputs(const DecodeParams& params, const NewTokens& new_tokens,
                                                const DecodePlan& plan, const Segment& segment) {
  const int slot = threadIdx.x / 2, line = threadIdx.x % 2 * 64;  // in elements
  const int row = segment.row_tile * Shape::kRows + slot;
  if (slot < Shape::kRows && row < plan.rows.num_rows && line < params.key_side.head_dim) {
    prefetch(static_cast<const uint16_t*>(params.query.data) + segment.b * params.query.stride_b +
             int64_t{segment.h * static_cast<int>(plan.rows.num_q_per_kv.value) + plan.rows.head(row)} *
                 params.query.stride_h +
             plan.rows.token(row) * params.query.stride_t + line);
  }
  const int token = slot - Shape::kRows;
  if (plan.appends && token >= 0 && token < 2 * new_tokens.q_len) {
    const Dense& dense = token % 2 == 0 ? new_tokens.key : new_tokens.value;
    if (line < (token % 2 == 0 ? params.key_side : params.value_side).head_dim) {
      prefetch(static_cast<const uint16_t*>(dense.data) + segment.b * dense.stride_b + segment.h * dense.stride_h +
               token / 2 * dense.stride_t + line);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    attend(const __grid_constant__ DecodeParams params, const __grid_constant__ NewTokens new_tokens,
           const __grid_constant__ DecodePlan plan, float* workspace) {
  using Ring = typename Shape::KeyRing;
  extern __shared__ __align__(128) unsigned char memory[];
  unsigned char* planes = memory;
  float* factors = reinterpret_cast<float*>(memory + Shape::kFactorsAt);
  float* query_sums = factors + Shape::kRows;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int num_stages = plan.num_stages;
  unsigned char* stages = memory + Shape::kRingsAt + warp * num_stages * Ring::kStageBytes;

  Segment segment = segment_of_block(plan);
  prefetch_inputs<Shape>(params, new_tokens, plan, segment);
  const Span span = find_steps<Ring::kStepTokens>(params, plan, segment);
  if (segment.part >= segment.num_parts) return;

  // --- start copying, then prepare the query and write new tokens while the copies are under way. Steps that hold new
  // tokens are copied once these are written.
  const bool appends = plan.appends && segment.has_last_step();
  const int held_step = appends ? max(span.first_position, 0) / Ring::kStepTokens : segment.last_step;
  Ring ring(params, stages, num_stages, lane);
  ring.open(params, segment.b, segment.h, span.begin, span.end, segment.first_step + warp);
  int stage = 0;
  for (; stage < num_stages - 1; ++stage) {
    if (segment.first_step + warp + stage * kNumWarps >= held_step) break;
    ring.fill(params, segment.b, segment.h, stage);
    commit_copies();
  }
  for (int slot = warp; slot < Shape::kRows; slot += kNumWarps) {
    Query<Shape>::write_row(params, plan.rows, segment, slot, planes, factors, query_sums, lane);
  }
  if (appends) {
    for (int i = warp; i < 2 * new_tokens.q_len; i += kNumWarps) {
      const int64_t t = int64_t{params.lengths[segment.b]} - new_tokens.q_len + i / 2;
      if (t < 0 || t >= params.capacity) continue;
      if (i % 2 == 0) {
        append_row<Shape::kKey, !Shape::kHasKeyZero>(params.key_side, new_tokens.key, segment.b, segment.h, i / 2, t);
      } else {
        append_row<Shape::kValue, !Shape::kHasValueZero>(params.value_side, new_tokens.value, segment.b, segment.h,
                                                         i / 2, t);
      }
    }
  }
  __syncthreads();
  for (; stage < num_stages - 1; ++stage) {
    if (segment.first_step + warp + stage * kNumWarps < segment.last_step) {
      ring.fill(params, segment.b, segment.h, stage);
    }
    commit_copies();
  }

  // --- attend. Every row sees the tokens from `all_from` to `all_until` - 1.
  Worker<Shape> worker(params, planes, factors, query_sums, lane);
  const int first_row = segment.row_tile * Shape::kRows;
  const int last_row = min(first_row + Shape::kRows, plan.rows.num_rows) - 1;
  const int all_until = min(span.end, span.first_position + plan.rows.token(first_row) + 1);
  const int all_from =
      params.sliding_window > 0
          ? max(span.begin, span.first_position + plan.rows.token(last_row) - params.sliding_window + 1)
          : span.begin;
  const bool changes_scores = params.softcap > 0.f || params.alibi_slopes != nullptr;
  const int first_whole = (all_from + Ring::kStepTokens - 1) / Ring::kStepTokens;
  const int num_whole = changes_scores ? 0 : max(all_until / Ring::kStepTokens - first_whole, 0);
  const unsigned char* before = stages;
  stage = 0;
  for (int step = segment.first_step + warp; step < segment.last_step; step += kNumWarps) {
    if (num_stages == Shape::kNumStages) {
      wait_for_copies<Shape::kNumStages - 2>();
    } else {
      wait_for_copies<0>();
    }
    __syncwarp();
    const unsigned char* at = stages + stage * Ring::kStageBytes;
    if (static_cast<unsigned>(step - first_whole) < static_cast<unsigned>(num_whole)) {
      worker.template attend<false>(params, plan.rows, segment, span, before, at, step);
    } else {
      worker.template attend<true>(params, plan.rows, segment, span, before, at, step);
    }
    __syncwarp();
    // The stage before is free now.
    if (step + (num_stages - 1) * kNumWarps < segment.last_step) {
      ring.fill(params, segment.b, segment.h, stage == 0 ? num_stages - 1 : stage - 1);
    }
    commit_copies();
    before = at;
    stage = stage == num_stages - 1 ? 0 : stage + 1;
  }
  if (segment.first_step + warp < segment.last_step) worker.add_values(before);
  worker.finish();
  wait_for_copies<0>();

  // --- merge the warps, then the parts
  __syncthreads();
  float* outputs = reinterpret_cast<float*>(memory + Shape::kRingsAt);
  float2* sums = reinterpret_cast<float2*>(memory + Shape::kSumsAt);
  worker.share(outputs + warp * Shape::kRows * Shape::kOutputStride, sums + warp * Shape::kRows);
  __syncthreads();
  Combine<Shape::kRows, Shape::kHeadDim, kNumThreads> combine(memory + Shape::kCombineAt);
  combine.template merge<kNumWarps>(params, plan, segment, outputs, Shape::kOutputStride, sums, workspace);
}

}  // namespace hf_kvquant::cuda
