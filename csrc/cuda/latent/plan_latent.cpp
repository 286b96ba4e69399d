// Plans attention over latents on the host, which kernel serves a call and how it is cut into thread blocks, and
// launches it.
#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "../common/device.h"
#include "latent.h"

namespace hf_kvquant::cuda {
namespace {

// What a thread block does before its first tile, and what `combine` does with 16 parts of a row, in times of a tile.
constexpr int kTilesOfStart = 4, kPartsOfTile = 16;
constexpr int64_t kMaxSplits = 512;
constexpr int kCombineWarps = kLatentCombineThreads / 32;

// Whether a side has a row of codes with scales of its own for every token, where copies of 16 bytes can read them.
bool has_rows(const Side& side, int num_groups) {
  const int64_t strides = side.scale_stride_b | side.scale_stride_g | side.zero_stride_b | side.zero_stride_g;
  const int64_t bytes = reinterpret_cast<int64_t>(side.codes) | side.codes_stride_b | side.codes_stride_t |
                        reinterpret_cast<int64_t>(side.scale) | reinterpret_cast<int64_t>(side.zero) | 2 * strides;
  return side.num_groups == num_groups && side.codes_stride_t == row_bytes_of(side) && side.scale_stride_t == 1 &&
         (side.zero == nullptr || side.zero_stride_t == 1) && !side.has_channel_scales && bytes % 16 == 0;
}

LatentKernel choose_kernel(const DecodeParams& params, int num_rows) {
  const Side &latent = params.key_side, &rope = params.value_side;
  const bool is_narrow = latent.storage == Storage::int4;
  const bool fits = params.num_kv_heads == 1 && !params.is_ring && params.query.dtype != Dtype::fp32 &&
                    rope.head_dim <= kRopeChannels && rope.head_dim % 16 == 0 && rope.is_symmetric &&
                    latent.is_symmetric == !is_narrow && (latent.tail == nullptr) == (rope.tail == nullptr) &&
                    latent.ring == rope.ring &&
                    has_rows(latent, is_narrow ? latent.head_dim / kLatentGroup : 1) && has_rows(rope, 1);
  if (!fits) return {};
  if (latent.storage == Storage::fp8 && rope.storage == Storage::fp8) {
    return latent_kernel_for<Storage::fp8>(latent.head_dim, num_rows);
  }
  if (rope.storage != Storage::int8) return {};
  if (latent.storage == Storage::int8) return latent_kernel_for<Storage::int8>(latent.head_dim, num_rows);
  return is_narrow ? latent_kernel_for<Storage::int4>(latent.head_dim, num_rows) : LatentKernel{};
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
  LatentPlan plan{};
  const int64_t num_rows = int64_t{params.num_q_heads} * params.q_len;
  const int64_t num_row_tiles = (num_rows + kMostLatentRows - 1) / kMostLatentRows;
  const LatentKernel& kernel = plan.kernel =
      choose_kernel(params, static_cast<int>((num_rows + num_row_tiles - 1) / num_row_tiles));
  if (kernel.attend == nullptr) {
    throw std::invalid_argument(
        "attend_latent: the cache must be int8, fp8 or int4 latents of 256 or 512 channels with a 16-bit query for the "
        "CUDA kernels, got others. Ask Operands.serves_latent first.");
  }
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
