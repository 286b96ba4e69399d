// Compiles the chunk kernels, one per head dim. Each serves all formats with codes.
#include "../../plan/plan.h"
#include "attend_chunk.cuh"

namespace hf_kvquant::cuda {
namespace {

template <int kHeadDim, bool kChangesScores>
AttendKernel kernel_of() {
  using Shape = ChunkShape<kHeadDim, kChangesScores>;
  AttendKernel kernel{};
  kernel.function = attend_chunk<Shape>;
  kernel.fixed_bytes = Shape::kTablesAt + sizeof(ChunkTables<Shape>);
  kernel.head_dim = kHeadDim;
  kernel.rows_per_tile = Shape::kRows;
  kernel.step_tokens = Shape::kTileTokens;
  kernel.slot_floats = static_cast<int>(ChunkPartial<Shape>::kFloats);
  kernel.num_threads = kChunkThreads;
  kernel.fill_dense = fill_dense<ChunkShape<kHeadDim, false>>;
  kernel.fill_dense_threads = kDenseThreads;
  kernel.dense_tile_bytes = Shape::kTileBytes + sizeof(TileNotes);
  kernel.combine = combine_chunk<Shape>;
  kernel.combine_threads = kCombineThreads;
  kernel.combine_ctas = kCombineCtas<Shape>;
  return kernel;
}

template <bool kChangesScores>
AttendKernel kernel_for_dim(int head_dim) {
  return head_dim <= 64    ? kernel_of<64, kChangesScores>()
         : head_dim <= 128 ? kernel_of<128, kChangesScores>()
                           : kernel_of<256, kChangesScores>();
}

}  // namespace

AttendKernel chunk_kernel_for(int head_dim, bool changes_scores) {
  return changes_scores ? kernel_for_dim<true>(head_dim) : kernel_for_dim<false>(head_dim);
}

}  // namespace hf_kvquant::cuda
