// Copies of many bytes between memory and shared memory that one thread starts and no thread carries out, and the
// barriers that tell of their ends (compute capability 9.0 and later). As in the PTX manual: "mbarrier",
// "cp.async.bulk", "Async proxy".
#pragma once

#include <cstdint>

#include "instructions.cuh"

namespace hf_kvquant::cuda {

// A barrier in shared memory: it completes a phase each time `count` threads have arrived.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count) : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("{.reg .b64 old; mbarrier.arrive.shared::cta.b64 old, [%0];}" ::"r"(shared_address(&state))
                 : "memory");
  }

  // The same, and the phase also waits until `num_bytes` bytes are copied.
  __device__ __forceinline__ void arrive_and_expect(int num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b64 old; mbarrier.arrive.expect_tx.shared::cta.b64 old, [%0], %1;}" ::"r"(
                     shared_address(&state)),
                 "r"(num_bytes)
                 : "memory");
#endif
  }

  // Waits for the end of phase `number`; phase -1 ended before the first.
  __device__ __forceinline__ void wait(int number) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(&state)),
        "r"(number & 1)
        : "memory");
#endif
  }
};

// Copies from memory to shared memory, both aligned to 16 bytes. The end counts for a barrier that expects it.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int num_bytes, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(num_bytes), "r"(shared_address(&barrier.state))
               : "memory");
#endif
}

// Copies from shared memory to memory, both aligned to 16 bytes.
__device__ __forceinline__ void store_bulk(void* to, const void* from, int num_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(num_bytes)
               : "memory");
#endif
}

// Such copies begin at the latest here, ...
__device__ __forceinline__ void commit_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// ... and here they have read shared memory, as they must before a thread block ends. The next launch sees them.
__device__ __forceinline__ void wait_for_bulk_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// What earlier launches wrote to memory may be read by copy_bulk.
__device__ __forceinline__ void show_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Shared memory that this thread has written, barriers included, may be used by copies once threads have met.
__device__ __forceinline__ void show_shared_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace hf_kvquant::cuda
