// The constants of one instantiation of the chunk kernel, and its shared memory.
#pragma once

#include "../../attend/combine.cuh"
#include "../../common/transform.cuh"
#include "wgmma.cuh"

namespace hf_kvquant::cuda {

constexpr int kConsumers = 2;  // warpgroups that attend, of 64 query rows each
constexpr int kRowsOfWarpgroup = 64;

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

// Each query has a window of its own, so a token may be dense for one and codes for a later one. A tile is the same for
// all rows. So such tokens are there as the first query reads them, in their place, and once more as copies behind the
// last token: those whose values are codes, then those whose keys and values are. Every row attends to one of these. A
// chunk and a single query have no copies: all queries of a chunk have the window before it.
struct Copies {
  int num_tokens;            // before the copies
  int key_from, value_from;  // the first of the newest tokens that the first query reads from the tails, or INT_MAX
  int num_values = 0, num_both = 0;

  Copies() = default;
  __device__ __forceinline__ Copies(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds, int b)
      : num_tokens(bounds.num_tokens(plan)), key_from(INT32_MAX), value_from(INT32_MAX) {
    if (params.is_chunk || params.q_len == 1) return;
    const int tail_from = plan.laps.tail_from(b, num_tokens);
    const auto window = [&](const Side& side, int num_seen) {
      if (side.tail == nullptr) return INT32_MAX;
      return window_begin(side, max(num_seen, 0), num_tokens, params.residual_length, tail_from);
    };
    const Side &keys = params.key_side, &values = params.value_side;
    key_from = window(keys, num_tokens - params.q_len + 1), value_from = window(values, num_tokens - params.q_len + 1);
    num_both = window(keys, num_tokens) - key_from;
    // Keys with scales for blocks stay dense for longer than values.
    if (keys.has_channel_scales || keys.tail == nullptr) num_values = window(values, num_tokens) - value_from;
  }

  __device__ __forceinline__ int count() const { return num_values + num_both; }
  __device__ __forceinline__ int end() const { return num_tokens + count(); }

  // The token in a place, which is beyond `num_tokens` like the place where there is none.
  __device__ __forceinline__ int token(int place) const {
    const int number = place - num_tokens;
    if (number < 0 || number >= count()) return place;
    return number < num_values ? value_from + number : key_from + (number - num_values);
  }
  // Whether keys or values in a place are codes although the first query reads that token from the tail.
  __device__ __forceinline__ bool has_codes(int place, bool is_key) const {
    return place >= num_tokens + (is_key ? num_values : 0);
  }
};

// What a query at a position reads of tokens that are there more than once.
struct CopiesOfQuery {
  int key_from, value_from;  // the first of the newest tokens that it reads from the tails

  __device__ __forceinline__ CopiesOfQuery(const DecodeParams& params, const Copies& copies, int position) {
    const int newest = max(position + 1 - params.residual_length, 0);
    const bool has_blocks = params.key_side.has_channel_scales;
    key_from = max(has_blocks ? newest / kBlockSize * kBlockSize : newest, copies.key_from);
    value_from = max(newest, copies.value_from);
  }

  // Whether the query reads a token as it is in a place. `is_first`: one of the first tokens, which are always dense.
  __device__ __forceinline__ bool reads(const Copies& copies, int place, int token, bool is_first) const {
    const bool has_coded_key = token >= copies.key_from && token < key_from;
    const bool has_coded_value = token >= copies.value_from && token < value_from;
    const bool is_copy = place >= copies.num_tokens;
    if (is_first || !is_copy) return !is_copy && (is_first || !(has_coded_key || has_coded_value));
    return place < copies.num_tokens + copies.num_values ? has_coded_value && !has_coded_key : has_coded_key;
  }
};

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
  const unsigned char* keys;  // the place in the scratch of the tile of step 0, which need not be there
};

// Everything in shared memory but matrices.
template <class Shape>
struct ChunkTables : std::conditional_t<Shape::kIsStreamed, CopyTables<Shape::kMostStages>,
                                        FillTables<Shape, Shape::kMostStages>> {
  // Of keys [0] and values [1], by stage.
  Barrier filled[2][Shape::kMostStages], emptied[2][Shape::kMostStages];
  float factors[Shape::kRows], constants[Shape::kRows];  // of the query, see prepare_query
  float2 sums[Shape::kSlots];
  int begin, end;  // tokens that any row attends to, copies included
  int start;       // the first token that is not padding
  Copies copies;
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
