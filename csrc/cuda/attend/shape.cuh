// The constants of one instantiation of the attention kernel: formats, head dim, query rows, and the layout of shared
// memory. attend_table.h lists the instantiations; plan.cpp chooses one for a call.
#pragma once

#include "combine.cuh"
#include "pipeline.cuh"

namespace hf_kvquant::cuda {

// Bits of a value in a row. Values of storage type `none` are 16-bit numbers here.
constexpr int width_of(Storage storage) { return storage == Storage::none ? 16 : bits_of(storage); }

// With `kRows` 4, the high and low bytes of an integer query share a column tile (kIsPaired), which halves the work on
// scores.
template <Storage kKey_, Storage kValue_, bool kHasKeyZero_, bool kHasValueZero_, Scales kScales_, int kHeadDim_,
          int kRows_, bool kIsPaged_>
struct Shape {
  static constexpr Storage kKey = kKey_, kValue = kValue_;
  static constexpr bool kHasKeyZero = kHasKeyZero_, kHasValueZero = kHasValueZero_;
  static constexpr Scales kScales = kScales_;
  static constexpr bool kIsGrouped = kScales == Scales::groups, kIsBlocked = kScales == Scales::blocks;
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_;
  static constexpr bool kIsPaged = kIsPaged_;
  static constexpr bool kIsPlain = kKey == Storage::none;  // no codes at all: see plain_attention.cuh
  static_assert(kIsPlain == (kValue == Storage::none));
  // Warps of a thread block, at least. A warp prepares and merges more rows the fewer there are, as far as registers
  // hold these; and only split plans want fewer than kFewAttendWarps, so only kernels for pages have code for them.
  static constexpr int kMinWarps = kIsPaged && kHeadDim <= 128 && kRows * kHeadDim <= 1024 ? 2 : kFewAttendWarps;
  static constexpr bool kIsPaired = kRows == 4;
  static_assert(!kIsPaired || is_integer(kKey), "only integer queries come in two bytes");
  // A warp quantises a new key and its value at once, with the same code: both have the same format, and each row takes
  // half of the lanes.
  static constexpr bool kHasPairs =
      kKey == kValue && kHasKeyZero == kHasValueZero && !kIsBlocked && !kIsPlain && kHeadDim <= kLanes / 2 * kChunk;

  static constexpr int kKeyRowBytes = kHeadDim * width_of(kKey) / 8;
  static constexpr int kValueRowBytes = kHeadDim * width_of(kValue) / 8;
  static constexpr int kNumGroups = kIsGrouped ? kHeadDim / kGroupChannels : 1;
  static_assert(kKeyRowBytes >= 32 && kValueRowBytes >= 32, "narrower rows run in the next larger head dim");
  // Steps of about 4 KB (8 KB for head dim 256, twice as much without codes), three or four of them being copied or in
  // use.
  static constexpr int kTilesPerStep =
      kKeyRowBytes + kValueRowBytes > 192 ? 1 : width_of(kKey) + width_of(kValue) <= 4 ? 4 : 2;
  static constexpr int kNumStages = kKeyRowBytes + kValueRowBytes == 256 ? 4 : 3;
  using StepPipeline = Pipeline<kKeyRowBytes, kValueRowBytes, kHasKeyZero, kHasValueZero, kNumGroups, kTilesPerStep,
                                kIsBlocked ? kHeadDim : 0, kIsPaged>;

  static constexpr int kColumnTiles = kRows <= 8 ? 1 : kRows / 8;  // of 8 query rows (kIsPaired: 4)
  static constexpr int kColumnsPerTile = kIsPaired ? 1 : 2;
  static constexpr int kColumns = kColumnsPerTile * kColumnTiles;  // query rows of a lane

  // The query row of a lane's column; `t` is the lane's number in its group of four.
  static __device__ __forceinline__ int row_of(int column, int t) {
    return kIsPaired ? t : 8 * (column >> 1) + 2 * t + (column & 1);
  }

  // Shared memory: the query, factors and sums, and the pipelines, which the outputs of the warps overwrite in the end.
  static constexpr int kOutputStride = kHeadDim + 4;              // floats
  static constexpr int kOutputBytes = kRows * kOutputStride * 4;  // of a warp
  static constexpr int kFactorsAt = 2 * kRows * kHeadDim;         // see Query
  static constexpr int kConstantsAt = kFactorsAt + (1 + kNumGroups) * kRows * 4;
  static constexpr int kSumsAt = kConstantsAt + kRows * 4;  // [warp][kRows] {maximum, sum}
  static constexpr int kPipelinesAt = (kSumsAt + kMaxAttendWarps * kRows * 8 + 127) / 128 * 128;

  // For the host, which uses fewer stages if shared memory is short.
  static constexpr int kMinStages = 2 * StepPipeline::kStageBytes >= kOutputBytes ? 2 : kNumStages;
  static_assert(kMinStages * StepPipeline::kStageBytes >= kOutputBytes, "a pipeline holds the output");
};

}  // namespace hf_kvquant::cuda
