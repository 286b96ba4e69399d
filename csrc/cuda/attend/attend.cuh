// Attention of the newest tokens over codes: the kernel. One instantiation serves a pair of storage types, a head dim
// (64, 128, 256; narrower heads run in the next larger one) and up to kRows query rows.
//
// A thread block of two, four or eight warps takes its share of a unit (schedule.cuh). As in Flash-Decoding, each warp
// works on its own: it takes one step of every round, copies it through its pipeline (pipeline.cuh) and attends to it
// (warp_attention.cuh, or plain_attention.cuh where there are no codes), without barriers. While its first copies are
// on their way, it attends to tokens of dense windows (tails.cuh). In the end, warps merge through shared memory, and
// thread blocks through the workspace (combine.cuh).
//
// Instructions and power are scarce. At 4.5 TB/s, an H200 has 3.7 thread instructions for an int4 code. Reading alone
// takes all of its 700 W and lowers the clock to 1.65 to 1.85 GHz; with this kernel it falls to 1.5 GHz (2026-11).
// Hence query · key uses bytes instead of float16, weights · values use codes that a mask alone unpacks, and scales,
// zeros and offsets act on scores and weights, outside of the products. Steps that all rows attend to in full take a
// fast body of the loop; others (edges, windows, causal bounds within a chunk, softcap, ALiBi) take a second body.
//
// What happens before the first copy and after the last one counts, too: some thousand clocks of waiting for memory and
// of instructions one after the other. So a thread block computes little before it copies and starts all loads before
// it needs any of them, and the host prepares what is the same for all of them. At 1 x 8k (int8), a warp executes its
// 2,650 instructions 1.3 times each and spends a quarter of its time waiting for their code (ncu, 2026-11). Two orders
// of the same code differed by 1.5 %, though the slower one executed fewer instructions and alone took no more clocks.
#pragma once

#include <type_traits>

#include "../common/quantize.cuh"
#include "plain_attention.cuh"
#include "warp_attention.cuh"

namespace hf_kvquant::cuda {

// A lane's channels of new token `i`, for keys and values in pairs (Shape::kHasPairs): of the key in the first half of
// the warp, of the value in the second.
__device__ __forceinline__ uint4 load_pair(const DecodeParams& params, const NewTokens& new_tokens,
                                           const Segment& segment, int i, int lane) {
  const Dense& dense = lane < kLanes / 2 ? new_tokens.key : new_tokens.value;
  const int c = lane % (kLanes / 2) * kChunk;
  if (c >= params.key_side.head_dim) return {0, 0, 0, 0};
  return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(dense.data) + segment.b * dense.stride_b +
                                         segment.h * dense.stride_h + i * dense.stride_t + c);
}

// One warp quantises new token `i`, which is at position `t`. `pair` is the result of load_pair for the first token.
template <class Shape>
__device__ __forceinline__ void append_token(const DecodeParams& params, const NewTokens& new_tokens,
                                             const DecodePlan& plan, const Segment& segment, const uint4& pair, int i,
                                             int t, int lane) {
  const int b = segment.b, h = segment.h, row = plan.laps.row(t);
  const int to = Shape::kIsPaged ? plan.laps.slot(b, t) : b;  // the sequence or page
  const KeyTransform& transform = params.key_transform;
  if constexpr (Shape::kHasPairs) {
    const uint4 words = i == 0 ? pair : load_pair(params, new_tokens, segment, i, lane);
    Values<Dtype::fp32> x = widen({words.x, words.y, words.z, words.w}, new_tokens.key.dtype);
    if (!is_identity(transform)) {
      const Values<Dtype::fp32> key = transformed(transform, params.key_side.head_dim, h, x, lane % (kLanes / 2));
      if (lane < kLanes / 2) x = key;
    }
    append_row<Shape::kKey, !Shape::kHasKeyZero>(lane < kLanes / 2 ? params.key_side : params.value_side, x, to, h, row,
                                                 lane % (kLanes / 2));
    return;
  }
  if (Shape::kIsBlocked && !plan.has_dense_tokens) {
    // The key goes to the tail unchanged, unless it fills a block; the value is quantised. (A window's tokens go to
    // tails in tails.cuh.)
    const int64_t from = b * new_tokens.key.stride_b + h * new_tokens.key.stride_h;
    const Side& keys = params.key_side;
    const int64_t at = tail_slot<Shape::kIsPaged>(plan, b) * keys.tail_stride_b + h * keys.tail_stride_h +
                       t % kBlockSize * keys.tail_stride_t;
    for (int c = lane; c < keys.head_dim && (t + 1) % kBlockSize != 0; c += kLanes) {
      static_cast<uint16_t*>(keys.tail)[at + c] = static_cast<const uint16_t*>(new_tokens.key.data)[from + c];
    }
  }
  const auto load = [&](const Dense& dense, const Side& side) {
    Values<Dtype::fp32> x = {};
    const int64_t first = b * dense.stride_b + h * dense.stride_h + i * dense.stride_t + lane * kChunk;
    if (lane * kChunk < side.head_dim) x = load_widened(dense, first);
    return x;
  };
  if constexpr (!Shape::kIsBlocked) {
    Values<Dtype::fp32> key = load(new_tokens.key, params.key_side);
    if (!is_identity(transform)) key = transformed(transform, params.key_side.head_dim, h, key, lane);
    append_row<Shape::kKey, !Shape::kHasKeyZero>(params.key_side, key, to, h, row, lane);
  }
  const Values<Dtype::fp32> value = load(new_tokens.value, params.value_side);
  append_row<Shape::kValue, !Shape::kHasValueZero>(params.value_side, value, to, h, row, lane);
}

