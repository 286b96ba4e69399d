// Attends to the tokens of dense windows, which are kept unquantised in the tail of a side. WarpAttention::add adds a
// tile of them to what a warp has.
//
// There are few such tokens, and the time goes into waiting for memory and for instructions that are in no cache. So a
// warp takes its tile while its first copies are on their way. It starts all loads at once, without a condition (see
// start_loading), and tensor cores multiply keys by the untransformed query and values by weights. A weight is the sum
// of two 16-bit numbers, so that nothing of its float32 is lost that a result could show.
//
// While loads of what exists stood under a condition, the compiler made each wait for the one before: in batches of
// many short sequences, a third of all samples of the profiler waited for these, and for the barrier behind them. 424
// sequences of 0.5k to 2k tokens took 365 us with int4 instead of 284, 358 with k8v4 instead of 289, and 64 x 8k with
// int4 175 instead of 166 (H200, 2026-11). At that time, 4 + 28 tokens took 7 us at 64 x 8k, 12 behind the codes, since
// other warps waited for those that had a tile, and 24 as separate thread blocks.
#pragma once

#include "query.cuh"

namespace hf_kvquant::cuda {

constexpr int kWeightParts = 2;  // 16-bit numbers whose sum is a weight

// The dense tokens of a sequence, numbered in this order: first tokens that have left the window of the first query,
// then that window and what later queries see, padding included.
struct DenseTokens {
  int num_first, start, newest;  // the last two: the first token, and the first one of the window
  int count;

  __device__ __forceinline__ DenseTokens(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds,
                                         const Span& span)
      : start(max(bounds.start, 0)) {
    newest = min(span.dense_from, bounds.num_tokens(plan));
    num_first = max(min(start + params.sink_length, newest) - start, 0);
    count = num_first + bounds.num_tokens(plan) - newest;
  }

  // -1 beyond the last.
  __device__ __forceinline__ int token(int number) const {
    if (number >= count) return -1;
    return number < num_first ? start + number : newest + (number - num_first);
  }
};

// The first of a warp's tiles of dense tokens. Tiles are assigned to the warps of all parts in turn.
__device__ __forceinline__ int first_tile(const DecodePlan& plan, const Segment& segment, int warp) {
  return (segment.part << plan.warps_log2) + warp;
}

// The rows of a side that a warp takes: each lane of a half of the warp knows the place of one token.
struct DenseRows {
  const uint16_t* row;  // of this lane's token: in the new keys or values if it is new, else in the tail
  uint16_t* target;     // of a new token, in the tail

  DenseRows() = default;
  __device__ DenseRows(const Side& side, const Dense& dense, const Segment& segment, int tail_slot, int token,
                       int start, int dense_first, int first_new) {
    target = static_cast<uint16_t*>(side.tail) + (tail_slot * side.tail_stride_b + segment.h * side.tail_stride_h +
                                                  tail_row(side, token, start, dense_first) * side.tail_stride_t);
    row = target;
    if (token >= first_new) {
      row = static_cast<const uint16_t*>(dense.data) + segment.b * dense.stride_b + segment.h * dense.stride_h +
            (token - first_new) * dense.stride_t;
    }
  }

  // For the token of another lane. All lanes call this together.
  __device__ __forceinline__ const uint16_t* row_of(int lane) const { return from_lane(row, lane); }
  __device__ __forceinline__ uint16_t* target_of(int lane) const { return from_lane(target, lane); }

 private:
  template <class Pointer>
  static __device__ __forceinline__ Pointer from_lane(Pointer pointer, int lane) {
    return reinterpret_cast<Pointer>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
  }
};

// A tile of 16 dense tokens, from number `first` on. Lane (g, t) holds keys of tokens g and g + 8, channels 8t ... 8t + 7
// of every 32, and values of tokens 2t, 2t + 1, 2t + 8 and 2t + 9, in the channels of its rows of output tiles
// (ValueWords). Where a token does not exist, the lane has the last one, whose scores and values do not count; where
// channels do not exist, it has the first ones: of keys they are masked, of values they lead to outputs that nobody reads.
template <class Shape>
class DenseTile {
  using Channels = ValueWords<Shape::kValue, Shape::kValueRowBytes>;
  static constexpr int kKeyChunks = Shape::kHeadDim / 32;
  static constexpr int kWords = Channels::kTilesPerChunk;  // of a value's chunk: one for each output tile

