// Plans attention over latents on the host, which kernel serves a call and how it is cut into thread blocks, and
// launches it.
#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "../../requirements.h"
#include "../common/device.h"
#include "latent.h"

namespace hf_kvquant::cuda {
namespace {

// What a thread block does before its first tile, and what `combine` does with 16 parts of a row, in times of a tile.
constexpr int kTilesOfStart = 4, kPartsOfTile = 16;
constexpr int64_t kMaxSplits = 512;
constexpr int kCombineWarps = kLatentCombineThreads / 32;

// The kernel of a call that meets all requirements.
LatentKernel choose_kernel(const DecodeParams& params, int num_rows) {
  const int rank = params.key_side.head_dim;
  switch (params.key_side.storage) {
    case Storage::fp8: return latent_kernel_for<Storage::fp8>(rank, num_rows);
    case Storage::int8: return latent_kernel_for<Storage::int8>(rank, num_rows);
    default: return latent_kernel_for<Storage::int4>(rank, num_rows);
  }
}

// Into how many parts to cut each of `units` rows of `tiles` tiles, for `slots` thread blocks at a time.
int64_t choose_splits(int64_t units, int64_t tiles, int64_t slots) {
  int64_t best = 1, least = INT64_MAX;
  const int64_t most = std::min({tiles, kMaxSplits, std::max<int64_t>(1, 2 * slots / units)});
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t waves = (units * splits + slots - 1) / slots;
    const int64_t time = waves * ((tiles + splits - 1) / splits + kTilesOfStart) + splits / kPartsOfTile;
    if (time < least) least = time, best = splits;
  }
  return best;
}

}  // namespace

LatentPlan plan_latent(const DecodeParams& params) {
  const Call call{params, nullptr};
  if (const Unmet unmet = unmet_by_latent(call)) {
    throw std::invalid_argument("attend_latent: the cache and the query must be what the CUDA kernels serve: " +
                                unmet.sentence(call) + ". Ask Operands.serves_latent first.");
  }
  LatentPlan plan{};
  const int64_t num_rows = int64_t{params.num_q_heads} * params.q_len;
  const LatentKernel& kernel = plan.kernel = choose_kernel(params, static_cast<int>(num_rows));
  const int64_t num_row_tiles = (num_rows + kernel.rows_per_tile - 1) / kernel.rows_per_tile;
  const void* const attend = reinterpret_cast<const void*>(kernel.attend);
  const Device device = current_device();
  const int ctas = remember(std::make_tuple(attend, device.number), [&] {
    check_cuda("attend_latent",
               cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
               "the kernel must fit the GPU");
    int count = 0;
    check_cuda("attend_latent",
               cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, attend, kLatentThreads, kernel.shared_bytes),
               "the kernel must fit the GPU");
    return std::max(count, 1);
  });
  plan.rows = {divisor(params.num_q_heads), static_cast<int>(num_rows)};
  plan.num_row_tiles = static_cast<int>(num_row_tiles);
  plan.laps = laps_of(params);
  plan.max_length = max_length_of(params);
  const int64_t units = num_row_tiles * params.batch;
  const int64_t tiles = std::max(1, params.capacity / kLatentTileTokens);
  const int64_t slots = int64_t{ctas} * device.num_multiprocessors;
  // A fixed number of splits promises the same bits in every batch.
  const int64_t wanted = std::min<int64_t>({params.num_splits, tiles, kMaxSplits});
  const int64_t splits = wanted > 0 ? wanted : remember(std::make_tuple(units, tiles, slots), [&] {
    return choose_splits(units, tiles, slots);
  });
  plan.num_splits = static_cast<int>(splits);
  // Warps share rows where these are few.
  plan.warps_per_row = params.num_splits > 0 ? kCombineWarps : 1;
  const int64_t all_rows = params.batch * num_rows, all_warps = kCombineWarps * device.num_multiprocessors;
  while (plan.warps_per_row < kCombineWarps && all_rows * plan.warps_per_row < all_warps) plan.warps_per_row *= 2;
  plan.workspace_floats = units * splits * kernel.rows_per_tile * (params.key_side.head_dim + 2);
  return plan;
}

void attend_latent(const DecodeParams& params, const LatentPlan& plan, float* workspace, void* stream) {
  const int64_t parts = int64_t{params.batch} * plan.num_row_tiles * plan.num_splits;
  launch("attend_latent", plan.kernel.attend,
         early(plan.kernel.attend, grid_of("attend_latent", parts), kLatentThreads, plan.kernel.shared_bytes, stream),
         params, plan, workspace);
  const int64_t warps = int64_t{params.batch} * plan.rows.num_rows * plan.warps_per_row;
  const int64_t ctas = (warps + kCombineWarps - 1) / kCombineWarps;
  const size_t shared_bytes =
      plan.warps_per_row == 1 ? 0 : kCombineWarps * (sizeof(float) * params.key_side.head_dim + sizeof(float4));
  launch("attend_latent", plan.kernel.combine,
         early(plan.kernel.combine, grid_of("attend_latent", ctas), kLatentCombineThreads, shared_bytes, stream),
         params, plan, workspace);
}

}  // namespace hf_kvquant::cuda
