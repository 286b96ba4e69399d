// The constants of one instantiation of the latent kernel: formats, channels, query rows, and the layout of shared
// memory. instantiate.cuh lists the instantiations.
#pragma once

#include "../attend/fragments.cuh"
#include "../common/codes.cuh"
#include "latent.h"

namespace hf_kvquant::cuda {

constexpr int kLatentWarps = kLatentThreads / kLanes, kLatentTokens = kLatentTileTokens;
static_assert(kLatentTokens == 16 * kLatentWarps);

// A tile is 64 tokens: rows of codes of the latent, each with the rope part behind it, and then the planes of scales.
// Rows are an odd multiple of 16 bytes apart, so `ldmatrix`, which takes 16 bytes of eight rows, meets no bank
// conflict.
//
// The query is multiplied in blocks of 32 channels. Integer codes are bytes and so is the query, in two parts: 128 ·
// high + low. For e4m3 both are float16 numbers. Dense rope parts and their queries stay as they are, of the query's
// dtype. Either way a block of a query row has 64 bytes, 16 for each of the four lanes that share a row of the product;
// even and odd rows lie in different halves of 128 bytes (query_place).
template <Storage kLatent_, Storage kRope_, int kRank_, int kColumnTiles_>
struct LatentShape {
  static constexpr Storage kLatent = kLatent_, kRope = kRope_;
  static constexpr int kRank = kRank_, kColumnTiles = kColumnTiles_;  // of eight query rows
  static constexpr int kRows = 8 * kColumnTiles;
  static constexpr bool kHasZero = bits_of(kLatent) < 8;
  static constexpr int kGroups = kHasZero ? kRank / kLatentGroup : 1;
  static constexpr bool kHasDenseRope = kRope == Storage::none;
  static_assert(kRope == Storage::int8 || kHasDenseRope);

  static constexpr int kLatentBytes = kRank * bits_of(kLatent) / 8;  // of a row
  static constexpr int kRopeBytes = kRopeChannels * (kHasDenseRope ? 2 : 1);
  static constexpr int kPitch = kLatentBytes + kRopeBytes + 16;
  static_assert(kPitch % 32 == 16);
  // Scales, zeros, scales of rope parts.
  static constexpr int kNumPlanes = kGroups * (kHasZero ? 2 : 1) + (kHasDenseRope ? 0 : 1);
  static constexpr int kPlanesAt = kLatentTokens * kPitch;
  static constexpr int kStageBytes = kPlanesAt + kNumPlanes * kLatentTokens * 2;

  // Behind the stages: the query; sums of it, of each group and of the rope part; the weights of a tile; the largest
  // score of each warp. With one group, weights take the place of rope parts, which their warp does not need any more.
  static constexpr int kQueryPitch = 2 * (kRank + kRopeChannels);
  static constexpr int kQueryBytes = kRows * kQueryPitch;
  static constexpr int kSumsBytes = (kGroups + 1) * kRows * 4;
  static constexpr bool kHasWeightsInTile = kGroups == 1;
  static constexpr int kWeightsPitch = kHasWeightsInTile ? kPitch : 2 * kRows;
  static constexpr int kWeightsBytes = kHasWeightsInTile ? 0 : kGroups * kLatentTokens * kWeightsPitch;
  static constexpr int kMaximaBytes = kLatentWarps * kRows * 4;
  static constexpr int kOtherBytes = kQueryBytes + kSumsBytes + kWeightsBytes + kMaximaBytes;
  // Two thread blocks share a multiprocessor, so that one multiplies while the other waits.
  static constexpr int kMostBytes = 113 * 1024;
  static constexpr int kMostStages = (kMostBytes - kOtherBytes) / kStageBytes;
  static constexpr int kStages = kMostStages > 4 ? 4 : kMostStages;
  static_assert(kStages >= 2);
  static constexpr int kQueryAt = kStages * kStageBytes;
  static constexpr int kSumsAt = kQueryAt + kQueryBytes;
  static constexpr int kWeightsAt = kSumsAt + kSumsBytes;
  static constexpr int kMaximaAt = kWeightsAt + kWeightsBytes;
  static constexpr int kSharedBytes = kMaximaAt + kMaximaBytes;
  static_assert(kSharedBytes <= kMostBytes);
  static_assert(kQueryAt % 128 == 0 && kQueryPitch % 128 == 0 && kWeightsAt % 16 == 0);