 public:
  // Else rows are loaded when they are used: there are too few registers.
  static constexpr bool kIsLoadedAtOnce = Shape::kRows <= 8 && Shape::kHeadDim <= 128;
  int token[2];  // that the lane has keys of, -1 beyond the last

  // Starts loading: all lanes call this together. `first` is not beyond the last.
  __device__ __forceinline__ void load(const DecodeParams& params, const NewTokens& new_tokens, const DecodePlan& plan,
                                       const Segment& segment, const Bounds& bounds, const DenseTokens& tokens,
                                       int first, int lane) {
    g_ = lane >> 2, t_ = lane & 3;
    num_key_channels_ = params.key_side.head_dim, num_value_channels_ = params.value_side.head_dim;
    const int own = tokens.token(first + lane % kTailTileTokens);
    const int exists = tokens.token(min(first + lane % kTailTileTokens, tokens.count - 1));
    const int slot = tail_slot<Shape::kIsPaged>(plan, segment.b), start = tokens.start, sinks = params.sink_length;
    const Side &keys = params.key_side, &values = params.value_side;
    first_new_ = plan.appends ? bounds.length - new_tokens.q_len : INT32_MAX;
    key_rows_ = DenseRows(keys, new_tokens.key, segment, slot, exists, start, sinks, first_new_);
    value_rows_ = DenseRows(values, new_tokens.value, segment, slot, exists, start, sinks, first_new_);
    has_new_ = __any_sync(kAllLanes, own >= first_new_);
    for_all<2>([&](int h) {
      key_row_[h] = key_rows_.row_of(g_ + 8 * h);
      token[h] = __shfl_sync(kAllLanes, own, g_ + 8 * h);
      if constexpr (kIsLoadedAtOnce) for_all<kKeyChunks>([&](int j) { load_key(h, j, key_[h][j]); });
    });
    for_all<4>([&](int i) {
      value_row_[i] = value_rows_.row_of(number(i));
      value_token_[i] = __shfl_sync(kAllLanes, own, number(i));
      if constexpr (kIsLoadedAtOnce) {
        for_all<Channels::kChunks>([&](int chunk) { load_value(chunk, i, value_[chunk][i]); });
      }
    });
  }

  // query · key of all rows of `queries`, which are untransformed, [kRows][kHeadDim] of 16 bits.
  __device__ __forceinline__ void multiply_keys(Dtype dtype, const unsigned char* queries,
                                                float (&score)[Shape::kColumnTiles][4]) const {
    for_all<kKeyChunks>([&](int j) {
      const uint4 low = find_key(0, j), high = find_key(1, j);
      for_all<Shape::kColumnTiles>([&](int n) {
        multiply_dense(dtype, score[n], low, high, plain_query<Shape>(queries, n, key_channel(j), g_));
      });
    });
  }

