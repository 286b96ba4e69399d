// Compiles the latent kernels of a storage type, for both ranks and all numbers of query rows.
#pragma once

#include "attend_latent.cuh"
#include "combine_latent.cuh"

namespace hf_kvquant::cuda {

// Rope parts are dense next to latents of 8 bits, and int8 next to narrower ones.
template <Storage kLatent, int kRank, int kColumnTiles>
LatentKernel latent_kernel_of() {
  using Shape = LatentShape<kLatent, bits_of(kLatent) == 8 ? Storage::none : Storage::int8, kRank, kColumnTiles>;
  return {attend_latent<Shape>, combine_latent<kRank>, Shape::kRows, Shape::kSharedBytes};
}

template <Storage kLatent, int kRank>
LatentKernel latent_kernel_for_rows(int num_rows) {
  // Two thread blocks of 32 rows do not fit a multiprocessor with two stages of 512 + 2 · 64 bytes a token.
  constexpr int kMostColumnTiles = bits_of(kLatent) == 8 && kRank == 512 ? 3 : 4, kMostRows = 8 * kMostColumnTiles;
  const int num_tiles = (num_rows + kMostRows - 1) / kMostRows;
  const int num_rows_of_tile = (num_rows + num_tiles - 1) / num_tiles;
  if (num_rows_of_tile <= 16) return latent_kernel_of<kLatent, kRank, 2>();
  if (num_rows_of_tile <= 24) return latent_kernel_of<kLatent, kRank, 3>();
  return latent_kernel_of<kLatent, kRank, kMostColumnTiles>();
}

template <Storage kLatent>
LatentKernel latent_kernel_for(int rank, int num_rows) {
  if (rank == 256) return latent_kernel_for_rows<kLatent, 256>(num_rows);
  if (rank == 512) return latent_kernel_for_rows<kLatent, 512>(num_rows);
  return {};
}

}  // namespace hf_kvquant::cuda