// The same for storage type none: one warp copies both rows, whose dtype are_pairs has compared.
template <class Shape>
__device__ __forceinline__ void copy_token(const DecodeParams& params, const NewTokens& new_tokens,
                                           const DecodePlan& plan, const Segment& segment, int i, int t, int lane) {
  const int row = plan.laps.row(t), slot = Shape::kIsPaged ? plan.laps.slot(segment.b, t) : segment.b;
  const auto copy = [&](const Dense& dense, const Side& side) {
    const uint16_t* const from = static_cast<const uint16_t*>(dense.data) + segment.b * dense.stride_b +
                                 segment.h * dense.stride_h + i * dense.stride_t;
    uint8_t* const to = code_row(side, slot, segment.h, row);
    for (int c = lane * kChunk; c < side.head_dim; c += kLanes * kChunk) {
      *reinterpret_cast<uint4*>(to + 2 * c) = *reinterpret_cast<const uint4*>(from + c);
    }
  };
  copy(new_tokens.key, params.key_side);
  copy(new_tokens.value, params.value_side);
}

// Eight warps run on a multiprocessor, in one thread block or two, with all of its registers, so each has enough
// independent instructions to hide its own latencies. Twice as many warps of 128 registers were slower (H200, 2026-11:
// int4 at 64 x 8k 88 % of bandwidth instead of 90 %), and so were four thread blocks of two warps. But what happens
// before the first copy and after the last is most of the time of a short sequence, and the smaller thread blocks are,
// the fewer warps wait for it. So batches of very many sequences get thread blocks of two warps: 424 of 0.5k to 2k
// tokens take 236 us with int4 instead of 283, 230 with k8v4 instead of 260, and 165 with int4-token instead of 198.
// Of one warp, int4-token took 4 % less than of two, the others 1 to 3 % (H200, 2026-12).
//
// A short call waits for instructions, not for memory: at 1 x 1k tokens, 25 to 28 % of the samples of its warps wait
// for the next instruction, 9 to 10 % for parameters, and hardly any for copies (H200, 2026-11, ncu). It executes some
// 2,500 of its 9,000 instructions, nearly all of them once. Telling the compiler what is rare changed nothing.
template <class Shape>
__global__ void __launch_bounds__(kMaxAttendWarps* kLanes, 1)
    attend(const __grid_constant__ DecodeParams params, const __grid_constant__ NewTokens new_tokens,
           const __grid_constant__ DecodePlan plan, float* workspace) {
  using Pipeline = typename Shape::StepPipeline;
  using Attention = std::conditional_t<Shape::kIsPlain, PlainAttention<Shape>, WarpAttention<Shape>>;
  constexpr int kRowsOfWarp = Shape::kRows / Shape::kMinWarps;  // at most; fewer with more warps
  extern __shared__ __align__(128) unsigned char memory[];
  unsigned char* planes = memory;
  float* factors = reinterpret_cast<float*>(memory + Shape::kFactorsAt);
  float* query_sums = factors + Shape::kRows;
  float* constants = reinterpret_cast<float*>(memory + Shape::kConstantsAt);
  float2* sums = reinterpret_cast<float2*>(memory + Shape::kSumsAt);
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int num_warps = 1 << plan.warps_log2, num_stages = plan.num_stages;
  unsigned char* pipelines = memory + Shape::kPipelinesAt;
  unsigned char* stages = pipelines + warp * num_stages * Pipeline::kStageBytes;

  // --- while the previous launch ends: everything that needs no memory. The pipeline is placed where sequences without
  // padding start, which most are
  const bool is_planned = Shape::kIsPaged && plan.split_plan != nullptr;
  if (is_planned) wait_for_launch_before();  // that launch may have made the plan
  Segment segment = is_planned ? planned_segment(params, plan) : segment_of_cta(plan);
  if (is_planned && segment.b < 0) return;
  const int stride = segment.splits.value << plan.warps_log2;
  const uint32_t chunk_list = shared_address(pipelines + num_warps * num_stages * Pipeline::kStageBytes);
  if (!plan.is_dense) Pipeline::list_chunks(params, plan, chunk_list);
  Pipeline pipeline(plan, stages, stride, lane);
  const int likely_step = (segment.share << plan.warps_log2) + warp;
  pipeline.seek(plan, segment, likely_step);

  // --- load the length and the query
  wait_for_launch_before();
  const Bounds bounds =
      is_planned ? Bounds(params, plan, segment.b, segment.length) : Bounds(params, plan, segment.b);
  uint32_t query_bits[kRowsOfWarp][Query<Shape>::kPerLane];
  for_all<kRowsOfWarp>([&](int i) {
    if (i < Shape::kRows / kFewAttendWarps || num_warps < kFewAttendWarps) {
      Query<Shape>::load_row(params, plan, segment, i * num_warps + warp, lane, query_bits[i]);
    }
  });
  typename Query<Shape>::Transform transform;
  const bool is_transformed = !is_identity(params.key_transform);
  if (is_transformed)
    transform = {params.key_transform, params.key_side.head_dim, segment.h, lane * Query<Shape>::kPerLane};
  uint4 pair = {0, 0, 0, 0};
  if (Shape::kHasPairs && plan.appends) pair = load_pair(params, new_tokens, segment, 0, lane);
  if (plan.has_gaps) Pipeline::fill_gaps(params, shared_address(stages), num_stages, lane, segment.b);

  // --- start copying; a new token is written by the warp of its step, before that step is copied
  const Span span = find_rounds<Pipeline::kStepTokens>(params, plan, bounds, segment);
  Held held = plan.appends ? find_held<Pipeline::kStepTokens>(params, plan, bounds, segment) : Held{};
  // In granularity channel, the one new token may make a block leave the window, so that it gets codes. Each thread
  // block that has some of its rounds quantises all of it: they write the same, and none waits for another.
  const int block_end = held.end - params.residual_length;
  bool closes_block =
      Shape::kIsBlocked && held.begin < held.end && block_end > bounds.tail_from && block_end % kBlockSize == 0;
  if (closes_block) {
    held.first_step = step_of<Pipeline::kStepTokens>(block_end - kBlockSize);
    const int num_rounds = max(kBlockSize / Pipeline::kStepTokens >> plan.warps_log2, 1);
    int behind = segment.share - share_of_step(plan, segment, held.first_step);
    if (behind < 0) behind += segment.splits.value;
    closes_block = behind < num_rounds;
  }
  if (!segment.has_rounds() && !held.is_own && !closes_block) return;
  const int first_step = segment.first_step + warp;
  const int held_step = held.is_own || closes_block ? min(held.first_step, segment.last_step) : segment.last_step;
  // Of keys in blocks: the first token that some query reads from the tail, and the first that all do.
  const int first_row = segment.row_tile * Shape::kRows;
  const int last_row = min(first_row + Shape::kRows, plan.rows.num_rows) - 1;
  const auto key_window = [&](int row) {
    const int num_seen = max(span.first_position + plan.rows.token(row) + 1, 0);
    return window_begin(params.key_side, num_seen, bounds.num_tokens(plan), params.residual_length, bounds.tail_from);
  };
  const int first_of_tail = Shape::kIsBlocked ? key_window(first_row) : span.end;
  const int end_of_codes = Shape::kIsBlocked ? key_window(last_row) : span.end;
  if (first_step != likely_step) pipeline.seek(plan, segment, first_step);
  pipeline.bound(params, plan, segment, span.begin, span.end, min(end_of_codes, span.end));
  if constexpr (Shape::kIsBlocked) {
    Blocks<Shape>::expect_tail(params, plan, segment, first_of_tail, span.end, warp, lane);
  }
  const bool has_dense_tokens = !Shape::kIsPlain && plan.has_dense_tokens;
  int stage = 0;
  for (; stage < num_stages - 1 && first_step + stage * stride < held_step; ++stage) {
    pipeline.fill(params, plan, chunk_list, stage, first_step + stage * stride);
    commit_copies();
  }
  if (held.is_own || closes_block) {
#pragma unroll 1
    for (int t = held.is_own ? held.begin : held.end; t < held.end; ++t) {
      const int step = step_of<Pipeline::kStepTokens>(t);
      if ((step & (num_warps - 1)) != warp || share_of_step(plan, segment, step) != segment.share) continue;
      const int i = t - (bounds.length - new_tokens.q_len);
      if constexpr (Shape::kIsPlain) {
        copy_token<Shape>(params, new_tokens, plan, segment, i, t, lane);
      } else {
        append_token<Shape>(params, new_tokens, plan, segment, pair, i, t, lane);
      }
    }
    __syncwarp();
    if constexpr (Shape::kIsBlocked) {
      if (closes_block) {
        const int begin = block_end - kBlockSize, first_counted = max(bounds.start, 0) + params.sink_length;
        const int slot = Shape::kIsPaged ? plan.laps.slot(segment.b, begin) : segment.b;
        const int of_tail = tail_slot<Shape::kIsPaged>(plan, segment.b);
        const BlockOfTokens tokens = {begin,         slot,    plan.laps.row(begin), held.end - 1,
                                      first_counted, of_tail, params.sink_length};
        // No copy goes to a warp's last stage before the loop below.
        constexpr int kStageRanges = Pipeline::kStageBytes / sizeof(float2);
        static_assert(kStageRanges >= Shape::kHeadDim);
        float2* const ranges = reinterpret_cast<float2*>(pipelines) + (num_stages - 1) * kStageRanges;
        quantize_columns<false>(params.key_side, params.key_transform, new_tokens.key, segment.b, segment.h, tokens,
                                {warp, num_warps, ranges, num_stages * kStageRanges});
        const uint32_t last_stage = shared_address(stages + (num_stages - 1) * Pipeline::kStageBytes);
        if (plan.has_gaps) Pipeline::fill_gaps(params, last_stage, 1, lane, segment.b);
      }
    }
    if (!segment.has_rounds()) return;
  }
  for (; stage < num_stages - 1; ++stage) {
    if (first_step + stage * stride < segment.last_step)
      pipeline.fill(params, plan, chunk_list, stage, first_step + stage * stride);
    commit_copies();
  }

  // --- during the copies: load a tile of dense tokens, and prepare the query
  std::conditional_t<Shape::kIsPlain, bool, DenseTile<Shape>> tile;
  const DenseTokens dense_tokens(params, plan, bounds, span);
  int first_dense = first_tile(plan, segment, warp) * kTailTileTokens;
  const auto has_tile = [&] { return has_dense_tokens && first_dense < dense_tokens.count; };
  const auto load_tile = [&] {
    if constexpr (!Shape::kIsPlain) {
      tile.load(params, new_tokens, plan, segment, bounds, dense_tokens, first_dense, lane);
    }
  };
  bool is_loaded = false;
  if constexpr (!Shape::kIsPlain) is_loaded = DenseTile<Shape>::kIsLoadedAtOnce && has_tile();
  if (is_loaded) load_tile();
  for_all<kRowsOfWarp>([&](int i) {
    const int slot = i * num_warps + warp;
    if (slot < Shape::kRows) {
      if (Shape::kIsBlocked || has_dense_tokens) {
        Query<Shape>::write_plain_row(query_bits[i], slot, memory + plan.plain_query_at, lane);
      }
      Query<Shape>::write_row(params, is_transformed, transform, query_bits[i], slot, planes, factors, constants,
                              query_sums, lane);
    }
  });

  // All rows attend to the tokens from `all_from` to `all_until` - 1.
  const int all_until = min(min(span.end, span.dense_from), span.first_position + plan.rows.token(first_row) + 1);
  const int all_from =
      params.sliding_window > 0
          ? max(span.begin, span.first_position + plan.rows.token(last_row) - params.sliding_window + 1)
          : span.begin;
  const bool changes_scores = params.softcap > 0.f || params.alibi_slopes != nullptr;
  const int first_whole = (all_from + Pipeline::kStepTokens - 1) / Pipeline::kStepTokens;
  const int num_whole = changes_scores ? 0 : max(all_until / Pipeline::kStepTokens - first_whole, 0);
  __syncthreads();

  // --- attend
  Attention attention(lane);
  if constexpr (!Shape::kIsPlain) {
    if (has_tile()) {
#pragma unroll 1
      do {
        if (!is_loaded) load_tile();
        attention.add(params, plan.rows, segment, span, dense_tokens.start, memory + plan.plain_query_at, constants,
                      tile);
        tile.store_new();
        is_loaded = false;
        first_dense += (segment.num_parts << plan.warps_log2) * kTailTileTokens;
      } while (has_tile());
      attention.end_dense_tokens();
    }
  }
  const int of_tail = Shape::kIsBlocked ? tail_slot<Shape::kIsPaged>(plan, segment.b) : 0;
  attention.load(params, planes, memory + plan.plain_query_at, factors, query_sums,
                 first_of_tail, end_of_codes, of_tail, lane);
  const unsigned char* before = stages;
  stage = 0;
  for (int step = first_step; step < segment.last_step; step += stride) {
    if (num_stages == Shape::kNumStages) {
      wait_for_copies<Shape::kNumStages - 2>();
    } else {
      wait_for_copies<0>();
    }
    __syncwarp();
    const unsigned char* at = stages + stage * Pipeline::kStageBytes;
    if (static_cast<unsigned>(step - first_whole) < static_cast<unsigned>(num_whole)) {
      attention.template attend<false>(params, plan.rows, segment, span, constants, before, at, step);
    } else {
      attention.template attend<true>(params, plan.rows, segment, span, constants, before, at, step);
    }
    __syncwarp();
    // The previous stage is free now.
    if (step + (num_stages - 1) * stride < segment.last_step) {
      pipeline.fill(params, plan, chunk_list, stage == 0 ? num_stages - 1 : stage - 1,
                    step + (num_stages - 1) * stride);
    }
    commit_copies();
    before = at;
    stage = stage == num_stages - 1 ? 0 : stage + 1;
  }
  if constexpr (!Shape::kIsPlain) {
    if (first_step < segment.last_step) attention.add_values(before);
  }
  attention.finish();

  // --- merge the warps, then the parts. A warp's output overwrites its pipeline.
  wait_for_copies<0>();
  __syncwarp();
  attention.share(reinterpret_cast<float*>(stages), sums + warp * Shape::kRows);
  __syncthreads();
  const auto merge = [&](auto combine) {
    combine.merge(params, plan, segment, reinterpret_cast<const float*>(pipelines),
                  num_stages * Pipeline::kStageBytes / 4, Shape::kOutputStride, sums, constants, workspace);
  };
  // Each has its own order of sums. Where warps are not the fewest, it is that of kernels without pages.
  if (Shape::kMinWarps < kFewAttendWarps && num_warps < kFewAttendWarps) {
    merge(Combine<Shape::kRows, Shape::kHeadDim, Shape::kMinWarps, Shape::kIsPaged>());
  } else {
    merge(Combine<Shape::kRows, Shape::kHeadDim, kFewAttendWarps, Shape::kIsPaged>());
  }
}

}  // namespace hf_kvquant::cuda
