// Fills tiles of keys and values: one warpgroup each dequantises codes to float16, in the layout that products read,
// while others attend. Every code is unpacked once for all query rows of a thread block.
//
// float16 holds every code exactly, and code · scale + zero to 11 bits. Its range is narrow, so numbers of a tile are
// multiplied by a power of two, which scores and weights undo.
#pragma once

#include "../../attend/fragments.cuh"
#include "dense_tiles.cuh"

namespace hf_kvquant::cuda {

// x · scale + zero, two float16 numbers each.
__device__ __forceinline__ uint32_t scaled(uint32_t x, uint2 scale_zero) {
  const auto halves = [](uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); };
  const __half2 y = __hfma2(halves(x), halves(scale_zero.x), halves(scale_zero.y));
  return *reinterpret_cast<const uint32_t*>(&y);
}

// Codes `eight` · 8 ... + 7 of a thread's words as float16 numbers, in the order of place_of_channel: e4m3 codes as they
// are, integers as subnormal numbers, which are smaller by the factor of unit_of_pair. One mask or permutation unpacks
// two codes.
template <Storage kStorage>
__device__ __forceinline__ void unpack(const uint32_t* of_thread, int eight, uint32_t (&halves)[4]) {
  if constexpr (kStorage == Storage::int2) {
    const uint32_t bytes = __byte_perm(of_thread[0], 0, eight == 0 ? 0x4140 : 0x4342);
    for_all<4>([&](int i) { halves[i] = bytes & mask_of_place(kStorage, i * bits_of(kStorage)); });
    return;
  }
  const uint32_t* words = of_thread + eight * bits_of(kStorage) / 4;
  for_all<2>([&](int i) {
    if constexpr (kStorage == Storage::fp8) {
      halves[2 * i] = halves_of_e4m3(words[i] & 0xffff), halves[2 * i + 1] = halves_of_e4m3(words[i] >> 16);
    } else if constexpr (kStorage == Storage::int8) {
      halves[2 * i] = __byte_perm(words[i], 0, 0x4140), halves[2 * i + 1] = __byte_perm(words[i], 0, 0x4342);
    } else {
      const uint32_t word = words[0] >> (8 * i);
      halves[2 * i] = word & kLowNibbles, halves[2 * i + 1] = word & kHighNibbles;
    }
  });
}

// What unpacked codes of a pair of channels have to be multiplied by, besides the scale.
template <Storage kStorage>
__device__ __forceinline__ constexpr float unit_of_pair(int pair) {
  return is_integer(kStorage) ? unit_of_place(pair * bits_of(kStorage) % 8) : 1.f;
}

// Loads a float16 number, or zero if `is_held` is false, without a branch.
__device__ __forceinline__ uint32_t load_half_if(bool is_held, const half_bits* from) {
  // A register of 32 bits: to widen a narrower one would wait for the load.
  uint32_t bits = 0;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p ld.global.u16 %0, [%2];}"
               : "+r"(bits)
               : "r"(static_cast<int>(is_held)), "l"(from));
  return bits;
}

// The steps of a thread block that are still to be filled.
template <int kStages>
struct TileSteps {
  int step, last_step, stride, number = 0;

  __device__ __forceinline__ bool has_more() const { return step < last_step; }
  __device__ __forceinline__ int stage() const { return number % kStages; }
  __device__ __forceinline__ void advance() { step += stride, ++number; }
  __device__ __forceinline__ void wait_until_empty(Barrier* emptied) const {
    emptied[stage()].wait(number / kStages - 1);
  }
};

// Where the tiles of keys or values of one head come from and go to. `Tables_`: what the threads share.
template <class Shape, bool kIsKey, class Tables_>
struct TileSource {
  using Tables = Tables_;
  static constexpr int kTileTokens = Shape::kTileTokens;
  using Steps = TileSteps<kIsKey ? Shape::kKeyStages : Shape::kValueStages>;
  static constexpr int kMeeting = kIsKey ? 1 : 2;  // the number of the barrier of this warpgroup
  const DecodeParams& params;
  const DecodePlan& plan;
  const Laps laps;
  Tables& tables;
  float* const workspace;
  const DenseTiles<Shape> dense;
  unsigned char* const tiles;  // of the first stage
  const int b, h, begin, count, thread;

