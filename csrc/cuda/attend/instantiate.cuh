// Compiles the attention kernels of one row of attend_table.h, for all head dims and numbers of query rows. Each file
// attend_*.cu does so for one row, since these compilations take minutes. It must not include the table, which uses
// all.
#pragma once

#include "attend.cuh"

namespace hf_kvquant::cuda {

template <class Shape>
AttendKernel kernel_of() {
  return {attend<Shape>,
          Shape::kPipelinesAt,
          Shape::StepPipeline::kStageBytes,
          Shape::kNumStages,
          Shape::kMinStages,
          Shape::kHeadDim,
          Shape::kRows,
          Shape::StepPipeline::kStepTokens,
          Shape::kMinWarps,
          static_cast<int>(Partial<Shape::kRows, Shape::kHeadDim>::kFloats),
          Shape::kKey,
          Shape::kScales,
          Shape::kIsPaged,
          Shape::kHasKeyZero,
          Shape::kHasValueZero,
          Shape::kHasPairs || Shape::kIsPlain};
}

template <Storage kKey, Storage kValue, bool kHasKeyZero, bool kHasValueZero, Scales kScales, int kHeadDim,
          bool kIsPaged>
AttendKernel kernel_for_rows(int num_rows) {
  if constexpr (is_integer(kKey)) {
    using Four = Shape<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, kHeadDim, 4, kIsPaged>;
    if (num_rows <= 4) return kernel_of<Four>();
  }
  using Eight = Shape<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, kHeadDim, 8, kIsPaged>;
  if (num_rows <= 8) return kernel_of<Eight>();
  // In granularity channel, scaled queries of 16 rows of 256 channels do not fit registers. Nor do the longer steps of
  // int2.
  constexpr bool kIsLarge = kScales == Scales::blocks || width_of(kKey) + width_of(kValue) <= 4;
  constexpr int kMostRows = kIsLarge && kHeadDim == 256 ? 8 : 16;
  return kernel_of<Shape<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, kHeadDim, kMostRows, kIsPaged>>();
}

template <Storage kKey, Storage kValue, bool kHasKeyZero, bool kHasValueZero, Scales kScales, bool kIsPaged>
AttendKernel kernel_for_dim(int head_dim, int num_rows) {
  if constexpr (width_of(kKey) >= 4 && width_of(kValue) >= 4) {  // rows of int2 would be shorter than a load takes
    if (head_dim <= 64) {
      return kernel_for_rows<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, 64, kIsPaged>(num_rows);
    }
  }
  if (head_dim <= 128) {
    return kernel_for_rows<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, 128, kIsPaged>(num_rows);
  }
  return kernel_for_rows<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, 256, kIsPaged>(num_rows);
}

template <Storage kKey, Storage kValue, bool kHasKeyZero, bool kHasValueZero, Scales kScales>
AttendKernel kernel_for(int head_dim, int num_rows, bool is_paged) {
  if (is_paged) return kernel_for_dim<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, true>(head_dim, num_rows);
  return kernel_for_dim<kKey, kValue, kHasKeyZero, kHasValueZero, kScales, false>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
