// Compiles the chunk kernels, two per head dim. Each serves all formats.
#include "../../plan/plan.h"
#include "attend_chunk.cuh"

namespace hf_kvquant::cuda {
namespace {

template <int kHeadDim, bool kChangesScores, bool kIsStreamed>
AttendKernel kernel_of() {
  using Shape = ChunkShape<kHeadDim, kChangesScores, kIsStreamed>;
  using FillShape = ChunkShape<kHeadDim, false, kIsStreamed>;
  AttendKernel kernel{};
  kernel.function = attend_chunk<Shape>;
  kernel.fixed_bytes = Shape::kTablesAt + sizeof(ChunkTables<Shape>);
  kernel.head_dim = kHeadDim;
  kernel.rows_per_tile = Shape::kRows;
  kernel.step_tokens = Shape::kTileTokens;
  kernel.slot_floats = static_cast<int>(ChunkPartial<Shape>::kFloats);
  kernel.num_threads = Shape::kThreads;
  kernel.fill_dense = fill_dense<FillShape>;
  kernel.fill_dense_threads = kDenseThreads;
  kernel.filled_tile_bytes = Shape::kTileBytes + sizeof(TileNotes);
  if constexpr (kIsStreamed) {
    kernel.fill_scratch = fill_scratch<FillShape>;
    kernel.fill_scratch_threads = kFillThreads;
    kernel.fill_scratch_bytes = kFillBytes<FillShape>;
  }
  kernel.combine = combine_chunk<Shape>;
  kernel.combine_threads = kCombineThreads;
  kernel.combine_ctas = kCombineCtas<Shape>;
  return kernel;
}

template <bool kChangesScores, bool kIsStreamed>
AttendKernel kernel_for_dim(int head_dim) {
  return head_dim <= 64    ? kernel_of<64, kChangesScores, kIsStreamed>()
         : head_dim <= 128 ? kernel_of<128, kChangesScores, kIsStreamed>()
                           : kernel_of<256, kChangesScores, kIsStreamed>();
}

}  // namespace

AttendKernel chunk_kernel_for(int head_dim, bool changes_scores, bool is_streamed) {
  if (is_streamed) {
    return changes_scores ? kernel_for_dim<true, true>(head_dim) : kernel_for_dim<false, true>(head_dim);
  }
  return changes_scores ? kernel_for_dim<true, false>(head_dim) : kernel_for_dim<false, false>(head_dim);
}

}  // namespace hf_kvquant::cuda
