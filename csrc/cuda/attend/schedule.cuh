// Which tokens of which sequence a thread block attends to. Only the device knows lengths, so thread blocks of a fixed
// grid work this out themselves.
//
// A unit is the work for one result: a sequence, a key-value head, and a tile of query rows. Its tokens are cut into
// steps, aligned to multiples of `kStepTokens`; a round has one step per warp of a thread block. `num_splits` thread
// blocks take rounds in turn, by their place in the sequence alone. So results repeat bit for bit, with a fixed number
// of splits in every batch, and without padding or a window a thread block knows where it begins before it knows the
// length. Parts of a unit meet in the workspace, where the last one combines them (combine.cuh).
//
// The caller may deal the work by a split plan instead: each entry is a share of a sequence, long ones first, and
// a sequence's length sets its number of shares. hf_kvquant/ops/planning.py makes it. Only kernels for pages take one.
//
// Tried and no faster (H200, 2026-11): persistent thread blocks that fetch their next part and start its copies before
// the last part is merged, and an even distribution of all steps, whatever the lengths: neither hides the fixed cost of
// a part, and both take instructions. Copying before the length is known saved 0.3 us of 7, but reads unneeded memory
// wherever the cache is not full. Clusters that combine through shared memory are packed onto few multiprocessors: of 8
// thread blocks they saved 0.6 us of 7.9 at best, less than a leaner combine; of 16 they cost 3.
#pragma once

#include "../../format.h"
#include "../common/instructions.cuh"
#include "../cuda.h"

namespace hf_kvquant::cuda {

// The length and start of a sequence, which are loaded first, since all else depends on them. `start` is at most
// max_length, so that sums fit an int.
struct Bounds {
  int length, start;
  int tail_from;  // 0 without dense windows: an unfinished block is behind it anyway

  __device__ __forceinline__ Bounds(const DecodeParams& params, const DecodePlan& plan, int b)
      : Bounds(params, plan, b, params.lengths[b]) {}
  __device__ __forceinline__ Bounds(const DecodeParams& params, const DecodePlan& plan, int b, int known_length)
      : length(known_length),
        start(params.starts == nullptr ? 0 : min(params.starts[b], plan.max_length)),
        tail_from(plan.has_dense_tokens ? plan.laps.tail_from(b, num_tokens(plan)) : 0) {}

  // The tokens that there is room for.
  __device__ __forceinline__ int num_tokens(const DecodePlan& plan) const {
    return min(max(length, 0), plan.max_length);
  }

  // The first of the newest tokens that a query reads from both tails, which sees the first `num_seen` tokens:
  // window_begin of a side whose tokens have scales of their own. The tails have equally many rows for these.
  __device__ __forceinline__ int newest(const DecodeParams& params, const DecodePlan& plan, int num_seen) const {
    return max(max(num_seen - params.residual_length, tail_from), num_tokens(plan) - params.value_side.ring);
  }
};

// The tokens that the rows of a unit attend to as codes.
struct Span {
  int first_position;  // of the call's first query token; may be negative
  int begin, end;      // tokens that any row sees
  // The first of the newest tokens that the first query reads from the tails, as later ones do from where their windows
  // begin. INT_MAX without windows.
  int dense_from = INT32_MAX;
};

// A thread block's share of one unit: rounds `share`, `share` + num_splits and so on of the sequence.
struct Segment {
  int b, h, row_tile;
  Divisor splits;             // thread blocks that share the unit
  int share;                  // less than `splits`
  int part, num_parts;        // place among the shares that have rounds, in the order of the sequence
  int first_step, last_step;  // of the thread block's first round, and one past the last of the sequence
  int first_slot, length;     // with a split plan: of the parts of a unit in the workspace, and of the sequence

