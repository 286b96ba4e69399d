// A linear layer with torchao's tile-packed int4 weights, for the few rows of a decode step. The result is bitwise the
// same as from PyTorch's own kernel for them, aten::_weight_int4pack_mm: both multiply 16 inputs by one tensor core
// instruction, add the products of a warp one by one in float32, and then the sums of eight warps in order. A captured
// step may therefore use either.
//
// What differs is how memory is read. PyTorch's kernel loads a slice, then multiplies it, and reads rows in words of 4
// bytes. Here, a warp keeps several slices of weights under way while it multiplies one, and begins before the
// previous launch ends. And the weights are the A operand: 16 outputs by 8 rows in one instruction instead of 8 outputs
// by 16 rows, so few rows need half of these. One row then takes 0.6 of the time, eight rows 0.4 (layers of Llama 3 8B,
// H200, 2026-11). Thread blocks that went through several pairs of tiles took 1.1 times as long, and more registers.
//
// Layout of the codes, [num_outputs / 8, num_inputs / 128, 32, 4] int32: a tile has 8 outputs, a slice of it 128
// inputs. Word j of lane (g, t) is of output g: its four bits from bit 16h + 4n on are the code of input 32j + 8n + 2t
// + h, as the B operands of two instructions want them. reference.packed_linear defines the result but for the order of
// sums.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <tuple>

#include "../../fused.h"
#include "../common/device.h"
#include "../common/instructions.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarps = 8;  // warp w takes slices w, w + 8, ... as in PyTorch: this decides the order of sums
constexpr int kThreads = kWarps * kLanes;
constexpr int kSliceInputs = kPackedInputs;
constexpr int kTileOutputs = kPackedOutputs, kPairOutputs = 2 * kTileOutputs;
constexpr int kRows = 8;                 // of one instruction
constexpr int kTileBytes = kLanes * 16;  // of one slice
constexpr int kRowBytes = kSliceInputs * 2;
constexpr int kRowChunks = kRowBytes / 16;

// What a warp has in shared memory of one slice: two tiles of codes, a scale and zero of each output and group, and the
// rows. The 16-byte chunks of row r are exchanged, chunk c for c ^ (r % 8), so that eight rows lie in different banks.
template <int kGroups>
struct Stage {
  static constexpr int kScalesAt = 2 * kTileBytes, kGroupBytes = kPairOutputs * 4;
  static constexpr int kRowsAt = kScalesAt + kGroups * kGroupBytes;
  __host__ __device__ static constexpr int bytes(int num_rows) { return kRowsAt + num_rows * kRowBytes; }
};

// Two bfloat16 numbers at a time, rounded once.
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ uint4 load_shared(uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

// The eight weights of a word, code · scale + zero in bfloat16, where a code is 0 to 15 and counts from -8.
struct Dequantizer {
  uint32_t scale, zero;  // twice each

  __device__ __forceinline__ explicit Dequantizer(uint32_t scale_and_zero)
      : scale((scale_and_zero & 0xffff) * 0x10001), zero((scale_and_zero >> 16) * 0x10001) {}

  // `bias`: kBias in a register. An instruction takes one constant, so with two it would be two instructions.
  __device__ __forceinline__ void operator()(uint32_t word, uint32_t bias, uint32_t (&weights)[4]) const {
    constexpr uint32_t kOne = 0x3f803f80, kMinus136 = 0xc308c308;
    for_all<4>([&](int i) {
      uint32_t biased;
      asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(biased) : "r"(word >> (4 * i)), "r"(bias));  // (a & b) | c
      weights[i] = multiply_add(multiply_add(biased, kOne, kMinus136), scale, zero);
    });
  }

  static constexpr uint32_t kBias = 0x43004300;  // 128: with a code in the lowest bits it is 128 + code
};

// Partial sums of the warps: [kWarps, rows, kPairOutputs] float32.
constexpr int sum_bytes(int num_rows) { return kWarps * num_rows * kPairOutputs * 4; }

