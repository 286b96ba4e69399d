// What WarpAttention does differently for int4 keys of granularity channel: one scale and zero per channel and block.
//
// Scores. Scales multiply the query, once a step, instead of the products:
//     query · key_t = Σ_c (query_c · scale_c) · (code_tc - 8) + Σ_c query_c · (zero_c + 8 · scale_c).
// The scaled query is rounded to float16. Codes are centred for the query as rounded, so a rounding error is multiplied
// by the code's distance from the middle. The second sum is a product, too, of a tile whose rows 0 and 1 are the zeros
// and the scales.
//
// Tokens of the unfinished block have no codes: their keys are dense in the tail and are read from there, for the query
// as it came. They take at most four steps of 32 tokens, the last ones of their warps. (Where values are dense too, in
// a window of the newest tokens, the block ends before that window: tails.cuh.) Where a block was finished
// between two queries of a call, those before read it from the tail and those behind as codes: its steps do both.
//
// Tried and no faster (H200, 2026-11). The query is scaled for the 32 tokens of each step, though a block has 128: 72 of
// 519 instructions, and instructions limit these kernels.
// - Warps that take the four steps of a block one after the other, and scale the query once: 64 x 8k took 168 us instead
//   of 162. One warp then reads the whole tail, and waits for each of its steps.
// - Steps of 64 tokens. Unrolled, these are 18 % fewer instructions, but they wait for instructions more often; as two
//   passes of the same code they were no faster. 64 x 8k took 151 to 158 us instead of 158 to 160, but 1 x 128k took 50
//   instead of 48, and 1 x 2k with dense windows 15 instead of 14.
#pragma once

#include "query.cuh"

namespace hf_kvquant::cuda {

template <class Shape>
class Blocks {
  using Pipeline = typename Shape::StepPipeline;
  static constexpr int kTiles = Shape::kTilesPerStep, kHalves = 2 * kTiles, kColumns = Shape::kColumns;
  static constexpr int kColumnTiles = Shape::kColumnTiles, kColumnsPerTile = Shape::kColumnsPerTile;
  static constexpr int kParts = Shape::kHeadDim / 32;
  static_assert(!Shape::kIsBlocked || kTailAlignment % Pipeline::kStepTokens == 0,
                "a step of the tail is in consecutive rows");

 public:
  // Prefetches a warp's rows of the tail, for tokens `begin` ... `end` - 1 that are in its steps.
  static __device__ __forceinline__ void expect_tail(const DecodeParams& params, const DecodePlan& plan,
                                                     const Segment& segment, int begin, int end, int warp, int lane) {
    constexpr int kLineBytes = 128, kLines = (Shape::kHeadDim * 2 + kLineBytes - 1) / kLineBytes;
    const int num_warps = 1 << plan.warps_log2, first = begin / Pipeline::kStepTokens;
    const Side& side = params.key_side;
    const int slot = tail_slot<Shape::kIsPaged>(plan, segment.b);
#pragma unroll 1
    for (int step = first + ((warp - first) & (num_warps - 1)); step * Pipeline::kStepTokens < end; step += num_warps) {
      const int token = step * Pipeline::kStepTokens + lane;
      const bool has_token = token < end && lane < Pipeline::kStepTokens;
      if (!has_token || share_of_step(plan, segment, step) != segment.share) continue;
      const char* row =
          static_cast<const char*>(side.tail) + 2 * (slot * side.tail_stride_b + segment.h * side.tail_stride_h +
                                                     (params.sink_length + token % side.ring) * side.tail_stride_t);
      for_all<kLines>([&](int line) {
        if (line * kLineBytes < 2 * side.head_dim) prefetch(row + line * kLineBytes);
      });
    }
  }

