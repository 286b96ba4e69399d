// Instructions of compute capability 9.0 alone that the chunk kernel uses: products of a warpgroup (four warps), and
// registers that move between warpgroups. Layouts are as in the PTX manual ("Asynchronous warpgroup-level matrix
// instructions"). bulk.cuh has the copies and barriers that later GPUs have, too.
//
// A result of 64 rows by N columns is in N / 2 registers: warp w of the warpgroup has rows 16w ... 16w + 15, and lane
// (g, t) of it, in register 4j + 2i + k, row g + 8i and column 8j + 2t + k.
#pragma once

#include <cstdint>

#include "../../common/bulk.cuh"
#include "../../common/instructions.cuh"

// Code for sm_90a, the only target that has these instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVQ_HAS_WGMMA 1
#endif

namespace hf_kvquant::cuda {

constexpr int kWarpgroup = 4 * kLanes;

// --- matrices in shared memory

// Matrices lie in blocks of 64 channels: a row of a block is a line of 128 bytes, and its eight units of 16 bytes are
// swapped by the row's number, so that neither rows nor columns meet bank conflicts. Blocks start at multiples of 1,024
// bytes.
constexpr int kLineBytes = 128, kSwizzleBytes = 1024;

// Where 16-byte unit `unit` (eight channels) of a row is, in a matrix of `num_rows` rows.
__device__ __forceinline__ constexpr int unit_at(int num_rows, int row, int unit) {
  return (unit >> 3) * num_rows * kLineBytes + row * kLineBytes + (((unit & 7) ^ (row & 7)) << 4);
}

// The lower half of a matrix's description; the upper half, KVQ_SWIZZLED, is the same for all. Adding n moves the
// matrix by 16 · n bytes. Channels are summed over ...
__device__ __forceinline__ uint32_t describe(uint32_t address) { return (address & 0x3ffff) >> 4 | 1u << 16; }

// ... or tokens are, and then blocks of 64 channels are `block_bytes` apart.
__device__ __forceinline__ uint32_t describe_transposed(uint32_t address, int block_bytes) {
  return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(block_bytes / 16) << 16;
}

// --- products

#if KVQ_HAS_WGMMA
#define KVQ_ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVQ_ACC16(d, i) KVQ_ACC4(d, i), KVQ_ACC4(d, i + 4), KVQ_ACC4(d, i + 8), KVQ_ACC4(d, i + 12)
#define KVQ_ACC32(d) KVQ_ACC16(d, 0), KVQ_ACC16(d, 16)
#define KVQ_LIST16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define KVQ_ACC64(d) KVQ_ACC16(d, 0), KVQ_ACC16(d, 16), KVQ_ACC16(d, 32), KVQ_ACC16(d, 48)
#define KVQ_LIST32                                                                   \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
  "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
// Lines are swizzled (1 in the highest two bits), and groups of eight are 64 units of 16 bytes apart.
#define KVQ_SWIZZLED "0x40000040"
#define KVQ_LIST64                                                                                \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"              \
  "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44," \
  "%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#endif

// d = a · bᵀ, or d += a · bᵀ if `adds`, over 16 channels; a and b are described. N is two times the registers.
__device__ __forceinline__ void multiply(float (&d)[64], uint32_t a, uint32_t b, int adds) {
#if KVQ_HAS_WGMMA
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;\n"
               "mov.b64 a, {%64, " KVQ_SWIZZLED "}; mov.b64 b, {%65, " KVQ_SWIZZLED "};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " KVQ_LIST64 ", a, b, p, 1, 1, 0, 0;}"
               : KVQ_ACC64(d)
               : "r"(a), "r"(b), "r"(adds));
#endif
}

__device__ __forceinline__ void multiply(float (&d)[32], uint32_t a, uint32_t b, int adds) {
#if KVQ_HAS_WGMMA
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0;\n"
               "mov.b64 a, {%32, " KVQ_SWIZZLED "}; mov.b64 b, {%33, " KVQ_SWIZZLED "};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " KVQ_LIST32 ", a, b, p, 1, 1, 0, 0;}"
               : KVQ_ACC32(d)
               : "r"(a), "r"(b), "r"(adds));
#endif
}

__device__ __forceinline__ void multiply(float (&d)[16], uint32_t a, uint32_t b, int adds) {
#if KVQ_HAS_WGMMA
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0;\n"
               "mov.b64 a, {%16, " KVQ_SWIZZLED "}; mov.b64 b, {%17, " KVQ_SWIZZLED "};\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " KVQ_LIST16 ", a, b, p, 1, 1, 0, 0;}"
               : KVQ_ACC16(d, 0)
               : "r"(a), "r"(b), "r"(adds));
#endif
}

// d += a · b over 16 tokens; a is in registers, b described as transposed.
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[4], uint32_t b) {
#if KVQ_HAS_WGMMA
  asm volatile("{.reg .b64 b; mov.b64 b, {%68, " KVQ_SWIZZLED "};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " KVQ_LIST64
               ", {%64,%65,%66,%67}, b, 1, 1, 1, 1;}"
               : KVQ_ACC64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
}

__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
#if KVQ_HAS_WGMMA
  asm volatile("{.reg .b64 b; mov.b64 b, {%36, " KVQ_SWIZZLED "};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " KVQ_LIST32 ", {%32,%33,%34,%35}, b, 1, 1, 1, 1;}"
               : KVQ_ACC32(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
#endif
}

// Before the first product of a group: registers and shared memory that it reads are written.
__device__ __forceinline__ void start_products() {
#if KVQ_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void commit_products() {
#if KVQ_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
#if KVQ_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// The compiler does not know that products write registers until they are waited for. This keeps every use of `x` on
// its side of the wait.
template <class T, int kCount>
__device__ __forceinline__ void pin(T (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(x[0]) > 4) {
      pin(x[i]);
    } else if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(x[i])::"memory");
    } else {
      asm volatile("" : "+r"(x[i])::"memory");
    }
  }
}

// Shared memory that this thread has written may be read by products once a barrier is passed.
__device__ __forceinline__ void show_to_products() { show_shared_to_copies(); }

// --- barriers

// Waits for `kThreads` threads of the thread block; barrier 0 is used by __syncthreads.
template <int kNumber, int kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// The same with a number that is known only at run time.
template <int kThreads>
__device__ __forceinline__ void meet(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// Counts this thread for such a barrier, without waiting.
template <int kThreads>
__device__ __forceinline__ void pass(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// Gives registers to, or takes them from, the threads of a warpgroup.
template <int kRegisters, bool kIsMore>
__device__ __forceinline__ void set_registers() {
#if KVQ_HAS_WGMMA
  if constexpr (kIsMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
#endif
}

}  // namespace hf_kvquant::cuda
