// The constants of one instantiation of the chunk kernel, and its shared memory.
#pragma once

#include "../../attend/combine.cuh"
#include "../../common/transform.cuh"
#include "wgmma.cuh"

namespace hf_kvquant::cuda {

constexpr int kConsumers = 2;  // warpgroups that attend, of 64 query rows each
constexpr int kRowsOfWarpgroup = 64;
constexpr bool kStreamedTakesTurns = true;

// `kChangesScores`: with softcap or ALiBi, whose code would take registers from others. `kKind`: with `streamed`, tiles
// come from the scratch (scratch.cuh), else two warpgroups of the thread block fill them, of keys and of values. With
// `few_rows`, the warpgroups that attend have the same rows and take tiles in turn; otherwise each has rows of its own,
// and both attend to all tiles.
template <int kHeadDim_, bool kChangesScores_, ChunkKind kKind>
struct ChunkShape {
  static constexpr bool kChangesScores = kChangesScores_, kIsStreamed = kKind == ChunkKind::streamed;
  static constexpr bool kSharesRows = kKind == ChunkKind::few_rows;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = (kSharesRows ? 1 : kConsumers) * kRowsOfWarpgroup;
  static constexpr int kSlots = kConsumers * kRowsOfWarpgroup;  // rows of both warpgroups
  // Warpgroups that read a tile, and how many tiles further on the next one of a warpgroup is.
  static constexpr int kReaders = kSharesRows ? 1 : kConsumers, kTurn = kSharesRows ? kConsumers : 1;
  static constexpr int kThreads = (kConsumers + (kIsStreamed ? 1 : 2)) * kWarpgroup;
  // Of a thread that attends and of one that fills or copies tiles. At the start each of 512 threads has 128, and each
  // of 384 has 168; together they must not have more.
  static constexpr int kConsumerRegisters = kIsStreamed ? 232 : 192, kFillerRegisters = kIsStreamed ? 40 : 64;
  // Whether the two warpgroups that attend issue their products in turn, as in FlashAttention-3: one then does its
  // softmax while the products of the other run.
  static constexpr bool kTakesTurns = kIsStreamed && kStreamedTakesTurns;
  // Fewer tokens with 256 channels, whose output takes half of all registers.
  static constexpr int kTileTokens = kHeadDim <= 128 ? 128 : kIsStreamed ? 64 : 32;
  // Of keys and of values. Values are awaited by the softmax of the same tile, so their stages need more of a lead. A
  // warpgroup holds values from one of its tiles to the next.
  static constexpr int kKeyStages = kHeadDim == 256 && kSharesRows ? 3 : 2;
  static constexpr int kValueStages = kSharesRows ? 4 : kHeadDim == 256 && kIsStreamed ? 2 : 3;
  static constexpr int kMostStages = kValueStages;
  static constexpr int kMaxGroups = kHeadDim / kGroupChannels;

  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kTileBytes = kTileTokens * kHeadDim * 2;  // of keys or of values
  static constexpr int kKeysAt = kQueryBytes, kValuesAt = kKeysAt + kKeyStages * kTileBytes;
  static constexpr int kTablesAt = kValuesAt + kValueStages * kTileBytes;
  static constexpr int kOutputStride = kHeadDim + 4;  // floats; the output overwrites query and tiles in the end
  static_assert(kSlots * kOutputStride * 4 <= kTablesAt, "the output fits");
};

// Tiles are float16 numbers times 2^exponent, the power of two that brings the largest of a tile below 2^kTileBits.
// Integer codes are unpacked to subnormal numbers, and for their scales to be finite, such tiles stay below
// 2^kIntegerTileBits. Query rows are brought below 2^kTileBits, too.
constexpr int kTileBits = 15, kIntegerTileBits = -5;

// What a tile has besides its numbers, in shared memory and in the workspace.
struct alignas(16) TileNotes {
  float exponent;
  int has_bad;  // of values: whether some are not finite
  float unit;   // 2^exponent
  // The tokens with values that are not finite, where there are some. They are zeros in the tile: weights of rows that
  // do not attend to them are zeros too, and zero times NaN is NaN.
  uint32_t bad[4];
};

// What the threads share that fill a tile of keys [0] or values [1].
template <class Shape, int kStages>
struct FillTables {
  TileNotes notes[2][kStages];
  uint32_t bounds[2][4];
  // Scale and zero of tokens [group][token], twice each, or of pairs of channels.
  uint2 scales[2][Shape::kMaxGroups * Shape::kTileTokens];
};

template <int kStages>
struct CopyTables {
  TileNotes notes[2][kStages];
};

// Everything in shared memory but matrices.
template <class Shape>
struct ChunkTables : std::conditional_t<Shape::kIsStreamed, CopyTables<Shape::kMostStages>,
                                        FillTables<Shape, Shape::kMostStages>> {
  // Of keys [0] and values [1], by stage.
  Barrier filled[2][Shape::kMostStages], emptied[2][Shape::kMostStages];
  float factors[Shape::kRows], constants[Shape::kRows];  // of the query, see prepare_query
  float2 sums[Shape::kSlots];
  int begin, end;  // tokens that any row attends to
  struct Whole {
    int from, until;
  } whole[kConsumers * kWarpgroup / kLanes];  // tokens that all rows of a warp's warpgroup attend to
  struct Row {
    int position;
    float slope;  // of ALiBi, in log2 units
    float kept;   // of the sums, when the shift was raised
    bool is_bad;  // attends to a value that is not finite
  } rows[Shape::kSlots];
};

// Channels lie in the order in which codes are unpacked: of eight int4 or int2 codes 0, 4, 1, 5, 2, 6, 3, 7. Storages are
// compared by name, since at run time `bits_of` is a search.
__device__ __forceinline__ bool is_interleaved(Storage storage) {
  return storage == Storage::int4 || storage == Storage::int2;
}

__device__ __forceinline__ int place_of_channel(Storage storage, int c) {
  return is_interleaved(storage) ? (c & ~7) | (c & 3) << 1 | (c & 4) >> 2 : c;
}

__device__ __forceinline__ int channel_at(Storage storage, int place) {
  return is_interleaved(storage) ? (place & ~7) | (place & 7) >> 1 | (place & 1) << 2 : place;
}

}  // namespace hf_kvquant::cuda