  // `plain_query`: as write_plain_row leaves it. `first_of_tail`: the first token that some query reads from the tail;
  // `end_of_codes`: the first that all do. Both begin a block. `tail_slot` as of the function.
  __device__ __forceinline__ void load(const unsigned char* planes, const unsigned char* plain_query,
                                       int first_of_tail, int end_of_codes, int tail_slot, int lane) {
    g_ = lane >> 2, t_ = lane & 3;
    plain_query_ = plain_query, tail_slot_ = tail_slot;
    first_of_tail_ = first_of_tail, end_of_codes_ = end_of_codes;
    codes_at_ = matrix_row<Shape::kKeyRowBytes>(lane);
    keep(codes_at_);
    for_all<kColumnTiles>([&](int n) {
      const int row = Shape::kIsPaired ? g_ >> 1 : 8 * n + g_;
      const bool is_held = !Shape::kIsPaired || (g_ & 1) == 0;
      for_all<kParts>([&](int j) { load_query_words<Shape>(planes, row, j, t_, is_held, query_[n][j]); });
    });
  }

  // Scores of a step, plus `base`. Factors count codes in units of their low nibbles. `constants` belong to query rows.
  // Scores of codes lack them, so they are subtracted from dense scores.
  __device__ __forceinline__ void score(const DecodeParams& params, const Rows& rows, const Segment& segment,
                                        const Span& span, const float* constants, const unsigned char* stage, int step,
                                        const float (&factor)[kColumns], const float (&base)[kColumns],
                                        float (&score)[kTiles][2][kColumns]) const {
    const auto set = [&](int c, const Sums& sum, float scale, float offset) {
      const int n = c / kColumnsPerTile, k = c % kColumnsPerTile;
      for_all<kTiles, 2>([&](int i, int h) { score[i][h][c] = fmaf(sum[i][n][2 * h + k], scale, offset); });
    };
    const int token = step * Pipeline::kStepTokens;
    const bool has_codes = token < end_of_codes_;
    if (has_codes) {
      Sums sum;
      float constant[kColumns];
      multiply_codes(stage, sum, constant);
      for_all<kColumns>([&](int c) { set(c, sum, factor[c], fmaf(constant[c], factor[c], base[c])); });
    }
    if (token < first_of_tail_) return;
    Sums sum;
    multiply_tail(params, segment, step, sum);
    for_all<kColumns>([&](int c) {
      const int row = Shape::row_of(c, t_), query = rows.token(segment.row_tile * Shape::kRows + row);
      const int newest = max(span.first_position + query + 1 - params.residual_length, 0);
      if (has_codes && token < newest / kBlockSize * kBlockSize) return;  // codes for this query
      set(c, sum, params.softmax_scale * kLog2E, base[c] - constants[row]);
    });
  }

 private:
  using Sums = float[kTiles][kColumnTiles][4];
  static constexpr float kUnit = 1.f / kLowNibbleUnit;

