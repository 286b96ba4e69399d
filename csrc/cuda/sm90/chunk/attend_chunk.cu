// Compiles the chunk kernels. Each serves all formats.
#include "../../plan/plan.h"
#include "attend_chunk.cuh"

namespace hf_kvquant::cuda {
namespace {

template <int kHeadDim, bool kChangesScores, ChunkKind kKind>
AttendKernel kernel_of() {
  using Shape = ChunkShape<kHeadDim, kChangesScores, kKind>;
  using FillShape = ChunkShape<kHeadDim, false, kKind>;
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
  if constexpr (Shape::kIsStreamed) {
    kernel.fill_scratch = fill_scratch<FillShape>;
    kernel.fill_scratch_threads = kFillThreads;
    kernel.fill_scratch_bytes = kFillBytes<FillShape>;
  }
  kernel.combine = combine_chunk<Shape>;
  kernel.combine_threads = kCombineThreads;
  kernel.combine_ctas = kCombineCtas<Shape>;
  return kernel;
}

template <bool kChangesScores, ChunkKind kKind>
AttendKernel kernel_for_dim(int head_dim) {
  return head_dim <= 64    ? kernel_of<64, kChangesScores, kKind>()
         : head_dim <= 128 ? kernel_of<128, kChangesScores, kKind>()
                           : kernel_of<256, kChangesScores, kKind>();
}

}  // namespace

AttendKernel chunk_kernel_for(int head_dim, bool changes_scores, ChunkKind kind) {
  if (kind == ChunkKind::few_rows) return kernel_for_dim<false, ChunkKind::few_rows>(head_dim);
  if (kind == ChunkKind::streamed) {
    return changes_scores ? kernel_for_dim<true, ChunkKind::streamed>(head_dim)
                          : kernel_for_dim<false, ChunkKind::streamed>(head_dim);
  }
  return changes_scores ? kernel_for_dim<true, ChunkKind::many_rows>(head_dim)
                        : kernel_for_dim<false, ChunkKind::many_rows>(head_dim);
}

}  // namespace hf_kvquant::cuda
