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

// The laps of planes with so many rows.
inline Laps laps_of(int capacity, bool is_ring) {
  if (!is_ring) return {INT32_MAX, 0, 0};
  const auto num_blocks = static_cast<uint32_t>(capacity) / kBlockSize;
  int shift = 0;
  while (uint64_t{1} << shift < num_blocks) ++shift;
  const uint64_t unit = uint64_t{1} << (23 + shift);
  return {capacity, static_cast<unsigned>((unit + num_blocks - 1) / num_blocks), shift};
}

// What lengths say beyond is left out: there is no room for it.
KVQ_BOTH int max_length_of(int capacity, bool is_ring) { return is_ring ? kMaxRingLength : capacity; }

}  // namespace hf_kvquant::cuda

#undef KVQ_BOTH