  __device__ __forceinline__ TileSource(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                        const Span& span, const Bounds& bounds, unsigned char* tiles, Tables& tables,
                                        float* workspace, int thread)
      : params(params),
        plan(plan),
        laps(plan.laps),
        tables(tables),
        workspace(workspace),
        dense(side(), first_tail(params, plan, bounds, side(), segment.b), num_stored_of(params, plan, bounds),
              Copies(params, plan, bounds, segment.b)),
        tiles(tiles),
        b(segment.b),
        h(segment.h),
        begin(span.begin),
        count(span.end - span.begin),
        thread(thread) {}

  __device__ __forceinline__ const Side& side() const { return kIsKey ? params.key_side : params.value_side; }
  __device__ __forceinline__ unsigned char* tile(int stage) const { return tiles + stage * Shape::kTileBytes; }

  __device__ __forceinline__ TileNotes& notes(int stage) const { return tables.notes[!kIsKey][stage]; }

  // Whether some row of the thread block attends to a token.
  __device__ __forceinline__ bool is_seen(int token) const {
    return static_cast<unsigned>(token - begin) < static_cast<unsigned>(count);
  }

  // Whether some token of a tile has no codes.
  __device__ __forceinline__ bool is_dense(int step) const { return dense.has(step); }

  // The maximum over all threads.
  __device__ __forceinline__ uint32_t largest(uint32_t bound) const {
    bound = __reduce_max_sync(kAllLanes, bound);
    if (thread % kLanes == 0) tables.bounds[!kIsKey][thread / kLanes] = bound;
    meet<kMeeting, kWarpgroup>();
    for_all<kWarpgroup / kLanes>([&](int i) { bound = max(bound, tables.bounds[!kIsKey][i]); });
    return bound;
  }

  // Finds the exponent of a tile from a bound on the magnitudes of this thread's part of it, or from `finite_bound()`,
  // the same without numbers that are not finite, where there are such. `bits` as of kTileBits. Returns 2^-exponent.
  template <class Bound>
  __device__ __forceinline__ float find_exponent(uint32_t bound, Bound finite_bound, int bits, int stage,
                                                 bool& is_finite) const {
    bound = largest(bound);
    is_finite = is_finite_bits(bound);
    if (!is_finite) {
      meet<kMeeting, kWarpgroup>();  // the bounds are read
      bound = largest(finite_bound());
    }
    const int exponent = exponent_of(bound, bits);
    if (thread == 0) {
      TileNotes& notes = this->notes(stage);
      notes.exponent = static_cast<float>(exponent), notes.has_bad = !is_finite, notes.unit = power_of_two(exponent);
    }
    return power_of_two(-exponent);
  }

  __device__ __forceinline__ void clear_bad(int stage) const {
    if (thread < kTileTokens / 32) notes(stage).bad[thread] = 0;
    meet<kMeeting, kWarpgroup>();
  }

  // Notes a token of a tile whose values are not finite.
  __device__ __forceinline__ void note_bad(int stage, int i) const {
    atomicOr(&notes(stage).bad[i / 32], 1u << (i % 32));
  }

  // Copies a tile that fill_dense has filled. All threads call this; `filled` is the stage's barrier.
  __device__ __forceinline__ void copy_dense(int step, int stage, Barrier& filled) const {
    if (thread > 0) {
      filled.arrive();
      return;
    }
    wait_for_launch_before();
    show_to_copies();
    const TilePlaces<Shape> places(plan, workspace, kIsKey);
    const int place = dense.place(step, plan.dense[!kIsKey].most_first);
    notes(stage) = places.notes[place];
    filled.arrive_and_expect(Shape::kTileBytes);
    copy_bulk(tile(stage), places.tiles + int64_t{place} * Shape::kTileBytes, Shape::kTileBytes, filled);
  }
};

