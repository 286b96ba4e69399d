// What a query row attends to in steps that not all rows attend to in full.
#pragma once

#include "../common/codes.cuh"
#include "schedule.cuh"

namespace hf_kvquant::cuda {

// `row` is counted over all rows of the unit's head.
struct RowView {
  int position, from;  // of its query token, and of the first token in its sliding window
  int dense_from;      // the first of the newest tokens that it reads from the tails
  float slope;         // of ALiBi, in log2 units

  __device__ __forceinline__ RowView(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                     const Span& span, int row) {
    const int query_token = rows.token(row);
    position = span.first_position + query_token;
    from = params.sliding_window > 0 ? position - params.sliding_window + 1 : 0;
    dense_from = max(position + 1 - params.residual_length, span.dense_from);
    const bool has_slope = params.alibi_slopes != nullptr && row < rows.num_rows;
    slope = has_slope ? params.alibi_slopes[segment.h * static_cast<int>(rows.num_q_per_kv.value) +
                                            rows.head(row, query_token)] *
                            kLog2E
                      : 0.f;
  }

  // As codes.
  __device__ __forceinline__ bool sees(const Span& span, int token) const {
    return token >= span.begin && token < span.end && token <= position && token >= from && token < dense_from;
  }

  // A score after softcap and ALiBi, in log2 units. `constant` is what it lacks of the logit.
  __device__ __forceinline__ float logit(const DecodeParams& params, float score, float constant, int token) const {
    if (params.softcap > 0.f) score = capped(score + constant, params.softcap * kLog2E);
    return fmaf(slope, static_cast<float>(token - position), score);
  }
};

}  // namespace hf_kvquant::cuda