  // Values: channels of a warp, in output tiles of 16.
  static constexpr int kWarpChannels = kRank / kLatentWarps;
  static constexpr int kOutputTiles = kWarpChannels / 16;
  static constexpr int kLoads = kLatentBytes / kLatentWarps / 32;  // of two chunks

  // The channel of row g (`i` 0) or g + 8 (1) of output tile j, among the warp's: a pair of bytes has two channels, or
  // four, which are the rows of two tiles.
  static __device__ __forceinline__ int channel(int g, int j, int i) {
    return kHasZero ? j / 2 * 32 + 4 * g + j % 2 * 2 + i : 16 * j + 2 * g + i;
  }
};

// The place of block `block` in a row of the query, and of word `word` of lane t there.
__device__ __forceinline__ int query_place(int row, int block, int t, int word) {
  return ((block ^ (row & 1)) << 6) + (t << 4) + 4 * word;
}

// The place of a token's weights for the eight query rows of a column tile, in the tile or behind the stages, where
// they are permuted so that eight tokens meet no bank conflict.
template <class Shape>
__device__ __forceinline__ int weights_place(int token, int tile) {
  if constexpr (Shape::kHasWeightsInTile) return token * Shape::kPitch + Shape::kLatentBytes + (tile << 4);
  const int shift = Shape::kColumnTiles == 4 ? token >> 1 & 3 : Shape::kColumnTiles == 2 ? token >> 2 & 1 : 0;
  return token * Shape::kWeightsPitch + ((tile ^ shift) << 4);
}

__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}

// --- 16-bit numbers

// A number of a dtype other than fp32, from the low bits.
__device__ __forceinline__ float float_of(uint32_t bits, Dtype dtype) {
  return dtype == Dtype::fp16 ? half_to_float(static_cast<half_bits>(bits)) : __uint_as_float(bits << 16);
}

template <int kNumbers>
__device__ __forceinline__ void floats_of(const uint32_t (&words)[kNumbers / 2], Dtype dtype, float (&x)[kNumbers]) {
  for_all<kNumbers>([&](int i) { x[i] = float_of(words[i / 2] >> (16 * (i % 2)) & 0xffffu, dtype); });
}

// Loads neighbouring 16-bit numbers as words, all at once if they begin at a multiple of 16 bytes, or of 8 if they are
// four. Kernels load everything that they wait for together and look at dtypes afterwards. Behind a branch for each,
// loads came one after the other: 1 x 8k took 23 us instead of 21, and dense tokens 37 of 64 x 8k instead of 9 (H200).
template <bool kIsAligned, int kWords>
__device__ __forceinline__ void load_words(const uint16_t* from, uint32_t (&words)[kWords]) {
  if constexpr (!kIsAligned) {
    for_all<kWords>([&](int i) { words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16; });
  } else if constexpr (kWords == 2) {
    const uint2 word = *reinterpret_cast<const uint2*>(from);
    words[0] = word.x, words[1] = word.y;
  } else {
    static_assert(kWords % 4 == 0);
    for_all<kWords / 4>([&](int i) {
      const uint4 word = reinterpret_cast<const uint4*>(from)[i];
      words[4 * i] = word.x, words[4 * i + 1] = word.y, words[4 * i + 2] = word.z, words[4 * i + 3] = word.w;
    });
  }
}

// Whether every row of a query begins at a multiple of 16 bytes.
__device__ __forceinline__ bool has_aligned_rows(const Dense& query) {
  return ((query.stride_b | query.stride_h | query.stride_t) % 8 | reinterpret_cast<int64_t>(query.data) % 16) == 0;
}

// --- operands

// Two bytes of e4m3 of a word as float16 numbers.
__device__ __forceinline__ uint32_t low_halves(uint32_t x) { return halves_of_e4m3(x & 0xffffu); }
__device__ __forceinline__ uint32_t high_halves(uint32_t x) { return halves_of_e4m3(x >> 16); }

// The unit of rows g (`i` 0) and g + 8 (1) of an output tile: see for_value_operands.
template <Storage kStorage>
__device__ __forceinline__ constexpr float unit_of_latent(int i) {
  return bits_of(kStorage) == 8 ? 1.f : unit_of_place(4 * i);
}

}  // namespace hf_kvquant::cuda
