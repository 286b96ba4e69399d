// How rows of codes lie in shared memory and become operands of the tensor cores. Rows need no special packing:
// channels only have to agree between keys and query, so the query is permuted once, and the output is put back in
// order at the end.
//
// Scores are S[token, query] = K · Qᵀ: keys are the A operand. Integer keys stay bytes: u8 codes times a 16-bit query,
// split into a high and a low s8 byte, are exact and need no unpacking for int8, and one mask for each code of a byte for
// int4 and int2 (all codes stay in place, so high ones count 4, 16 or 64 times). e4m3 keys and keys in groups or blocks
// become float16. The output is Oᵀ[channel, query] = Vᵀ · Pᵀ. Value codes become float16: bytes by a permutation that
// puts them behind an exponent, and an addition; smaller ones by a mask, as subnormal numbers.
//
// A step is kTiles tiles of 16 tokens. Lane row g of a tile's half h (rows 8h + g) holds token
//     2 · kTiles · slot_of_row(g) + b,    b = 2 · tile + h,
// so that the scales of a lane's tokens are neighbours in memory. The row of that token in shared memory is b · 8 +
// slot, with its 16-byte chunks permuted (`RowLayout`) so that neither copies nor loads meet bank conflicts
// (layout_check.cu).
#pragma once

#include <cuda_fp8.h>

#include "../../format.h"
#include "../common/instructions.cuh"

namespace hf_kvquant::cuda {

// The place of lane row g among the eight tokens of a half tile. Even rows are consecutive, so that the four lanes that
// load values of rows 2t read neighbouring ones. An even row and the next odd one differ in parity and in bit 1.
__host__ __device__ constexpr int slot_of_row(int g) { return g & 1 ? 4 + ((g >> 1) ^ 3) : g >> 1; }

// Rows of kRowBytes (32, 64, 128, 256 or 512) in shared memory. Rows 8 apart share banks. Where several rows fit into a
// line of 128 bytes, the slot is shifted so that neighbours in a copy (same slot, consecutive b) are in different parts
// of the line.
//
// Addresses are cheap because of how the permutations combine: the lane's part (its slot, its chunk) and the part known
// at compile time (b, the number of a load or copy) meet in an exclusive or. So `offset` of both is (offset of the
// lane's part ^ flip) + step, with constants `flip` and `step`.
template <int kRowBytes>
struct RowLayout {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kShift = kRowBytes == 32 ? 3 : kRowBytes == 64 ? 1 : 0;

  static __host__ __device__ constexpr int row(int slot, int b) { return b * 8 + (slot ^ (b & kShift)); }
  static __host__ __device__ constexpr int swizzle(int row) {
    return ((row >> 2) & 1) | (kRowBytes == 32 ? 0 : kRowBytes == 64 ? row & 2 : (row & 3) << 1);
  }
  // The place of byte `byte` of the token at (slot, b).
  static __host__ __device__ constexpr int offset(int slot, int b, int byte) {
    return row(slot, b) * kRowBytes + ((((byte >> 4) ^ swizzle(row(slot, b))) << 4) | (byte & 15));
  }

  // The same for half tile b and `further` bytes on, from the offset of a lane's (slot, 0, byte). `further` is a
  // multiple of 16 whose bits are not set in the lane's byte.
  static __host__ __device__ constexpr uint32_t at(uint32_t lane_offset, int b, int further) {
    return (lane_offset ^ static_cast<uint32_t>((b & kShift) * kRowBytes | further)) + b * 8 * kRowBytes;
  }

  // The place of 16-byte chunk `i * kLanes + lane` of a step's rows in token order, from the place of chunk `lane`.
  template <int kHalves>
  static __host__ __device__ constexpr uint32_t copied_at(uint32_t lane_offset, int i) {
    constexpr int kFlipped = kShift * kRowBytes | (kRowBytes - 1);
    const int token = i * kLanes / kChunks, first = offset(token / kHalves, token % kHalves, 0);
    return (lane_offset ^ static_cast<uint32_t>(first & kFlipped)) + (first & ~kFlipped);
  }
};

// --- keys
// -------------------------------------------------------------------------------------------------------------

// Where lane t finds the words (4 bytes) of its share of a row, for keys without groups. The lanes of a row have equal
// shares.
template <int kRowBytes>
struct KeyWords {
  static constexpr int kWords = kRowBytes / 16;                // per lane and row
  static constexpr int kLoadBytes = kRowBytes == 32 ? 8 : 16;  // per load
  static constexpr int kWordsPerLoad = kLoadBytes / 4;
  static constexpr int kLoads = kWords / kWordsPerLoad;

  static __host__ __device__ constexpr int load_byte(int t, int load) { return load * 4 * kLoadBytes + t * kLoadBytes; }
  static __device__ __forceinline__ int word_byte(int t, int word) {
    return load_byte(t, word / kWordsPerLoad) + word % kWordsPerLoad * 4;
  }
};

// --- values
// -----------------------------------------------------------------------------------------------------------

// How value rows become operands. A load takes two chunks of 16 bytes of a tile's 16 tokens, as four matrices of 8
// tokens by 8 pairs of bytes, transposed: lane row g receives pair g of tokens 2t and 2t + 1. In output tile j, rows g
// and g + 8 of a lane are channels `channel(g, j)` and the next one.
template <Storage kStorage, int kRowBytes>
struct ValueWords {
  static constexpr int kTilesPerChunk = 8 / bits_of(kStorage);
  static constexpr int kChunks = kRowBytes / 16, kLoads = kChunks / 2;
  static constexpr int kTiles = kChunks * kTilesPerChunk;  // of 16 channels

