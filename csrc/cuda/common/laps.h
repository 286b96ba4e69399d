// Finds where a token is in the planes, like place_of in format.h. It avoids the division there, which takes longer than
// most of what kernels do before they copy. The arithmetic is the same on the host.
#pragma once

#include <cstdint>

#include "../../format.h"

#ifdef __CUDACC__
#define KVQ_BOTH __host__ __device__ __forceinline__
#else
#define KVQ_BOTH inline
#endif

namespace hf_kvquant::cuda {

#ifdef __CUDACC__
// Loads numbers that thread blocks wait for before they can copy anything. Codes that stream through the L2 cache must
// not evict them between two thread blocks that need the same line.
__device__ __forceinline__ uint64_t keeping_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ int load_kept(const int32_t* at) {
  int x;
  asm volatile("ld.global.L2::cache_hint.s32 %0, [%1], %2;" : "=r"(x) : "l"(at), "l"(keeping_policy()) : "memory");
  return x;
}

__device__ __forceinline__ int4 load_kept(const int4* at) {
  int4 x;
  asm volatile("ld.global.L2::cache_hint.v4.s32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at), "l"(keeping_policy())
               : "memory");
  return x;
}
#endif

// Tokens go through the rows of a ring in laps. With pages, every lap is in another page. Other planes have a single lap
// without end.
struct Laps {
  int num_rows;         // of a lap, a multiple of kBlockSize; INT32_MAX for a single lap
  unsigned reciprocal;  // ⌈2²³⁺ˢ / blocks of a lap⌉, s being `shift`; 0 for a single lap
  int shift;            // ⌈log2 of the blocks of a lap⌉
  const int32_t* pages;  // of the laps of a sequence; the next sequence is page_stride further; nullptr: none
  int page_stride, num_pages;
  const int32_t* tail_columns;  // CacheParams::tail_columns
  int num_tails;

  // The number of the lap that a position is in; exact below kMaxRingLength, that is, 2²³ blocks.
  KVQ_BOTH int number(int position) const {
    // 2⁹ times the number of the position's block: below 2³².
    const uint32_t block = static_cast<uint32_t>(position) / kBlockSize << 9;
#ifdef __CUDA_ARCH__
    const uint32_t product = __umulhi(block, reciprocal);
#else
    const uint32_t product = static_cast<uint32_t>(uint64_t{block} * reciprocal >> 32);
#endif
    return static_cast<int>(product >> shift);
  }

  // The first position of that lap.
  KVQ_BOTH int begin(int position) const { return number(position) * num_rows; }

  KVQ_BOTH int row(int position) const { return position - begin(position); }

#ifdef __CUDACC__
  // The index of the first axis of the planes.
  __device__ __forceinline__ int slot(int b, int position) const { return slot_of(entry(b, position)); }

  // The same in two parts, a load and a check that waits for it. Nobody has checked the page table on a GPU, and no
  // page must be read outside of the planes.
  __device__ __forceinline__ int entry(int b, int position) const {
    return pages == nullptr ? b : load_kept(pages + int64_t{b} * page_stride + number(position));
  }
  __device__ __forceinline__ int slot_of(int entry) const {
    return pages == nullptr ? entry : checked(entry, num_pages);
  }

  // The same for a tail.
  __device__ __forceinline__ int tail_slot(int b) const {
    return tail_columns == nullptr ? b : checked(load_kept(tail_columns + int64_t{b} * page_stride), num_tails);
  }

  // The first token that this tail may have, of `length` tokens: whole blocks.
  __device__ __forceinline__ int tail_from(int b, int length) const {
    if (tail_columns == nullptr) return 0;
    const int first = load_kept(tail_columns + int64_t{b} * page_stride + 1);
    return max(min(first, length), 0) / kBlockSize * kBlockSize;
  }

 private:
  static __device__ __forceinline__ int checked(int number, int count) {
    return static_cast<unsigned>(number) < static_cast<unsigned>(count) ? number : 0;
  }
#endif
};

inline Laps laps_of(const CacheParams& params) {
  const bool is_paged = params.page_table != nullptr;
  if (!params.is_ring && !is_paged) return {INT32_MAX, 0, 0, nullptr, 0, 0, nullptr, 0};
  const int num_rows = is_paged ? params.page_rows : params.capacity;
  const auto num_blocks = static_cast<uint32_t>(num_rows) / kBlockSize;
  int shift = 0;
  while (uint64_t{1} << shift < num_blocks) ++shift;
  const uint64_t unit = uint64_t{1} << (23 + shift);
  return {num_rows,         static_cast<unsigned>((unit + num_blocks - 1) / num_blocks), shift, params.page_table,
          params.page_table_stride, params.num_pages, params.tail_columns, params.num_tails};
}

// The most tokens of a sequence that there is room for. Kernels skip tokens beyond it.
KVQ_BOTH int max_length_of(const CacheParams& params) { return params.is_ring ? kMaxRingLength : params.capacity; }

}  // namespace hf_kvquant::cuda

#undef KVQ_BOTH