  __device__ __forceinline__ bool has_rounds() const { return part < num_parts; }
};

// The unit and share of this thread block. `find_rounds` finds its steps.
__device__ __forceinline__ Segment segment_of_cta(const DecodePlan& plan) {
  Segment segment;
  segment.splits = plan.num_splits;
  segment.row_tile = plan.num_splits.quotient(blockIdx.x);
  segment.share = plan.num_splits.rest(blockIdx.x);
  segment.h = blockIdx.y;
  segment.b = blockIdx.z;
  return segment;
}

// The same with a split plan. Its entries have the lengths, too, so that nothing has to be loaded one more time. With
// `mixes_shares`, the first, the last, the second, the second last and so on of the first `batch` entries come. Nobody
// has checked the numbers on a GPU: entries that would lead out of the workspace count as unused, and those have no
// sequence, b = -1.
__device__ __forceinline__ Segment planned_segment(const DecodeParams& params, const DecodePlan& plan) {
  int number = blockIdx.z;
  if (plan.mixes_shares && number < params.batch) number = number % 2 == 0 ? number / 2 : params.batch - 1 - number / 2;
  const int4 entry = load_kept(reinterpret_cast<const int4*>(plan.split_plan) + number);
  const unsigned share = entry.z & 0xffff, splits = static_cast<unsigned>(entry.z) >> 16;
  const bool is_used = static_cast<unsigned>(entry.x) < static_cast<unsigned>(params.batch) && share < splits &&
                       entry.w >= 0 && (splits == 1 || entry.w + int64_t{splits} <= plan.num_slots);
  Segment segment;
  segment.splits = {splits, (0x7fffffffu + splits) / max(splits, 1u)};
  segment.row_tile = 0;
  segment.share = static_cast<int>(share);
  segment.h = blockIdx.y;
  segment.b = is_used ? entry.x : -1;
  segment.first_slot = entry.w, segment.length = entry.y;
  return segment;
}

// The number of a thread block's unit.
__device__ __forceinline__ int64_t unit_of(const DecodePlan& plan, const Segment& segment) {
  return (int64_t{segment.b} * gridDim.y + segment.h) * plan.num_row_tiles + segment.row_tile;
}

// The same with a split plan, which counts one split for every unit: so the parts of a unit are units of their own.
__device__ __forceinline__ int64_t planned_unit_of(const DecodePlan& plan, const Segment& segment) {
  return int64_t{segment.h} * plan.num_slots + segment.first_slot;
}

// The share that a step belongs to.
__device__ __forceinline__ int share_of_step(const DecodePlan& plan, const Segment& segment, int step) {
  return segment.splits.rest(static_cast<unsigned>(step) >> plan.warps_log2);
}

// The new tokens that this launch writes, as far as there is room, and the steps that hold them.
struct Held {
  int begin = 0, end = 0;  // tokens
  int first_step = 0;      // of those tokens, or of the block that they fill
  bool is_own = false;     // some of them belong to this thread block
};

// Steps and rounds are counted unsigned, so that a division by a power of two is one instruction.
template <int kStepTokens>
__device__ __forceinline__ int step_of(int token) {
  return static_cast<unsigned>(token) / kStepTokens;
}

// New tokens are few: at most two steps hold them.
template <int kStepTokens>
__device__ __forceinline__ Held find_held(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds,
                                          const Segment& segment) {
  Held held;
  held.begin = max(bounds.length, params.q_len) - params.q_len;
  held.end = min(bounds.length, plan.max_length);
  held.first_step = step_of<kStepTokens>(held.begin);
  held.is_own = held.begin < held.end && share_of_step(plan, segment, held.first_step) == segment.share;
  if (held.end - held.begin > 1) {
    held.is_own |= share_of_step(plan, segment, step_of<kStepTokens>(held.end - 1)) == segment.share;
  }
  return held;
}

// Finds the rounds of a thread block and the span of its unit. A unit without tokens has one step, so that a thread
// block writes its result. `num_copies`: tokens that follow the last one, see `Copies`.
template <int kStepTokens>
__device__ __forceinline__ Span find_rounds(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds,
                                            Segment& segment, int num_copies = 0) {
  int first_token = 0, last_token = params.q_len - 1;  // query tokens in the row tile
  if (plan.num_row_tiles > 1) {
    const int first_row = segment.row_tile * plan.rows_per_tile;
    first_token = plan.rows.token(first_row);
    last_token = plan.rows.token(min(first_row + plan.rows_per_tile, plan.rows.num_rows) - 1);
  }
  Span span;
  span.first_position = bounds.num_tokens(plan) - params.q_len;
  span.end = span.first_position + last_token + 1;
  if (num_copies > 0) span.end = bounds.num_tokens(plan) + num_copies;
  span.begin = max(bounds.start, 0);
  if (params.sliding_window > 0) {
    span.begin = max(span.begin, span.first_position + first_token - params.sliding_window + 1);
  }
  if (plan.has_dense_tokens) {
    // Tokens of dense windows follow later (tails.cuh).
    span.begin = max(span.begin, max(bounds.start, 0) + params.sink_length);
    span.dense_from = bounds.newest(params, plan, span.first_position + first_token + 1);
    span.end = min(span.end, bounds.newest(params, plan, span.first_position + last_token + 1));
  }
  if (span.begin >= span.end) span.begin = span.end = 0;
  const unsigned last_step = step_of<kStepTokens>(max(span.end - 1, 0));
  const int first_round = static_cast<unsigned>(step_of<kStepTokens>(span.begin)) >> plan.warps_log2;
  const int num_rounds = static_cast<int>(last_step >> plan.warps_log2) + 1 - first_round;
  segment.last_step = last_step + 1;
  segment.num_parts = min(static_cast<int>(segment.splits.value), num_rounds);
  segment.part = segment.share - segment.splits.rest(first_round);
  if (segment.part < 0) segment.part += segment.splits.value;
  segment.first_step = (first_round + segment.part) << plan.warps_log2;
  return span;
}

// The index of a sequence's tail in the first axis of a tail plane.
template <bool kIsPaged>
__device__ __forceinline__ int tail_slot(const DecodePlan& plan, int b) {
  return kIsPaged ? plan.laps.tail_slot(b) : b;
}

}  // namespace hf_kvquant::cuda
