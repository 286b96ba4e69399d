// Compiles the latent kernels of a storage type, for both ranks and all numbers of query rows.
#pragma once

#include "attend_latent.cuh"
#include "combine_latent.cuh"

namespace hf_kvquant::cuda {

template <Storage kLatent, int kRank, int kColumnTiles>
LatentKernel latent_kernel_of() {
  using Shape = LatentShape<kLatent, kLatent == Storage::fp8 ? Storage::fp8 : Storage::int8, kRank, kColumnTiles>;
  return {attend_latent<Shape>, combine_latent<kRank>, Shape::kRows, Shape::kSharedBytes};
}

template <Storage kLatent, int kRank>
LatentKernel latent_kernel_for_rows(int num_rows) {
  if (num_rows <= 16) return latent_kernel_of<kLatent, kRank, 2>();
  if (num_rows <= 24) return latent_kernel_of<kLatent, kRank, 3>();
  return latent_kernel_of<kLatent, kRank, 4>();
}

template <Storage kLatent>
LatentKernel latent_kernel_for(int rank, int num_rows) {
  if (rank == 256) return latent_kernel_for_rows<kLatent, 256>(num_rows);
  if (rank == 512) return latent_kernel_for_rows<kLatent, 512>(num_rows);
  return {};
}

}  // namespace hf_kvquant::cuda