// A thread block has kRowTiles · 8 rows and a pair of tiles. kGroups: scales of an output in a slice. kIsOneRow:
// results of other rows are not added up.
template <int kRowTiles, int kGroups, int kStages, bool kIsOneRow>
__global__ void __launch_bounds__(kThreads, kIsOneRow ? 4 : 2)
    multiply_packed(const __grid_constant__ PackedLinearParams params) {
  extern __shared__ uint4 shared[];
  using Stage = Stage<kGroups>;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int num_slices = params.num_inputs / kSliceInputs;
  const int first_row = blockIdx.y * kRowTiles * kRows;
  const int most_rows = kIsOneRow ? 1 : min(static_cast<int>(params.num_rows), kRowTiles * kRows);
  const int num_rows = kIsOneRow ? 1 : min(static_cast<int>(params.num_rows) - first_row, kRowTiles * kRows);
  const int stage_bytes = Stage::bytes(most_rows);
  const uint32_t stages = shared_address(shared) + warp * kStages * stage_bytes;
  const uint32_t end_of_stages = stages + kStages * stage_bytes;
  auto* const sums_of_warps =
      reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + kWarps * kStages * stage_bytes);

  // What a lane copies of a warp's slices, one after the other: a chunk of either tile, of the scales, and of every
  // second row. Behind the last slice, copies read nothing.
  const auto* codes = static_cast<const uint4*>(params.codes) +
                      (static_cast<int64_t>(blockIdx.x) * 2 * num_slices + warp) * kLanes + lane;
  const auto* scales = static_cast<const uint32_t*>(params.scale_and_zero) + blockIdx.x * kPairOutputs + lane % 4 * 4 +
                       static_cast<int64_t>((warp * kSliceInputs >> params.group_log2) + lane / 4) * params.num_outputs;
  const int64_t row_chunks = params.num_inputs / 8;
  const auto* rows = static_cast<const uint4*>(params.x) + (first_row + lane / kRowChunks) * row_chunks +
                     warp * kRowChunks + lane % kRowChunks;
  const uint32_t row_at = Stage::kRowsAt + lane / kRowChunks * kRowBytes;
  const uint32_t chunk_at = (lane % kRowChunks ^ lane / kRowChunks) * 16;
  const auto fetch_weights = [&](int slice, uint32_t stage) {
    const int valid = slice < num_slices ? 16 : 0;
    copy_async<16>(stage + lane * 16, codes, valid);
    copy_async<16>(stage + kTileBytes + lane * 16, codes + num_slices * kLanes, valid);
    if (lane < 4 * kGroups) copy_async<16>(stage + Stage::kScalesAt + lane * 16, scales, valid);
    codes += kWarps * kLanes;
    scales += static_cast<int64_t>(kWarps * kSliceInputs >> params.group_log2) * params.num_outputs;
  };
  const auto fetch_rows = [&](int slice, uint32_t stage) {
    const int valid = slice < num_slices ? 16 : 0;
    constexpr int kRowsAtOnce = kLanes / kRowChunks;
    for_all<kIsOneRow ? 1 : kRowTiles * kRows / kRowsAtOnce>([&](int i) {
      const int row = i * kRowsAtOnce;
      if (row + lane / kRowChunks < num_rows) {
        copy_async<16>(stage + row_at + row * kRowBytes + (chunk_at ^ row % 8 * 16), rows + row * row_chunks, valid);
      }
    });
    rows += kWarps * kRowChunks;
  };

  // Weights do not depend on the launch before, rows do.
  for_all<kStages>([&](int i) { fetch_weights(warp + i * kWarps, stages + i * stage_bytes); });
  wait_for_launch_before();
  start_launch_behind();
  for_all<kStages>([&](int i) {
    fetch_rows(warp + i * kWarps, stages + i * stage_bytes);
    commit_copies();
  });

  uint32_t bias = Dequantizer::kBias;
  keep(bias);
  uint32_t stage = stages;
  float sums[kRowTiles][4] = {};
  for (int slice = warp; slice < num_slices; slice += kWarps) {
    wait_for_copies<kStages - 1>();
    __syncwarp();
    const uint4 loaded[2] = {load_shared(stage + lane * 16), load_shared(stage + kTileBytes + lane * 16)};
    const uint32_t words[2][4] = {{loaded[0].x, loaded[0].y, loaded[0].z, loaded[0].w},
                                  {loaded[1].x, loaded[1].y, loaded[1].z, loaded[1].w}};
    for_all<kGroups>([&](int group) {
      const uint32_t at = stage + Stage::kScalesAt + group * Stage::kGroupBytes + lane / 4 * 4;
      const Dequantizer low(load_shared_word(at)), high(load_shared_word(at + kTileOutputs * 4));
      for_all<4 / kGroups>([&](int word_of_group) {
        const int j = group * (4 / kGroups) + word_of_group;
        uint32_t weights[2][4];
        low(words[0][j], bias, weights[0]);
        high(words[1][j], bias, weights[1]);
        for_all<kRowTiles>([&](int tile) {
          // Lane l passes the address of row l % 8, chunk l / 8 of four. Rows that are missing repeat the last one.
          const int row = kIsOneRow ? 0 : min(tile * kRows + lane % 8, num_rows - 1);
          const int chunk = (4 * j + lane / 8) ^ (row % 8);
          uint32_t x[4];
          load_matrices<false>(stage + Stage::kRowsAt + row * kRowBytes + chunk * 16, x);
          for_all<2>([&](int k) {
            float products[4] = {};
            multiply_bfloats(products, weights[0][2 * k], weights[1][2 * k], weights[0][2 * k + 1],
                             weights[1][2 * k + 1], x[2 * k], x[2 * k + 1]);
            for_all<kIsOneRow ? 2 : 4>([&](int r) {
              float& sum = sums[tile][kIsOneRow ? 2 * r : r];
              sum = __fadd_rn(sum, products[kIsOneRow ? 2 * r : r]);
            });
          });
        });
      });
    });
    __syncwarp();
    fetch_weights(slice + kStages * kWarps, stage);
    fetch_rows(slice + kStages * kWarps, stage);
    commit_copies();
    stage += stage_bytes;
    if (stage == end_of_stages) stage = stages;
  }

  // The sums of eight warps, in order, also of those without a slice.
  for_all<kRowTiles, kIsOneRow ? 1 : 2, 2>([&](int tile, int r, int half) {
    const int row = tile * kRows + lane % 4 * 2 + r, output = half * kTileOutputs + lane / 4;
    if (row < num_rows) sums_of_warps[(warp * most_rows + row) * kPairOutputs + output] = sums[tile][2 * half + r];
  });
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * kPairOutputs; i += kThreads) {
    const int row = i / kPairOutputs, output = i % kPairOutputs;
    float sum = 0.f;
    for_all<kWarps>([&](int w) { sum = __fadd_rn(sum, sums_of_warps[w * most_rows * kPairOutputs + i]); });
    static_cast<__nv_bfloat16*>(params.out)[static_cast<int64_t>(first_row + row) * params.num_outputs +
                                            blockIdx.x * kPairOutputs + output] = __float2bfloat16_rn(sum);
  }
}

