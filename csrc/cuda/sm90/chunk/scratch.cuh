// Tiles of a whole sequence, filled once for all of its query rows. With 1,024 new tokens and four query heads of a
// key-value head, thread blocks that fill their own tiles unpack every code 32 times, and two warpgroups of each take
// registers and instructions from the two that attend.
//
// A launch before fills the tiles, in memory that only this call uses, as products read them: a tile is one copy into
// shared memory, its notes a second one. One thread of a thread block then issues all copies. The scratch is bounded
// (choose.cpp), so a call may be cut into slices of heads, and each is filled and attended to in turn.
//
// H200, 2026-11, 32 and 8 heads of 128, int8 and int4, in us, without it, with it, and FlashAttention-3 in bfloat16:
// 1 x 32k + 1,024 1,130 and 1,082, 838 and 828, 702; + 4,096 4,435 and 4,228, 2,936 and 2,945, 2,680; 8 x 8k + 4,096
// 7,321 and 7,096, 5,451 and 5,663, 4,710. `none` takes 833, 2,870 and 5,453: what is left is not the codes. From 256
// tokens on (1,024 rows) it is worth it: 1 x 32k + 256 318 and 311, 8 x 8k + 256 653 and 621; 128 tokens 169 and 197.
// 8 x 8k + 4,096 of int8 took 5,914 with tiles of new tokens from fill_dense, and every large weight found anew.
#pragma once

#include "fill.cuh"