// Keys or values of one head, of one format. Threads take 16 channels of a token at a time.
template <class Shape, bool kIsKey, class Tables, Storage kStorage, Scales kScales>
class Filler {
  using Source = TileSource<Shape, kIsKey, Tables>;
  using Steps = typename Source::Steps;
  static constexpr bool kHasBlocks = kScales == Scales::blocks;
  static constexpr int kTileTokens = Shape::kTileTokens, kChannels = 16, kLanesOfRow = Shape::kHeadDim / kChannels;
  static constexpr int kRowsOfPass = kWarpgroup / kLanesOfRow, kItems = kTileTokens / kRowsOfPass;
  // Scales of a tile: of channels, of tokens and groups, or of tokens.
  static constexpr int kAllScales =
      kHasBlocks ? Shape::kHeadDim : kTileTokens * (kScales == Scales::groups ? Shape::kMaxGroups : 1);
  static constexpr int kEntries = (kAllScales + kWarpgroup - 1) / kWarpgroup;
  static constexpr int kMeeting = Source::kMeeting;
  static constexpr int kWords = kChannels * bits_of(kStorage) / 32;
  // Items whose scales are loaded together, as far as there are registers.
  static constexpr int kAtOnce = kWords == 4 ? 2 : kItems;

 public:
  __device__ __forceinline__ Filler(const Source& source) : source_(source) {
    // Lanes of a row are such that eight neighbours store to different banks: four units of two rows.
    const int lane = source.thread % kLanes, warp = source.thread / kLanes;
    constexpr int kRowsOfWarp = kLanes / kLanesOfRow;
    if constexpr (kLanesOfRow > 4) {
      chunk_ = (lane & 3) | (lane >> 3) % (kLanesOfRow / 4) * 4;
      row_ = warp * kRowsOfWarp + ((lane >> 2 & 1) | lane / (2 * kLanesOfRow) * 2);
    } else {
      chunk_ = lane & 3;
      row_ = warp * kRowsOfWarp + lane / 4;
    }
    const Side& side = source.side();
    codes_from_ = code_row(side, 0, source.h, row_) + chunk_ * kWords * 4;
    scales_from_ = scale_at(side, 0, source.h, 0, 0);
    if (has_zero()) zeros_from_ = zero_at(side, 0, source.h, 0, 0);
  }

  // Fills one tile.
  __device__ __forceinline__ void fill(int step) {
    load(step * Shape::kTileTokens);
    prepare_scales(0);
    store(source_.tile(0));
  }

  // Fills tiles from `steps` on, until the last or until one is dense.
  __device__ __forceinline__ void fill_some(Steps& steps) {
    load(steps.step * Shape::kTileTokens);
    bool is_more = true;
#pragma unroll 1
    while (is_more) {
      const int first = steps.step * Shape::kTileTokens, stage = steps.stage();
      steps.wait_until_empty(source_.tables.emptied[!kIsKey]);
      prepare_scales(stage);
      store(source_.tile(stage));
      show_to_products();
      source_.tables.filled[!kIsKey][stage].arrive();
      steps.advance();
      is_more = steps.has_more() && !source_.is_dense(steps.step);
      if (is_more) load(steps.step * Shape::kTileTokens);
    }
  }

 private:
  __device__ __forceinline__ bool has_zero() const { return is_integer(kStorage) && !source_.side().is_symmetric; }