template <int kGroups>
constexpr int shared_bytes(int num_stages, int num_rows) {
  return kWarps * num_stages * Stage<kGroups>::bytes(num_rows) + sum_bytes(num_rows);
}

template <int kRowTiles, int kGroups, int kStages, bool kIsOneRow>
void launch_packed(const PackedLinearParams& params, void* stream) {
  const auto kernel = multiply_packed<kRowTiles, kGroups, kStages, kIsOneRow>;
  constexpr int kMostRows = kRowTiles * kRows;
  const Device device = current_device();
  // For eight rows, compute capabilities 8.6 and 8.9 have too little (computed): captured steps take PyTorch's kernel.
  const int most_bytes = std::min(shared_bytes<kGroups>(kStages, kMostRows), device.bytes_per_cta);
  remember(std::make_tuple(device.number), [&] {
    check_cuda("packed_linear",
               cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes),
               "the kernel must fit the GPU");
    return true;
  });
  const int num_rows = static_cast<int>(std::min<int64_t>(params.num_rows, kMostRows));
  const dim3 grid(params.num_outputs / kPairOutputs,
                  static_cast<unsigned>((params.num_rows + kMostRows - 1) / kMostRows));
  const int bytes = shared_bytes<kGroups>(kStages, num_rows);
  launch("packed_linear", kernel, early(kernel, grid, kThreads, bytes, stream), params);
}

template <int kGroups>
void launch_packed(const PackedLinearParams& params, void* stream) {
  if (params.num_rows == 1) return launch_packed<1, kGroups, 3, true>(params, stream);
  if (params.num_rows <= kRows) return launch_packed<1, kGroups, 4, false>(params, stream);
  return launch_packed<2, kGroups, 2, false>(params, stream);
}

}  // namespace

void packed_linear(const PackedLinearParams& params, void* stream) {
  switch (params.group_log2) {
    case 5: return launch_packed<4>(params, stream);
    case 6: return launch_packed<2>(params, stream);
    default: return launch_packed<1>(params, stream);
  }
}

}  // namespace hf_kvquant::cuda
