// Which part of which sequence a thread block attends to. Lengths are known on the device only, so blocks work this out
// themselves, from a fixed grid.
//
// A unit is what one result needs: a sequence, a key-value head, and a tile of query rows. Its tokens are cut into
// steps, aligned to multiples of `kStepTokens`, and these into `num_splits` parts of equal size, a block each, whatever
// else is in the batch: so results repeat bit for bit, and with a fixed number of splits they are the same in every
// batch. Blocks that share a unit leave partial results in the workspace; the last of them to arrive combines
// (combine.cuh).
//
// Tried and no faster (H200, 2026-11): blocks that stay and fetch their next part, with its first copies started before
// the last part is merged; an even deal of all steps to blocks or to warps, whatever the lengths. What a part costs
// beside its tokens, some 6 us of waiting for one thing after the other, they do not hide, and they cost instructions.
#pragma once

#include "../format.h"
#include "cuda.h"
#include "instructions.cuh"

namespace hf_kvquant::cuda {

// The tokens that the rows of a unit see.
struct Span {
  int first_position;  // of the chunk's first query; may be negative
  int begin, end;      // tokens that any row sees
  int first_step, num_steps;
};

// Steps of a unit without tokens are one, so that somebody writes its result.
template <int kStepTokens>
__device__ __forceinline__ Span span_of(const DecodeParams& params, const Rows& rows, int b, int first_row,
                                        int num_rows) {
  const int length = min(max(params.lengths[b], 0), params.capacity);
  const int start = params.starts == nullptr ? 0 : max(params.starts[b], 0);
  Span span;
  span.first_position = length - params.q_len;
  span.end = span.first_position + rows.token(first_row + num_rows - 1) + 1;
  span.begin = start;
  if (params.sliding_window > 0) {
    span.begin = max(start, span.first_position + rows.token(first_row) - params.sliding_window + 1);
  }
  if (span.begin >= span.end) span.begin = span.end = 0;
  span.first_step = span.begin / kStepTokens;
  span.num_steps = max(1, (span.end + kStepTokens - 1) / kStepTokens - span.first_step);
  return span;
}

// A block's share of one unit.
struct Segment {
  int b, h, row_tile;
  int unit;                   // number of the unit
  int part, num_parts;        // of the unit, those without steps not counted
  int first_step, last_step;  // of the sequence; last_step is not part of it

  __device__ __forceinline__ bool has_last_step() const { return part == num_parts - 1; }
};

// The unit and part of this block; its steps are known only with `find_steps`.
__device__ __forceinline__ Segment segment_of_block(const DecodePlan& plan) {
  Segment segment;
  segment.unit = plan.num_splits.quotient(blockIdx.x);
  segment.part = plan.num_splits.rest(blockIdx.x);
  segment.row_tile = plan.num_row_tiles.rest(segment.unit);
  const int head = plan.num_row_tiles.quotient(segment.unit);
  segment.h = plan.num_kv_heads.rest(head);
  segment.b = plan.num_kv_heads.quotient(head);
  return segment;
}

// The steps of a block, and the span of its unit. A block beyond its unit's parts has none.
template <int kStepTokens>
__device__ __forceinline__ Span find_steps(const DecodeParams& params, const DecodePlan& plan, Segment& segment) {
  const int first_row = segment.row_tile * plan.rows_per_tile;
  const Span span = span_of<kStepTokens>(params, plan.rows, segment.b, first_row,
                                         min(plan.rows_per_tile, plan.rows.num_rows - first_row));
  const int steps = plan.num_splits.quotient(span.num_steps + plan.num_splits.value - 1);
  segment.num_parts = plan.num_splits.value == 1 ? 1 : (span.num_steps + steps - 1) / steps;
  segment.first_step = span.first_step + segment.part * steps;
  segment.last_step = min(segment.first_step + steps, span.first_step + span.num_steps);
  return span;
}

}  // namespace hf_kvquant::cuda