  // Starts to load the scales and codes of the tile whose first token is `first`.
  __device__ __forceinline__ void load(int first) {
    const Side& side = source_.side();
    const int row = source_.laps.row(first), slot = source_.laps.slot(source_.b, first);
    const half_bits* const scales_from = scales_from_ + slot * side.scale_stride_b;
    const half_bits* const zeros_from = zeros_from_ + slot * side.zero_stride_b;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const int entry = source_.thread + e * kWarpgroup, token = entry % kTileTokens, group = entry / kTileTokens;
      bool is_held;
      int64_t scale_at, zero_at;
      if constexpr (kHasBlocks) {
        is_held = entry < side.head_dim;
        scale_at = row / kBlockSize * side.scale_stride_g + entry;
        zero_at = row / kBlockSize * side.zero_stride_g + entry;
      } else {
        is_held = group < side.num_groups && source_.is_seen(first + token);
        scale_at = int64_t{row + token} * static_cast<int>(side.scale_stride_t);
        zero_at = int64_t{row + token} * static_cast<int>(side.zero_stride_t);
        if (kScales == Scales::groups) scale_at += group * side.scale_stride_g, zero_at += group * side.zero_stride_g;
      }
      scales_[e] = load_half_if(is_held, scales_from + scale_at);
      zeros_[e] = load_half_if(is_held && has_zero(), zeros_from + zero_at);
    }
    const int stride = static_cast<int>(side.codes_stride_t);
    const uint8_t* from = codes_from_ + slot * side.codes_stride_b + int64_t{row} * stride;
    const unsigned count = chunk_ * kChannels < side.head_dim ? source_.count : 0;
    const unsigned token = first + row_ - source_.begin;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      load_words_if<kWords * 4>(token + i * kRowsOfPass < count, from, codes_[i]);
      from += kRowsOfPass * stride;
    }
  }

  // Puts the loaded scales, times a power of two, where all threads find them.
  __device__ __forceinline__ void prepare_scales(int stage) {
    const Side& side = source_.side();
    uint2* const table = source_.tables.scales[!kIsKey];
    // Of integers more than needed, so that scales in units of subnormal numbers stay finite.
    constexpr float kMost = bits_of(kStorage) < 4 ? 15.f : max_code(kStorage, false);
    uint32_t bound = 0, bounds[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      bounds[e] = magnitude_of(fmaf(fabsf(half_to_float(scales_[e])), kMost, fabsf(half_to_float(zeros_[e]))));
      bound = max(bound, bounds[e]);
    }
    bool is_finite;
    const auto finite_bound = [&] {
      uint32_t finite = 0;
      for_all<kEntries>([&](int e) { finite = max(finite, is_finite_bits(bounds[e]) ? bounds[e] : 0); });
      return finite;
    };
    constexpr int kBits = is_integer(kStorage) ? kIntegerTileBits : kTileBits;
    const float unit = source_.find_exponent(bound, finite_bound, kBits, stage, is_finite);
    if (!kIsKey && !is_finite) {
      source_.clear_bad(stage);
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        if (is_finite_bits(bounds[e])) continue;
        source_.note_bad(stage, (source_.thread + e * kWarpgroup) % kTileTokens);
        scales_[e] = zeros_[e] = 0;
      }
    }
    const float offset = code_offset(kStorage, side.is_symmetric);
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const int entry = source_.thread + e * kWarpgroup;
      const float own = half_to_float(scales_[e]) * unit;
      const uint32_t zero = float_to_half(half_to_float(zeros_[e]) * unit - offset * own);
      if constexpr (kHasBlocks) {
        // Pairs of channels as they lie in the tile.
        if (entry < Shape::kHeadDim) {
          const int place = place_of_channel(kStorage, entry);
          half_bits* pair = reinterpret_cast<half_bits*>(table + place / 2);
          pair[place % 2] = float_to_half(own * unit_of_pair<kStorage>(place / 2)), pair[2 + place % 2] = zero;
        }
      } else if (kAllScales % kWarpgroup == 0 || entry < kAllScales) {
        const uint32_t scale = float_to_half(own * unit_of_pair<kStorage>(0));
        table[entry] = {scale | scale << 16, zero | zero << 16};
      }
    }
    meet<kMeeting, kWarpgroup>();
  }

  __device__ __forceinline__ void store(unsigned char* tile) const {
    constexpr int kStep = kRowsOfPass * kLineBytes / 16;
    static_assert(kRowsOfPass % 8 == 0, "so units stay where they are");
    const Side& side = source_.side();
    const int at = unit_at(kTileTokens, row_, 2 * chunk_);
    uint4* const low = reinterpret_cast<uint4*>(tile + at);
    uint4* const high = reinterpret_cast<uint4*>(tile + (at ^ 16));  // the next unit
    const auto put = [&](int i, auto scale_of) {
      uint32_t x[4], y[4];
      unpack<kStorage>(codes_[i], 0, x);
      unpack<kStorage>(codes_[i], 1, y);
      low[i * kStep] = {scaled(x[0], scale_of(0)), scaled(x[1], scale_of(1)), scaled(x[2], scale_of(2)),
                        scaled(x[3], scale_of(3))};
      high[i * kStep] = {scaled(y[0], scale_of(4)), scaled(y[1], scale_of(5)), scaled(y[2], scale_of(6)),
                         scaled(y[3], scale_of(7))};
    };
    if constexpr (kHasBlocks) {
      uint2 scales[8];
      for_all<8>([&](int k) { scales[k] = source_.tables.scales[0][chunk_ * 8 + k]; });
      for_all<kItems>([&](int i) { put(i, [&](int k) { return scales[k]; }); });
    } else {
      const int group = kScales == Scales::rows
                            ? 0
                            : min(chunk_ * kChannels / (side.head_dim / side.num_groups), side.num_groups - 1);
      const uint2* from = source_.tables.scales[!kIsKey] + group * kTileTokens + row_;
      // Loads before stores, of which the compiler cannot know that they are to another place.
      for_all<kItems / kAtOnce>([&](int part) {
        uint2 scales[kAtOnce];
        for_all<kAtOnce>([&](int i) { scales[i] = from[(part * kAtOnce + i) * kRowsOfPass]; });
        for_all<kAtOnce>([&](int i) {
          uint2 of_code[kUnits];
          for_all<kUnits>([&](int k) { of_code[k] = {in_unit(scales[i].x, k), scales[i].y}; });
          put(part * kAtOnce + i, [&](int k) { return of_code[k % kUnits]; });
        });
      });
    }
  }

  static constexpr int kUnits = is_integer(kStorage) ? 8 / bits_of(kStorage) : 1;

  // Converts a scale, both halves, from the unit of a byte's lowest code to the unit of code `k`.
  static __device__ __forceinline__ uint32_t in_unit(uint32_t halves, int k) {
    constexpr uint32_t kOne = 0x3c003c00u, kHalving = 0x04000400u;
    return k == 0 ? halves : multiply_halves(halves, kOne - kHalving * (bits_of(kStorage) * k));
  }

  const Source source_;
  int chunk_, row_;
  const uint8_t* codes_from_;  // of this thread's first token and channels, in slot and row 0
  const half_bits *scales_from_, *zeros_from_ = nullptr;
  uint32_t codes_[kItems][kWords], scales_[kEntries], zeros_[kEntries];
};

