// The gates of the gated delta rule in one launch: two projections of few outputs, and what makes decays and betas of
// them. As separate kernels these are two matrix products, each for a small part of the GPU, and nine more, each of
// which computes a few numbers.
//
// A thread block has 16 rows and 8 heads. Its warps share the inputs, 32 at a time, and meet for the sums. In a step of
// 32 inputs a lane loads 8 of each of its rows, so four lanes read 64 bytes side by side. The products of two
// instructions take them in this order, which is the same for rows and weights.
#include <cuda_runtime.h>

#include "../../fused.h"
#include "../common/device.h"
#include "../common/instructions.cuh"
#include "state.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kLanes;
constexpr int kRows = 16, kHeads = 8;  // of an instruction
constexpr int kGates = 2;              // decay, then beta
constexpr int kAtOnce = 5;             // steps of a warp whose loads are on their way together
static_assert(kThreads == kGates * kRows * kHeads, "a thread for each result");

template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads) compute_gates(const __grid_constant__ DeltaGatesParams params) {
  __shared__ float sums[kWarps][kGates][kRows][kHeads];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, g = lane / 4, t = lane % 4;
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const int first_head = blockIdx.y * kHeads, num_steps = params.num_inputs / kGateInputs;
  const auto load = [&](const void* data, int64_t first, int step) {
    if (step >= num_steps) return uint4{0, 0, 0, 0};
    const int64_t at = first + int64_t{step} * kGateInputs + t * kChunk;
    return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + at);
  };

  // Weights do not depend on the launch before.
  const int64_t of_head = int64_t{min(first_head + g, params.num_heads - 1)} * params.num_inputs;
  uint4 weight[kAtOnce][kGates], row[kAtOnce][2];
  const auto load_weights = [&](int first_step) {
    for_all<kAtOnce>([&](int i) {
      weight[i][0] = load(params.decay_weight, of_head, first_step + i * kWarps);
      weight[i][1] = load(params.beta_weight, of_head, first_step + i * kWarps);
    });
  };
  load_weights(warp);
  wait_for_launch_before();

  float product[kGates][4] = {};
  const auto of_row = [&](int i) { return min(first_row + g + 8 * i, params.num_rows - 1) * params.row_stride; };
  const int64_t low = of_row(0), high = of_row(1);
  for (int step = warp; step < num_steps; step += kAtOnce * kWarps) {
    for_all<kAtOnce>([&](int i) {
      row[i][0] = load(params.x, low, step + i * kWarps);
      row[i][1] = load(params.x, high, step + i * kWarps);
    });
    for_all<kAtOnce, kGates>([&](int i, int gate) {
      const uint4 &a = row[i][0], &b = row[i][1], &w = weight[i][gate];
      if constexpr (kDtype == Dtype::bf16) {
        multiply_bfloats(product[gate], a.x, b.x, a.y, b.y, w.x, w.y);
        multiply_bfloats(product[gate], a.z, b.z, a.w, b.w, w.z, w.w);
      } else {
        multiply_halves(product[gate], a.x, b.x, a.y, b.y, w.x, w.y);
        multiply_halves(product[gate], a.z, b.z, a.w, b.w, w.z, w.w);
      }
    });
    load_weights(step + kAtOnce * kWarps);
  }
  for_all<kGates, 4>([&](int gate, int i) { sums[warp][gate][g + i / 2 * 8][2 * t + i % 2] = product[gate][i]; });
  __syncthreads();

  const int gate = threadIdx.x / (kRows * kHeads), in_tile = threadIdx.x / kHeads % kRows, of_tile = threadIdx.x % kHeads;
  const int64_t number = first_row + in_tile;
  const int head = first_head + of_tile;
  if (number >= params.num_rows || head >= params.num_heads) return;
  float sum = 0.f;
  for_all<kWarps>([&](int i) { sum += sums[i][gate][in_tile][of_tile]; });
  const float projected = rounded(kDtype, sum);
  const int64_t to = number * params.num_heads + head;
  if (gate == 0) {
    constexpr float kLinear = 20.f;  // from here on PyTorch's softplus returns its argument
    const float x = projected + loaded(params.dt_bias, params.dt_bias_dtype, head);
    const float softplus = x > kLinear ? x : log1pf(expf(x));
    params.g[to] = -expf(loaded(params.A_log, params.A_log_dtype, head)) * softplus;
  } else {
    const float beta = rounded(kDtype, 1.f / (1.f + expf(-projected)));
    store(params.beta, kDtype, to, beta * params.beta_factor);
  }
}

}  // namespace

void delta_gates(const DeltaGatesParams& params, void* stream) {
  const auto kernel = params.dtype == Dtype::bf16 ? compute_gates<Dtype::bf16> : compute_gates<Dtype::fp16>;
  dim3 grid = grid_of("delta_gates", (params.num_rows + kRows - 1) / kRows);
  grid.y = (params.num_heads + kHeads - 1) / kHeads;
  launch("delta_gates", kernel, early(kernel, grid, kThreads, 0, stream), params);
}

}  // namespace hf_kvquant::cuda