  // Adds weights · values to output tiles: `weights` are operands of tokens 0 ... 7 and 8 ... 15. Values of tokens for
  // which `counts` is false count as 0, even NaN.
  template <Dtype kDtype, class Counts>
  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[Shape::kColumnTiles][kWeightParts][2],
                                                  Counts counts,
                                                  float (&output)[Shape::kColumnTiles][Channels::kTiles][4]) const {
    uint32_t mask[4];
    for_all<4>([&](int i) { mask[i] = counts(value_token_[i]) ? 0xffffffffu : 0; });
    for_all<Channels::kChunks>([&](int chunk) {
      uint32_t value[4][kWords];
      for_all<4>([&](int i) { find_value(chunk, i, value[i]); });
      for_all<kWords>([&](int w) {
        uint32_t x[4];
        for_all<4>([&](int i) { x[i] = value[i][w] & mask[i]; });
        const uint32_t low[2] = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410)};
        const uint32_t high[2] = {__byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632)};
        for_all<Shape::kColumnTiles, kWeightParts>([&](int n, int part) {
          float (&sum)[4] = output[n][chunk * kWords + w];
          const uint32_t (&operand)[2] = weights[n][part];
          if constexpr (kDtype == Dtype::bf16) {
            multiply_bfloats(sum, low[0], high[0], low[1], high[1], operand[0], operand[1]);
          } else {
            multiply_halves(sum, low[0], high[0], low[1], high[1], operand[0], operand[1]);
          }
        });
      });
    });
  }

  // Writes new tokens to the tails.
  __device__ __forceinline__ void store_new() const {
    if (!has_new_) return;
    for_all<2>([&](int h) {
      uint16_t* row = key_rows_.target_of(g_ + 8 * h);
      if (token[h] < first_new_) return;
      for_all<kKeyChunks>([&](int j) {
        const uint4 key = find_key(h, j);
        if (key_channel(j) < num_key_channels_) *reinterpret_cast<uint4*>(row + key_channel(j)) = key;
      });
    });
    for_all<4>([&](int i) {
      uint16_t* row = value_rows_.target_of(number(i));
      if (value_token_[i] < first_new_) return;
      for_all<Channels::kChunks>([&](int chunk) {
        const int c = value_channel(chunk);
        uint32_t value[kWords];
        find_value(chunk, i, value);
        if (c >= num_value_channels_) return;
        for_all<kWords>([&](int w) { reinterpret_cast<uint32_t*>(row + c)[w] = value[w]; });
      });
    });
  }

 private:
  // Of the lane's value `i`, within the tile.
  __device__ __forceinline__ int number(int i) const { return 8 * (i / 2) + 2 * t_ + i % 2; }
  __device__ __forceinline__ int key_channel(int chunk) const { return 32 * chunk + 8 * t_; }
  __device__ __forceinline__ int value_channel(int chunk) const { return Channels::channel(g_, chunk * kWords); }

  // Loads channels, or the first ones instead of those beyond the last.
  __device__ __forceinline__ void load_key(int h, int j, uint32_t (&words)[4]) const {
    start_loading<16>(key_row_[h] + (key_channel(j) < num_key_channels_ ? key_channel(j) : 0), words);
  }
  __device__ __forceinline__ uint4 find_key(int h, int j) const {
    const uint32_t exists = key_channel(j) < num_key_channels_ ? 0xffffffffu : 0;
    if constexpr (kIsLoadedAtOnce) return masked(key_[h][j], exists);
    uint32_t words[4];
    load_key(h, j, words);
    return masked(words, exists);
  }
  __device__ __forceinline__ void load_value(int chunk, int i, uint32_t (&words)[kWords]) const {
    const int c = value_channel(chunk);
    start_loading<4 * kWords>(value_row_[i] + (c < num_value_channels_ ? c : 0), words);
  }
  __device__ __forceinline__ void find_value(int chunk, int i, uint32_t (&words)[kWords]) const {
    if constexpr (kIsLoadedAtOnce) {
      for_all<kWords>([&](int w) { words[w] = value_[chunk][i][w]; });
    } else {
      load_value(chunk, i, words);
    }
  }

  int g_, t_, num_key_channels_, num_value_channels_;
  int first_new_;  // new token
  bool has_new_;
  int value_token_[4];
  DenseRows key_rows_, value_rows_;
  const uint16_t *key_row_[2], *value_row_[4];
  uint32_t key_[2][kIsLoadedAtOnce ? kKeyChunks : 1][4];
  uint32_t value_[kIsLoadedAtOnce ? Channels::kChunks : 1][4][kWords];
};

}  // namespace hf_kvquant::cuda