  __device__ __forceinline__ void multiply_codes(const unsigned char* stage, Sums& sum,
                                                 float (&constant)[kColumns]) const {
    uint32_t scaled[kColumnTiles][kParts][4];
    for_all<kColumnTiles>([&](int n) {
      float middle[4] = {}, even[4] = {}, odd[4] = {};
      for_all<kParts>([&](int j) {
        const unsigned char* at = stage + (32 * j + 8 * t_) * 2;
        uint32_t scales[4], terms[4];
        in_pairs(*reinterpret_cast<const uint4*>(at + Pipeline::kScalesAt), scales);
        in_pairs(*reinterpret_cast<const uint4*>(at + (g_ == 0 ? Pipeline::kKeyZeroAt : Pipeline::kScalesAt)), terms);
        const uint32_t (&query)[4] = query_[n][j];
        uint32_t (&product)[4] = scaled[n][j];
        for_all<4>([&](int k) { product[k] = multiply_halves(query[k], scales[k]); });
        // Rows 0 and 1 are used, the others are not.
        multiply_halves(even, terms[0], 0, terms[2], 0, query[0], query[2]);
        multiply_halves(odd, terms[1], 0, terms[3], 0, query[1], query[3]);
        // Codes of -8, as low and as high nibbles.
        multiply_halves(middle, 0x80088008u, 0x80088008u, 0x80808080u, 0x80808080u, product[0], product[1]);
        multiply_halves(middle, 0x80088008u, 0x80088008u, 0x80808080u, 0x80808080u, product[2], product[3]);
      });
      for_all<kColumnsPerTile>([&](int k) {
        const float term = fmaf(16.f, odd[k], even[k]);
        const float zeros = __shfl_sync(kAllLanes, term, t_), scales = __shfl_sync(kAllLanes, term, 4 + t_);
        constant[kColumnsPerTile * n + k] = fmaf(scales, 8.f, zeros) * kUnit;
      });
      for_all<kTiles, 4>([&](int i, int k) { sum[i][n][k] = middle[k]; });
    });
    const uint32_t codes = shared_address(stage);
    for_all<kTiles, kParts / 2>([&](int i, int load) {
      uint32_t words[4];
      load_matrices<false>(codes + RowLayout<Shape::kKeyRowBytes>::at(codes_at_, 2 * i, load * 32), words);
      for_all<2>([&](int k) {
        const uint32_t e = words[2 * k], f = words[2 * k + 1], e8 = e >> 8, f8 = f >> 8;
        for_all<kColumnTiles>([&](int n) {
          const uint32_t (&query)[4] = scaled[n][2 * load + k];
          multiply_halves(sum[i][n], e & kLowNibbles, f & kLowNibbles, e & kHighNibbles, f & kHighNibbles, query[0],
                          query[1]);
          multiply_halves(sum[i][n], e8 & kLowNibbles, f8 & kLowNibbles, e8 & kHighNibbles, f8 & kHighNibbles, query[2],
                          query[3]);
        });
      });
    });
  }

  __device__ __forceinline__ void multiply_tail(const DecodeParams& params, const Segment& segment, int step,
                                                Sums& sum) const {
    const Side& side = params.key_side;
    const int slot = Shape::kIsPaged ? tail_slot_ : segment.b;
    const uint16_t* tail =
        static_cast<const uint16_t*>(side.tail) + (slot * side.tail_stride_b + segment.h * side.tail_stride_h);
    const int first = params.sink_length + step * Pipeline::kStepTokens % side.ring + slot_of_row(g_) * kHalves;
    for_all<kTiles, kColumnTiles, 4>([&](int i, int n, int k) { sum[i][n][k] = 0.f; });
    constexpr int kAtOnce = Shape::kRows <= 8 && Shape::kHeadDim <= 128 ? kTiles : 1;  // as many as registers hold
    for_all<kTiles / kAtOnce>([&](int some) {
      uint32_t key[kAtOnce][2][kParts][4];
      for_all<kAtOnce, 2, kParts>([&](int i, int h, int j) {
        const uint16_t* row = tail + (first + 2 * (some * kAtOnce + i) + h) * side.tail_stride_t;
        start_loading<16>(row + (channel(j) < side.head_dim ? channel(j) : 0), key[i][h][j]);
      });
      for_all<kAtOnce, kParts>([&](int i, int j) {
        const uint32_t exists = channel(j) < side.head_dim ? 0xffffffffu : 0;
        const uint4 low = masked(key[i][0][j], exists), high = masked(key[i][1][j], exists);
        for_all<kColumnTiles>([&](int n) {
          multiply_dense(side.tail_dtype, sum[some * kAtOnce + i][n], low, high,
                         plain_query<Shape>(plain_query_, n, channel(j), g_));
        });
      });
    });
  }

  // The first of the eight channels that a lane has in a part.
  __device__ __forceinline__ int channel(int part) const { return 32 * part + 8 * t_; }

  const unsigned char* plain_query_;
  int g_, t_, tail_slot_, first_of_tail_, end_of_codes_;
  uint32_t codes_at_;  // in a stage: of the lane's matrix row
  uint32_t query_[kColumnTiles][kParts][4];
};

}  // namespace hf_kvquant::cuda