  static __device__ __forceinline__ int channel(int g, int j) {
    return j / kTilesPerChunk * 16 * kTilesPerChunk + g * 2 * kTilesPerChunk + j % kTilesPerChunk * 2;
  }
};

// The matrix row whose address lane l passes: chunk l / 16 of token row l % 8 in half tile l / 8 % 2.
template <int kRowBytes>
__host__ __device__ constexpr uint32_t matrix_row(int lane) {
  return RowLayout<kRowBytes>::offset(slot_of_row(lane & 7), lane >> 3 & 1, lane >> 4 << 4);
}

// The same for 16-bit numbers: row l % 8 of half tile `half`, chunk `chunk` of two.
template <int kRowBytes>
__host__ __device__ constexpr uint32_t plain_matrix_row(int lane, int half, int chunk) {
  return RowLayout<kRowBytes>::offset(lane & 7, half, chunk << 4);
}

// a + b in float16, both halves.
__device__ __forceinline__ uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// a · b in float16, both halves.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The two e4m3 codes in the lower half of a word, as float16 numbers.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return static_cast<uint32_t>(halves.x) | static_cast<uint32_t>(halves.y) << 16;
#else
  // By hand, since the header decodes number by number, with branches. The bits form a float16 number 2^8 times
  // smaller, subnormals included. NaN, which is never stored as a code, becomes 480.
  const uint32_t high = __byte_perm(pair, 0, 0x1404);
  return multiply_halves((high & 0x80008000u) | (high & 0x7f007f00u) >> 1, 0x5c005c00u);
#endif
}

// A code in the lowest bits of a float16 is a subnormal number, this many times smaller than the code: one mask unpacks
// two codes.
constexpr float kLowNibbleUnit = 0x1p24f;
constexpr uint32_t kLowNibbles = 0x000f000fu, kHighNibbles = 0x00f000f0u;

// The same for a code of int4 or int2 that begins at bit `place`.
__device__ __forceinline__ constexpr float unit_of_place(int place) {
  return kLowNibbleUnit / static_cast<float>(1 << place);
}
__device__ __forceinline__ constexpr uint32_t mask_of_place(Storage storage, int place) {
  return ((1u << bits_of(storage)) - 1) * 0x00010001u << place;
}

// The code that is subtracted from int4 and int2 codes.
__device__ __forceinline__ constexpr float middle_code(Storage storage) {
  return static_cast<float>(1 << (bits_of(storage) - 1));
}

// The bit of an operand at which code `i` of a byte of values begins.
//
// Tensor cores align products by their exponents and drop what is too far below, and to them a subnormal number has the
// exponent of 2^-14: the lower its bits, the more is lost. Over 131,072 tokens the lowest two bits had 6 times the error
// of the next two (H200), so code 0 of int2 is used where it is in the upper byte.
__device__ __forceinline__ constexpr int place_of_value(Storage storage, int i) {
  return storage == Storage::int2 && i == 0 ? 8 : i * bits_of(storage);
}

// The A operands of one chunk, tokens 2t and 2t + 1 of half tile 0 (`e`) and 1 (`f`): | second: 2 bytes | first: 2 |.
// `use(index, a0, a1, a2, a3)` is called for one output tile after the other.
//
// Bytes come out exact and centred, code - 128. Smaller codes come out as they are, in the units of `unit_of_output`.
// So what has to be subtracted from sums is small. With masks alone, bytes would have an offset of 64 or 1024 and large
// sums. Tensor cores truncate their sums, and losing half a unit in the last place again and again is a bias that shows
// in long sequences.
template <Storage kStorage, class Use>
__device__ __forceinline__ void for_value_operands(uint32_t e, uint32_t f, Use use) {
  if constexpr (bits_of(kStorage) < 8) {
    constexpr int kPairs = ValueWords<kStorage, 32>::kTilesPerChunk / 2;  // of codes in a byte
    constexpr bool kIsSwapped = kStorage == Storage::int2;
    const auto other = [](uint32_t x) { return kIsSwapped ? __byte_perm(x, 0, 0x2301) : x >> 8; };
    const uint32_t e_from[2] = {e, other(e)}, f_from[2] = {f, other(f)};
    for_all<2, kPairs>([&](int byte, int i) {
      const auto code = [&](const uint32_t (&from)[2], int i) {
        return from[byte ^ (kIsSwapped && i == 0)] & mask_of_place(kStorage, place_of_value(kStorage, i));
      };
      const int first = 2 * i, second = first + 1;
      use(kPairs * byte + i, code(e_from, first), code(e_from, second), code(f_from, first), code(f_from, second));
    });
  } else if constexpr (kStorage == Storage::int8) {
    // A byte behind the exponent of 1024 is 1024 + code.
    constexpr uint32_t k1024 = 0x64646464u, kMinus1152 = 0xe480e480u;
    const auto signed_code = [](uint32_t x, uint32_t bytes) {
      return add_halves(__byte_perm(x, k1024, bytes), kMinus1152);
    };
    use(0, signed_code(e, 0x4240), signed_code(e, 0x4341), signed_code(f, 0x4240), signed_code(f, 0x4341));
  } else {
    const auto halves = [](uint32_t x, uint32_t bytes) { return halves_of_e4m3(__byte_perm(x, 0, bytes)); };
    use(0, halves(e, 0x4420), halves(e, 0x4431), halves(f, 0x4420), halves(f, 0x4431));
  }
}

// The unit of output tile j of int4 or int2 values, in rows g (`i` 0) and g + 8 (1).
template <Storage kStorage>
__device__ __forceinline__ constexpr float unit_of_output(int j, int i) {
  return unit_of_place(place_of_value(kStorage, (2 * j + i) % (8 / bits_of(kStorage))));
}

}  // namespace hf_kvquant::cuda