// Calls `use` with what fills tiles of a side's format.
template <class Shape, bool kIsKey, class Tables, class Use>
__device__ __forceinline__ void with_filler(const TileSource<Shape, kIsKey, Tables>& source, Use use) {
  const Side& side = source.side();
  if constexpr (kIsKey) {
    if (side.has_channel_scales) return use(Filler<Shape, kIsKey, Tables, Storage::int4, Scales::blocks>(source));
  }
  with_storage(side.storage, [&](auto storage) {
    if (side.num_groups == 1) {
      use(Filler<Shape, kIsKey, Tables, decltype(storage)::value, Scales::rows>(source));
    } else {
      use(Filler<Shape, kIsKey, Tables, decltype(storage)::value, Scales::groups>(source));
    }
  });
}

// Fills all tiles of keys or values of a thread block.
template <class Shape, bool kIsKey>
__device__ __forceinline__ void fill_tiles(const TileSource<Shape, kIsKey, ChunkTables<Shape>>& source,
                                           typename TileSource<Shape, kIsKey, ChunkTables<Shape>>::Steps steps) {
#pragma unroll 1
  while (steps.has_more()) {
    if (source.is_dense(steps.step)) {
      const int stage = steps.stage();
      steps.wait_until_empty(source.tables.emptied[!kIsKey]);
      source.copy_dense(steps.step, stage, source.tables.filled[!kIsKey][stage]);
      steps.advance();
      continue;
    }
    with_filler(source, [&](auto&& filler) { filler.fill_some(steps); });
  }
}

}  // namespace hf_kvquant::cuda
