// Finds the row of a token in the planes: its position or, in a ring, position mod capacity, like row_of in format.h.
// It avoids the division of row_of, which takes longer than most of what kernels do before they copy. The arithmetic is
// the same on the host.
#pragma once

#include <cstdint>

#include "../../format.h"

#ifdef __CUDACC__
#define KVQ_BOTH __host__ __device__ __forceinline__
#else
#define KVQ_BOTH inline
#endif

namespace hf_kvquant::cuda {

// Tokens go through the rows of a ring in laps. Other planes have a single lap without end.
struct Laps {
  int num_rows;         // of a lap, a multiple of kBlockSize; INT32_MAX for a single lap
  unsigned reciprocal;  // ⌈2²³⁺ˢ / blocks of a lap⌉, s being `shift`; 0 for a single lap
  int shift;            // ⌈log2 of the blocks of a lap⌉

  // The first position of the lap that a position is in; exact below kMaxRingLength, that is, 2²³ blocks.
  KVQ_BOTH int begin(int position) const {
    // 2⁹ times the number of the position's block: below 2³².
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

// The laps of planes with `capacity` rows.
inline Laps laps_of(int capacity, bool is_ring) {
  if (!is_ring) return {INT32_MAX, 0, 0};
  const auto num_blocks = static_cast<uint32_t>(capacity) / kBlockSize;
  int shift = 0;
  while (uint64_t{1} << shift < num_blocks) ++shift;
  const uint64_t unit = uint64_t{1} << (23 + shift);
  return {capacity, static_cast<unsigned>((unit + num_blocks - 1) / num_blocks), shift};
}

// The most tokens of a sequence that there is room for. Kernels skip tokens beyond it.
KVQ_BOTH int max_length_of(int capacity, bool is_ring) { return is_ring ? kMaxRingLength : capacity; }

}  // namespace hf_kvquant::cuda

#undef KVQ_BOTH
