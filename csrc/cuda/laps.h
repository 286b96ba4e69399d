// In which rows of the planes tokens are: that of their position or, where the planes are a ring, position mod
// capacity, as row_of in format.h has it. Kernels ask here, since a division takes longer than most of what they do
// before they copy. Plain arithmetic, the same on the host.
#pragma once

#include <cstdint>

#include "../format.h"

#ifdef __CUDACC__
#define KVQ_BOTH __host__ __device__ __forceinline__
#else
#define KVQ_BOTH inline
#endif

namespace hf_kvquant::cuda {

// Tokens take the rows of a ring again and again, in laps. Other planes have one lap, which does not end.
struct Laps {
  int num_rows;         // of a lap, a multiple of kBlockSize; INT32_MAX where there is one
  unsigned reciprocal;  // ⌈2²³⁺ˢ / blocks of a lap⌉, s being `shift`; 0 where there is one
  int shift;            // ⌈log2 of the blocks of a lap⌉

  // The first position of the lap that a position is in; exact below kMaxRingLength, that is, 2²³ blocks.
  KVQ_BOTH int begin(int position) const {
    // 2⁹ times the number of its block: below 2³².
    const uint32_t block = static_cast<uint32_t>(position) / kBlockSize << 9;
#ifdef __CUDA_ARCH__
    const uint32_t product = __umulhi(block, reciprocal);
#else
    const uint32_t product = static_cast<uint32_t>(uint64_t{block} * reciprocal >> 32);
#endif
    return static_cast<int>(product >> shift) * num_rows;
  }

  KVQ_BOTH int row(int position) const { return position - begin(position); }
};

KVQ_BOTH Laps one_lap() { return {INT32_MAX, 0, 0}; }

// The laps of planes with so many rows.
inline Laps laps_of(int capacity, bool is_ring) {
  if (!is_ring) return one_lap();
  const auto num_blocks = static_cast<uint32_t>(capacity) / kBlockSize;
  int shift = 0;
  while (uint64_t{1} << shift < num_blocks) ++shift;
  const uint64_t unit = uint64_t{1} << (23 + shift);
  return {capacity, static_cast<unsigned>((unit + num_blocks - 1) / num_blocks), shift};
}

// What lengths say beyond is left out: there is no room for it.
KVQ_BOTH int max_length_of(int capacity, bool is_ring) { return is_ring ? kMaxRingLength : capacity; }

// New tokens whose rows follow each other: those of a chunk that are in one lap. Tokens are counted in the chunk.
struct NewRows {
  int begin, end;   // those of this lap that there is room for
  int end_of_room;  // of those in all laps
  int first;        // the row of token 0, if it were of this lap

  // Of the `q_len` tokens that a sequence of `length` ends with, in the lap of token `token`.
  KVQ_BOTH NewRows(const Laps& laps, int max_length, int length, int q_len, int token) {
    length = length > 0 ? length : 0;
    const int before = length - q_len;  // position of the first; negative if there are too many
    const int position = before + token > 0 ? before + token : 0;
    const int lap = laps.begin(position < kMaxRingLength ? position : kMaxRingLength - 1);
    const int without_room = length > max_length ? length - max_length : 0;
    const int beyond = length - lap > laps.num_rows ? length - lap - laps.num_rows : 0;
    begin = before < 0 ? -before : 0;
    end_of_room = q_len - without_room;
    end = beyond > without_room ? q_len - beyond : end_of_room;
    first = before - lap;
  }

  // When tokens before `next` have been taken: goes to the next lap if they end this one. Returns whether some of them
  // are there.
  KVQ_BOTH bool go_on(const Laps& laps, int next) {
    if (end > next || end >= end_of_room) return false;
    const bool is_cut = end < next;
    begin = end;
    first -= laps.num_rows;
    end = end_of_room - end > laps.num_rows ? end + laps.num_rows : end_of_room;
    return is_cut;
  }
};

}  // namespace hf_kvquant::cuda

#undef KVQ_BOTH