namespace hf_kvquant::cuda {

// So many thread blocks that fill tiles are wanted on a multiprocessor: as many as tiles fit its shared memory.
constexpr int kFillThreads = kWarpgroup, kFillCtas = 5;

// In shared memory: the tile, then its tables.
template <class Shape>
constexpr int kFillBytes = Shape::kTileBytes + static_cast<int>(sizeof(FillTables<Shape, 1>));

// Rows without codes of a tile: stored ones, or new tokens.
struct PlainRows {
  const uint8_t* first;
  int64_t stride;  // in bytes
  Dtype dtype;     // 16 bits
};

template <class Source>
__device__ __forceinline__ PlainRows stored_rows(const Source& source, int first) {
  const Side& side = source.side();
  return {code_row(side, source.laps.slot(source.b, first), source.h, source.laps.row(first)), side.codes_stride_t,
          side.dense_dtype};
}

template <class Source>
__device__ __forceinline__ PlainRows new_rows(const Source& source, const Dense& dense, int number) {
  const int64_t at = int64_t{source.b} * dense.stride_b + source.h * dense.stride_h + number * dense.stride_t;
  return {static_cast<const uint8_t*>(dense.data) + 2 * at, 2 * dense.stride_t, dense.dtype};
}

// The tile of rows without codes, which are copied: 16-bit numbers times a power of two. bfloat16 has more range than
// float16 and fewer digits, so numbers down to 2^-37 of the largest of a tile lose nothing.
template <class Shape, bool kIsKey, class Tables>
__device__ __forceinline__ void fill_plain(const TileSource<Shape, kIsKey, Tables>& source, int step,
                                           const PlainRows& rows) {
  constexpr int kLanesOfRow = Shape::kHeadDim / kChunk, kRowsOfPass = kFillThreads / kLanesOfRow;
  constexpr int kItems = Shape::kTileTokens / kRowsOfPass;
  const Side& side = source.side();
  const int first = step * Shape::kTileTokens, unit_of_row = source.thread % kLanesOfRow;
  const int own = source.thread / kLanesOfRow, c = unit_of_row * kChunk;
  const uint8_t* const from = rows.first + own * rows.stride + 2 * c;
  uint32_t words[kItems][4];
  for_all<kItems>([&](int i) {
    const bool is_held = c < side.head_dim && source.is_seen(first + own + i * kRowsOfPass);
    load_words_if<16>(is_held, from + i * kRowsOfPass * rows.stride, words[i]);
  });
  if (is_interleaved(side.storage)) {
    for_all<kItems>([&](int i) {
      // Of channels 01 23 45 67: 04 15 26 37, as in place_of_channel.
      const uint32_t pairs[4] = {words[i][0], words[i][1], words[i][2], words[i][3]};
      for_all<2>([&](int k) {
        words[i][2 * k] = __byte_perm(pairs[k], pairs[k + 2], 0x5410);
        words[i][2 * k + 1] = __byte_perm(pairs[k], pairs[k + 2], 0x7632);
      });
    });
  }
  const bool is_half = rows.dtype == Dtype::fp16;
  const auto number_of = [&](uint32_t bits) { return is_half ? half_to_float(bits) : __uint_as_float(bits << 16); };
  // Magnitudes of 16-bit numbers are in the order of their bits; those that are not finite are above all others.
  const uint32_t infinity = is_half ? 0x7c00 : 0x7f80;
  uint32_t most = 0;
  for_all<kItems, 4>([&](int i, int k) { most = __vmaxu2(most, words[i][k] & 0x7fff7fff); });
  const auto finite_bound = [&] {
    uint32_t finite = 0;
    for_all<kItems, 4, 2>([&](int i, int k, int half) {
      const uint32_t bits = words[i][k] >> (16 * half) & 0x7fff;
      finite = max(finite, bits < infinity ? bits : 0);
    });
    return magnitude_of(number_of(finite));
  };
  bool is_finite;
  const uint32_t bound = magnitude_of(number_of(max(most & 0xffff, most >> 16)));
  const float unit = source.find_exponent(bound, finite_bound, kTileBits, 0, is_finite);
  if (!kIsKey && !is_finite) source.clear_bad(0);
  for_all<kItems>([&](int i) {
    const int row = own + i * kRowsOfPass;
    uint32_t halves[4];
    for_all<4>([&](int k) {
      uint32_t pair = words[i][k];
      if (!kIsKey && !is_finite) {
        for_all<2>([&](int half) {
          if ((pair >> (16 * half) & 0x7fff) < infinity) return;
          source.note_bad(0, row);
          pair &= half == 0 ? 0xffff0000 : 0xffff;
        });
      }
      halves[k] = pack_halves(number_of(pair & 0xffff) * unit, number_of(pair >> 16) * unit);
    });
    *reinterpret_cast<uint4*>(source.tile(0) + unit_at(Shape::kTileTokens, row, unit_of_row)) = {
        halves[0], halves[1], halves[2], halves[3]};
  });
}

template <class Shape, bool kIsKey>
__device__ __forceinline__ void fill_slot(const DecodeParams& params, const Dense& dense, const DecodePlan& plan,
                                          float* workspace, unsigned char* memory, int slot) {
  using Tables = FillTables<Shape, 1>;
  Segment segment = {};
  segment.b = plan.first_b + blockIdx.z, segment.h = plan.first_h + blockIdx.y;
  const Bounds bounds(params, plan, segment.b);
  const Span span = whole_span(params, plan, bounds);
  const int step = step_of<Shape::kTileTokens>(span.begin) + slot;
  // A sequence without tokens has one tile, of zeros: thread blocks that attend have at least one step.
  if (step > step_of<Shape::kTileTokens>(max(span.end - 1, 0))) return;
  Tables& tables = *reinterpret_cast<Tables*>(memory + Shape::kTileBytes);
  const int thread = threadIdx.x;
  const TileSource<Shape, kIsKey, Tables> source{params, plan,   segment,   span,  bounds,
                                                 memory, tables, workspace, thread};
  const int first = step * Shape::kTileTokens, number = first - num_stored_of(params, plan, bounds);
  if (are_copied(params, dense, kIsKey, number)) {
    fill_plain(source, step, new_rows(source, dense, number));
  } else if (source.is_dense(step)) {
    return;  // fill_dense fills it
  } else if (source.side().storage == Storage::none) {
    fill_plain(source, step, stored_rows(source, first));
  } else {
    with_filler(source, [&](auto&& filler) { filler.fill(step); });
  }
  show_to_products();
  __syncthreads();
  if (thread > 0) return;
  const TilePlaces<Shape> places(plan, workspace, kIsKey);
  store_bulk(places.tiles + int64_t{slot} * Shape::kTileBytes, source.tile(0), Shape::kTileBytes);
  store_bulk(places.notes + slot, &source.notes(0), sizeof(TileNotes));
  commit_bulk_stores();
  wait_for_bulk_reads();
}

// Each thread block fills one tile, of keys or of values.
template <class Shape>
__global__ void __launch_bounds__(kFillThreads, kFillCtas)
    fill_scratch(const __grid_constant__ DecodeParams params, const __grid_constant__ NewTokens new_tokens,
                 const __grid_constant__ DecodePlan plan, float* workspace) {
#if KVQ_HAS_WGMMA
  extern __shared__ __align__(kSwizzleBytes) unsigned char memory[];
  // Behind fill_dense this starts when that has waited, and fills other tiles beside it. It ends after it, so who waits
  // for this launch waits for both.
  const bool is_behind_dense = plan.dense[0].count() + plan.dense[1].count() > 0;
  if (!is_behind_dense) wait_for_launch_before();
  start_launch_behind();
  const int slot = blockIdx.x;
  if (slot < plan.scratch_tiles) {
    fill_slot<Shape, true>(params, new_tokens.key, plan, workspace, memory, slot);
  } else {
    fill_slot<Shape, false>(params, new_tokens.value, plan, workspace, memory, slot - plan.scratch_tiles);
  }
  if (is_behind_dense) wait_for_launch_before();
#endif
}

// Copies the tiles of a thread block's steps to shared memory. One thread calls this.
template <class Shape>
__device__ __forceinline__ void copy_tiles(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds,
                                           float* workspace, unsigned char* memory, ChunkTables<Shape>& tables,
                                           int first_step, int last_step, int stride) {
  const int first = step_of<Shape::kTileTokens>(whole_span(params, plan, bounds).begin);
  const TilePlaces<Shape> keys(plan, workspace, true), values(plan, workspace, false);
  const auto copy = [&](const TilePlaces<Shape>& from, int side, int stage, int slot, unsigned char* to) {
    Barrier& filled = tables.filled[side][stage];
    filled.arrive_and_expect(Shape::kTileBytes + sizeof(TileNotes));
    copy_bulk(to + stage * Shape::kTileBytes, from.tiles + int64_t{slot} * Shape::kTileBytes, Shape::kTileBytes,
              filled);
    copy_bulk(&tables.notes[side][stage], from.notes + slot, sizeof(TileNotes), filled);
  };
  TileSteps<Shape::kKeyStages> key_steps{first_step, last_step, stride};
  TileSteps<Shape::kValueStages> value_steps{first_step, last_step, stride};
#pragma unroll 1
  while (key_steps.has_more()) {
    // Rows that see no token have step 0, of which nothing is used: any tile serves.
    const int slot = min(max(key_steps.step - first, 0), plan.scratch_tiles - 1);
    key_steps.wait_until_empty(tables.emptied[0]);
    copy(keys, 0, key_steps.stage(), slot, memory + Shape::kKeysAt);
    value_steps.wait_until_empty(tables.emptied[1]);
    copy(values, 1, value_steps.stage(), slot, memory + Shape::kValuesAt);
    key_steps.advance(), value_steps.advance();
  }
}

}  // namespace hf_kvquant::cuda
