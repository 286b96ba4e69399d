// The machine instructions of the attention kernels, one thin function each, with the layouts of the PTX manual
// ("Matrix Fragments for mma.m16n8k16", "mma.m16n8k32", "movmatrix", "cp.async"). fragments.cuh decides what they
// multiply.
//
// A lane is called (g, t) with g = lane / 4 and t = lane % 4. An A operand has 16 rows: registers 0 and 2 belong to row
// g, 1 and 3 to row g + 8. A B operand is column g. In a result, registers 0 and 1 are row g, columns 2t and 2t + 1;
// registers 2 and 3 are row g + 8.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace hf_kvquant::cuda {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Calls `use(i, j, ...)` for all i < kCount, j < kCounts ..., the last index counting fastest. All of it is unrolled,
// so that arrays can stay in registers. Where this took more registers than loops with `#pragma unroll` (nvcc 13.0,
// sm_90), there are still such loops.
template <int kCount, int... kCounts, class Use>
__device__ __forceinline__ void for_all(Use use) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof...(kCounts) == 0) {
      use(i);
    } else {
      for_all<kCounts...>([&](auto... others) { use(i, others...); });
    }
  }
}

// c += a · b over 32 bytes: unsigned codes by signed query bytes, exact in 32-bit integers. Registers 0 and 1 of `a`
// hold bytes 4t .. 4t + 3, registers 2 and 3 bytes 4t + 16 .. 4t + 19, b0 and b1 alike.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a · b over 16 float16 numbers, summed in float32. Registers 0 and 1 of `a` hold numbers 2t and 2t + 1, registers
// 2 and 3 numbers 2t + 8 and 2t + 9, b0 and b1 alike.
__device__ __forceinline__ void multiply_halves(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with bfloat16 numbers.
__device__ __forceinline__ void multiply_bfloats(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                 uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a · b over 8 float16 numbers: registers 0 and 1 of `a` hold numbers 2t and 2t + 1 of rows g and g + 8.
__device__ __forceinline__ void multiply_halves(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Transposes an 8 × 8 matrix of 16-bit elements across the warp: lane (g, t) gives row g, columns 2t and 2t + 1, and
// receives rows 2t and 2t + 1 of column g.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Loads four 8 × 8 matrices of 16-bit elements from shared memory. Lane l passes the address of row l % 8 of matrix l /
// 8, 16 bytes, and receives row g, elements 2t and 2t + 1 of each; transposed: rows 2t and 2t + 1 of column g.
template <bool kIsTransposed>
__device__ __forceinline__ void load_matrices(uint32_t row, uint32_t (&x)[4]) {
  if constexpr (kIsTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two float32 to two float16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Two float32 to two bfloat16.
__device__ __forceinline__ uint32_t pack_bfloats(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// The lower (i = 0) or upper float16 number of two.
__device__ __forceinline__ float half_of(uint32_t pair, int i) {
  const __half2 halves = *reinterpret_cast<const __half2*>(&pair);
  return i == 0 ? __low2float(halves) : __high2float(halves);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies kBytes (4, 8 or 16) to shared memory in the background. Only the first `valid` are read; the rest become 0.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int valid = kBytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(valid)
                 : "memory");
  }
}

// Loads a line of memory into the L2 cache.
__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread's copies are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until earlier launches on the stream are done, if the launch itself did not wait (sm_90 and later).
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets thread blocks of the next launch start, as far as there is room; they wait for this launch before they read.
__device__ __forceinline__ void start_launch_behind() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Makes the compiler keep x in a register from here on, instead of computing it again wherever it is used: in a loop
// limited by instructions, that costs more than a register.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// kBytes (2 to 16) of memory into 32-bit words. Plain loads, so that the compiler may start them early.
template <int kBytes>
__device__ __forceinline__ void load_words(const void* from, uint32_t* words) {
  if constexpr (kBytes == 16) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(from);
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
  } else if constexpr (kBytes == 8) {
    const uint2 loaded = *reinterpret_cast<const uint2*>(from);
    words[0] = loaded.x, words[1] = loaded.y;
  } else if constexpr (kBytes == 4) {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  } else {
    words[0] = *reinterpret_cast<const uint16_t*>(from);
  }
}

// The same, of 4, 8 or 16 bytes of global memory, and started here. Where a thread loads much that it needs later, the
// compiler otherwise puts loads behind what they do not depend on, or makes one wait for the other: it has loads under a
// condition go to one register, from which a predicated instruction moves what came. So these have no condition. What
// they load must be in memory: written by the thread itself, it has to be behind a barrier.
template <int kBytes>
__device__ __forceinline__ void start_loading(const void* from, uint32_t* words) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  }
}

}  // namespace hf_kvquant::cuda
