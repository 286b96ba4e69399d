// Appends the new keys and values of a layer to their planes, bit for bit as reference.append. This file decides which
// warp takes which rows; quantize.cuh quantises a row.
//
// A row is one token of one head, eight channels per lane, so a warp holds several rows at once. Where rows have their
// own scales, a lane also takes kRows consecutive tokens: their loads overlap, and the scales of a group take one
// store. These rows are a tile, and a warp takes a few tiles of one head. Warps of a thread block take neighbouring
// heads, whose rows are contiguous in the model's own layout, tokens before heads. Where the heads of a token share a
// scale, a thread block takes the token; in granularity channel, it takes a block of tokens in one head.
//
// Each of these ways is a separate kernel, so that registers that one needs do not cost another warps. Keys and values
// share a launch if one kernel serves both, keys first. Tokens without room are skipped. Of more new tokens than a ring
// has rows, only the newest are written, so that no two are written to the same row.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../common/device.h"
#include "../common/quantize.cuh"
#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kNumWarps = 4;
constexpr int kMaxTilesPerWarp = 4;
constexpr int kMinWarps = 8192;  // below, fewer tiles per warp: three times what the largest GPUs hold at once
// Below, one token per lane: so many warps run at once or nearly, and the first store comes after few instructions. Of 16
// to 500 tokens of eight heads 3 us instead of 11 (H200, 2026-11, with instructions that are not in the cache).
constexpr int kMinPromptTokens = 16, kMinPromptWarps = 16384;

// Tokens per lane: as many as registers allow, since the overhead is the same for any number.
__host__ __device__ constexpr int rows_of_lane(bool is_prompt, Dtype dtype) {
  return !is_prompt ? 1 : dtype == Dtype::fp32 ? 4 : 8;
}

// One side of a call.
struct Job {
  Dense dense;
  Side side;
  KeyTransform transform;  // of keys
  int q_len;               // tokens of `dense`, the newest of the call
  bool copies_words;       // rows of `dense` and of the tail can be copied in words of 16 bytes
  int tiles_per_warp;
  unsigned num_ctas, ctas_per_sequence;  // thread blocks of the launch
};

struct Jobs {
  Job jobs[2];  // keys, values
  const int32_t* lengths;
  const int32_t* starts;  // nullptr: 0
  unsigned num_tail_ctas;  // the last thread blocks of the launch, which write tails
  int num_kv_heads, capacity, dense_first, residual_length;
  Laps laps;
  int max_length;  // see max_length_of
};

// How the 32 lanes of a warp are assigned to rows. Spare lanes have no row.
struct Lanes {
  int lanes_per_row, rows;               // rows side by side in a warp
  int lane, row, chunk;                  // of this lane: its row and place in it
  int lanes_per_group, group, position;  // its group and place in that

  __device__ explicit Lanes(const Side& side) {
    lanes_per_row = static_cast<unsigned>(side.head_dim) / kChunk;
    rows = divide_lanes(kLanes, lanes_per_row);
    lane = threadIdx.x % kLanes;
    row = divide_lanes(lane, lanes_per_row);
    chunk = lane - row * lanes_per_row;
    lanes_per_group = divide_lanes(lanes_per_row, side.num_groups);
    group = divide_lanes(chunk, lanes_per_group);
    position = chunk - group * lanes_per_group;
  }

  __device__ bool has_row() const { return row < rows; }
};

// The consecutive tokens of a lane in one head.
struct Tokens {
  unsigned slot, h;  // of the planes
  int64_t row;       // of the first in the planes
  int begin, end;  // those that are new and have room

  __device__ bool has_room(int r) const { return r >= begin && r < end; }
};

// --- storage type none

template <Dtype kDtype>
__device__ void store_values(uint8_t* row, Dtype target, int chunk, const Values<kDtype>& x) {
  if (target == Dtype::fp32) {
    float4* words = reinterpret_cast<float4*>(row) + 2 * chunk;
    words[0] = {x[0], x[1], x[2], x[3]};
    words[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
  uint4* words = reinterpret_cast<uint4*>(row) + chunk;
  if (target == kDtype) {
    *words = {x.words[0], x.words[1], x.words[2], x.words[3]};
    return;
  }
  *words = {narrow(target, x[0], x[1]), narrow(target, x[2], x[3]), narrow(target, x[4], x[5]),
            narrow(target, x[6], x[7])};
}

// --- scales of rows

// Stores the scales or zeros of a group, from the first of these tokens on.
template <int kRows>
__device__ void store_plane(half_bits* plane, int64_t stride_t, const half_bits (&values)[kRows],
                            const Tokens& tokens) {
  if constexpr (kRows > 1) {
    using Word = std::conditional_t<kRows == 4, uint2, uint4>;
    const bool is_whole = tokens.begin <= 0 && tokens.end >= kRows;
    if (is_whole && stride_t == 1 && reinterpret_cast<int64_t>(plane) % sizeof(Word) == 0) {
      uint32_t pairs[kRows / 2];
#pragma unroll
      for (int w = 0; w < kRows / 2; ++w) pairs[w] = values[2 * w] | static_cast<uint32_t>(values[2 * w + 1]) << 16;
      if constexpr (kRows == 4) {
        *reinterpret_cast<Word*>(plane) = {pairs[0], pairs[1]};
      } else {
        *reinterpret_cast<Word*>(plane) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (tokens.has_room(r)) plane[r * stride_t] = values[r];
  }
}

template <Storage kStorage, bool kIsSymmetric, Dtype kDtype, int kRows>
__device__ void quantize_rows(const Side& side, const Lanes& lanes, const Tokens& tokens,
                              const Values<kDtype> (&x)[kRows]) {
  StoredScale values[kRows];
  if (side.is_frozen) {
    const StoredScale frozen = load_scale<kIsSymmetric>(side, tokens.slot, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r] = frozen;
  } else {
    Extent<kDtype, kIsSymmetric> extents[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) extents[r] = Extent<kDtype, kIsSymmetric>::of(x[r]);
    compute_scales<kStorage>(extents, side.clip_ratio, lanes.lane, lanes.position, lanes.lanes_per_group, values);
  }
  half_bits scales[kRows], zeros[kRows];
  uint8_t* target = Codes<kStorage>::at(code_row(side, tokens.slot, tokens.h, tokens.row), lanes.chunk * kChunk);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    scales[r] = values[r].scale, zeros[r] = values[r].zero;
    const Codes<kStorage> codes = encode<kStorage, kIsSymmetric>(x[r], values[r]);
    if (tokens.has_room(r)) codes.store(target);
    target += side.codes_stride_t;
  }
  if (side.is_frozen || lanes.position != 0) return;
  store_plane(scale_at(side, tokens.slot, tokens.h, lanes.group, tokens.row), side.scale_stride_t, scales, tokens);
  if constexpr (!kIsSymmetric) {
    store_plane(zero_at(side, tokens.slot, tokens.h, lanes.group, tokens.row), side.zero_stride_t, zeros, tokens);
  }
}

// Loads the rows of one tile, from element `first` on.
template <bool kIsTransformed, Dtype kDtype, int kRows>
__device__ void load_tile(const Job& job, const Lanes& lanes, const LaneTransform<kChunk>& inverted, int64_t first,
                          int num_rows, Values<kDtype> (&x)[kRows]) {
  if constexpr (kDtype == Dtype::fp32) {
    load_widened(job.dense, first, num_rows, x);
  } else {
    load_rows(job.dense, first, num_rows, x);
  }
  if constexpr (kIsTransformed) transform_rows(job.transform, inverted, job.side.head_dim, lanes.chunk, x);
}

// Loads one tile, and stores its codes and scales.
template <bool kIsTransformed, Dtype kDtype, int kRows>
__device__ void append_tile(const Job& job, const Lanes& lanes, const LaneTransform<kChunk>& inverted,
                            const Tokens& tokens, int64_t first, int num_rows) {
  const Side& side = job.side;
  Values<kDtype> x[kRows];
  load_tile<kIsTransformed>(job, lanes, inverted, first, num_rows, x);
  if (side.storage == Storage::none) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!tokens.has_room(r)) continue;
      store_values(code_row(side, tokens.slot, tokens.h, tokens.row + r), side.dense_dtype, lanes.chunk, x[r]);
    }
    return;
  }
  with_format(side, [&](auto storage, auto is_symmetric) {
    quantize_rows<storage, is_symmetric>(side, lanes, tokens, x);
  });
}

// Appends one warp's tiles of a side whose rows have their own scales, a frozen one, or none.
template <bool kIsTransformed, Dtype kDtype, int kRows>
__device__ void append_rows(const Jobs& jobs, const Job& job, unsigned cta) {
  const Dense& dense = job.dense;
  const Lanes lanes(job.side);
  const unsigned b = cta / job.ctas_per_sequence;
  const unsigned unit = (cta - b * job.ctas_per_sequence) * kNumWarps + threadIdx.x / kLanes;
  const unsigned part = unit / jobs.num_kv_heads, h = unit - part * jobs.num_kv_heads;
  const int tokens_per_tile = lanes.rows * kRows;
  const int start = part * job.tiles_per_warp * tokens_per_tile;
  const int end = min(job.q_len, start + job.tiles_per_warp * tokens_per_tile);

  // New tokens that this lane may read, and those among them with room in the cache.
  const int64_t before = int64_t{jobs.lengths[b]} - job.q_len;  // position of the first token
  const int count = lanes.has_row() ? job.q_len : 0;
  const int first_with_room = static_cast<int>(min(max(-before, int64_t{0}), int64_t{count}));
  const int end_of_room = static_cast<int>(min(max(jobs.max_length - before, int64_t{0}), int64_t{count}));
  const int64_t origin = b * dense.stride_b + h * dense.stride_h + lanes.chunk * kChunk;
  LaneTransform<kChunk> inverted;
  if constexpr (kIsTransformed) {
    inverted = {job.transform, job.side.head_dim, static_cast<int>(h), lanes.chunk * kChunk};
    inverted.invert(job.transform);
  }
#pragma unroll 1
  for (int tile = start; tile < end; tile += tokens_per_tile) {
    const int i = tile + lanes.row * kRows;
    // With several tokens per lane, their rows are consecutive, which excludes rings and pages (see `append`).
    const int position = static_cast<int>(before) + i;
    const int64_t row = kRows > 1 ? before + i : jobs.laps.row(position);
    const bool has_room = i >= first_with_room && i < end_of_room;  // the page table has no more
    const unsigned slot = kRows > 1 || !has_room ? b : jobs.laps.slot(b, position);
    const Tokens tokens = {slot, h, row, first_with_room - i, end_of_room - i};
    append_tile<kIsTransformed, kDtype, kRows>(job, lanes, inverted, tokens, origin + i * dense.stride_t, count - i);
  }
}

// --- scales of tokens

using Wide = Values<Dtype::fp32>;

// One token of one side, for a thread block: its heads are divided among the warps.
struct Token {
  const Jobs& jobs;
  const Job& job;
  Lanes lanes;
  unsigned b, i;
  bool has_room;
  int slot, row;  // of the planes, if there is room

  __device__ Token(const Jobs& jobs, const Job& job, unsigned cta) : jobs(jobs), job(job), lanes(job.side) {
    b = cta / job.q_len;
    i = cta - b * job.q_len;
    const int64_t t = int64_t{jobs.lengths[b]} - job.q_len + i;
    has_room = t >= 0 && t < jobs.max_length;
    row = jobs.laps.row(static_cast<int>(t));
    slot = has_room ? jobs.laps.slot(b, static_cast<int>(t)) : 0;
  }

  // Calls `use` with the channels of this lane in each head that it takes.
  template <class Use>
  __device__ void for_heads(Use use) const {
    const Dense& dense = job.dense;
    for (int first = threadIdx.x / kLanes * lanes.rows; first < jobs.num_kv_heads; first += kNumWarps * lanes.rows) {
      const int h = first + lanes.row;
      const bool has_head = lanes.has_row() && h < jobs.num_kv_heads;
      const int64_t row = b * dense.stride_b + h * dense.stride_h + i * dense.stride_t;
      Values<Dtype::fp32> x = {};
      if (has_head) x = load_widened(dense, row + lanes.chunk * kChunk);
      // Lanes without a head take part, too: all lanes transform a key together.
      if (!is_identity(job.transform)) {
        x = transformed(job.transform, job.side.head_dim, has_head ? h : 0, x, lanes.chunk);
      }
      if (has_head) use(h, x);
    }
  }
};

// The rows are read twice, the second time from the L1 cache.
template <Storage kStorage, bool kIsSymmetric>
__device__ void quantize_token(const Token& token) {
  const Side& side = token.job.side;
  using TokenExtent = Extent<Dtype::fp32, kIsSymmetric>;
  TokenExtent extents[1] = {TokenExtent::empty()};
  token.for_heads([&](int, const Wide& x) { extents[0].include(TokenExtent::of(x)); });
  const int lane = token.lanes.lane;
  join_lanes(extents, lane, lane, kLanes);
  __shared__ TokenExtent of_warps[kNumWarps];
  if (lane == 0) of_warps[threadIdx.x / kLanes] = extents[0];
  __syncthreads();
  for (int w = 0; w < kNumWarps; ++w) extents[0].include(of_warps[w]);

  const StoredScale value = compute_scale<kStorage>(extents[0].range(), side.clip_ratio);
  if (threadIdx.x == 0) store_scale<kIsSymmetric>(side, value, token.slot, 0, 0, token.row);
  token.for_heads([&](int h, const Wide& x) {
    uint8_t* target = Codes<kStorage>::at(code_row(side, token.slot, h, token.row), token.lanes.chunk * kChunk);
    encode<kStorage, kIsSymmetric>(x, value).store(target);
  });
}

__device__ void append_token(const Jobs& jobs, const Job& job, unsigned cta) {
  const Token token(jobs, job, cta);
  if (!token.has_room) return;
  // Storage::none has no scales to share.
  with_format(job.side, [&](auto storage, auto is_symmetric) { quantize_token<storage, is_symmetric>(token); });
}

// --- scales of channels, and tails

// What an append does to the tail of a sequence, in positions. Tokens without room do not count.
struct TailUpdate {
  int start;        // the first token that is not padding, at most max_length, so that sums fit an int
  int first_new;    // may be negative
  int old, length;  // tokens before and after
  int tail_from;
  int begin, end;  // tail_begin before and after

  __device__ TailUpdate(const Jobs& jobs, const Job& job, unsigned b)
      : start(jobs.starts == nullptr ? 0 : min(max(jobs.starts[b], 0), jobs.max_length)),
        first_new(jobs.lengths[b] - job.q_len),
        old(max(first_new, 0)),
        length(min(jobs.lengths[b], jobs.max_length)),
        tail_from(jobs.laps.tail_from(static_cast<int>(b), old)),
        begin(tail_begin(job.side, old, jobs.residual_length, tail_from)),
        end(tail_begin(job.side, max(length, 0), jobs.residual_length, tail_from)) {}
};

// All threads of a thread block copy the new tokens of one head that the tail keeps.
template <class Word>
__device__ void copy_words_to_tail(const Jobs& jobs, const Job& job, const TailUpdate& update, int64_t b, int64_t h) {
  const Side& side = job.side;
  const Dense& dense = job.dense;
  constexpr int kWordBytes = sizeof(Word);
  const int bytes = side.tail_dtype == Dtype::fp32 ? 4 : 2, words_of_row = side.head_dim * bytes / kWordBytes;
  const char* const from = static_cast<const char*>(dense.data) + (b * dense.stride_b + h * dense.stride_h) * bytes;
  const int64_t slot = jobs.laps.tail_slot(static_cast<int>(b));
  char* const to = static_cast<char*>(side.tail) + (slot * side.tail_stride_b + h * side.tail_stride_h) * bytes;
  const auto copy = [&](int begin, int end) {
    for (int i = threadIdx.x; i < (end - begin) * words_of_row; i += kNumWarps * kLanes) {
      const int row = i / words_of_row, word = i - row * words_of_row, t = begin + row;
      const int64_t source = int64_t{t - update.first_new} * dense.stride_t * bytes;
      const int64_t target = int64_t{tail_row(side, t, update.start, jobs.dense_first)} * side.tail_stride_t * bytes;
      reinterpret_cast<Word*>(to + target)[word] = reinterpret_cast<const Word*>(from + source)[word];
    }
  };
  const int first = max(tail_kept(side, update.length), update.old);
  copy(first, update.length);
  copy(max(update.start, update.old), min(update.start + jobs.dense_first, first));
}

__device__ void copy_to_tail(const Jobs& jobs, const Job& job, const TailUpdate& update, int64_t b, int64_t h) {
  if (job.copies_words) {
    copy_words_to_tail<uint4>(jobs, job, update, b, h);
  } else if (job.side.tail_dtype == Dtype::fp32) {
    copy_words_to_tail<uint32_t>(jobs, job, update, b, h);
  } else {
    copy_words_to_tail<uint16_t>(jobs, job, update, b, h);
  }
}

// Quantises the block of tokens from `begin` on, in one head. The first tokens, kept dense, count as padding: their
// codes are never read.
__device__ void quantize_block(const Jobs& jobs, const Job& job, const TailUpdate& update, int64_t b, int64_t h,
                               int begin) {
  const BlockOfTokens tokens = {begin,
                                jobs.laps.slot(static_cast<int>(b), begin),
                                jobs.laps.row(begin),
                                update.first_new,
                                update.start + jobs.dense_first,
                                jobs.laps.tail_slot(static_cast<int>(b)),
                                jobs.dense_first};
  __shared__ float2 ranges[kNumWarps][kMaxCudaHeadDim];
  const BlockWarps warps = {static_cast<int>(threadIdx.x / kLanes), kNumWarps, ranges[0], kMaxCudaHeadDim};
  if (job.side.tail_dtype == Dtype::fp32) {
    quantize_columns<true>(job.side, job.transform, job.dense, b, h, tokens, warps);
  } else {
    quantize_columns<false>(job.side, job.transform, job.dense, b, h, tokens, warps);
  }
}

// One thread block's part of a head. The first quantises the blocks that begin in the tail, and then writes the new
// tail over the rows that it has read for them. Each of the others quantises one block of new tokens only.
__device__ void append_blocks(const Jobs& jobs, const Job& job, unsigned cta) {
  const unsigned parts = job.q_len / kBlockSize + 1, head = cta / parts, part = cta - head * parts;
  const unsigned b = head / jobs.num_kv_heads, h = head - b * jobs.num_kv_heads;
  const TailUpdate update(jobs, job, b);
  if (update.length <= update.old) return;
  // In a ring, older blocks would share rows with newer ones.
  const int oldest = max(update.begin, update.end - jobs.capacity);
  if (part > 0) {
    const int begin = max(update.begin, (update.old + kBlockSize - 1) / kBlockSize * kBlockSize) +
                      static_cast<int>(part - 1) * kBlockSize;
    if (begin >= oldest && begin < update.end) quantize_block(jobs, job, update, b, h, begin);
    return;
  }
  for (int begin = oldest; begin < min(update.end, update.old); begin += kBlockSize) {
    quantize_block(jobs, job, update, b, h, begin);
  }
  copy_to_tail(jobs, job, update, b, h);
}

// Writes the tail of a side that quantises every token at once: each thread block that of a head of a sequence.
__device__ void append_tail(const Jobs& jobs, unsigned cta) {
  const Job& job = jobs.jobs[cta % 2];
  const unsigned head = cta / 2, b = head / jobs.num_kv_heads;
  if (job.side.tail == nullptr || job.side.has_channel_scales) return;
  const TailUpdate update(jobs, job, b);
  if (update.length > update.old) copy_to_tail(jobs, job, update, b, head - b * jobs.num_kv_heads);
}

// The same in a launch of its own, for rings.
__global__ void __launch_bounds__(kNumWarps* kLanes) append_tails(const __grid_constant__ Jobs jobs) {
  append_tail(jobs, blockIdx.x);
}

// --- rows of more than 256 channels, for latents

// The channels of this lane are a pair of chunks.
template <Storage kStorage, bool kIsSymmetric>
__device__ void quantize_wide_row(const Side& side, int lane, bool has_channels, const Wide (&x)[2], int slot, int h,
                                  int row) {
  using RowExtent = Extent<Dtype::fp32, kIsSymmetric>;
  const int lanes_per_group = divide_lanes(side.head_dim / (2 * kChunk), side.num_groups);
  const int group = divide_lanes(lane, lanes_per_group), position = lane - group * lanes_per_group;
  RowExtent extents[1] = {RowExtent::of(x[0])};
  extents[0].include(RowExtent::of(x[1]));
  join_lanes(extents, lane, position, lanes_per_group);
  const StoredScale value = compute_scale<kStorage>(extents[0].range(), side.clip_ratio);
  if (!has_channels) return;
  if (position == 0) store_scale<kIsSymmetric>(side, value, slot, h, group, row);
  for_all<2>([&](int k) {
    uint8_t* const target = Codes<kStorage>::at(code_row(side, slot, h, row), (2 * lane + k) * kChunk);
    encode<kStorage, kIsSymmetric>(x[k], value).store(target);
  });
}

// Appends one row, 16 channels a lane.
__device__ void append_wide_row(const Jobs& jobs, const Job& job, unsigned cta) {
  constexpr int kOfLane = 2 * kChunk;
  const Side& side = job.side;
  const int lane = threadIdx.x % kLanes, c = lane * kOfLane;
  const unsigned b = cta / job.ctas_per_sequence;
  const unsigned unit = (cta - b * job.ctas_per_sequence) * kNumWarps + threadIdx.x / kLanes;
  const unsigned i = unit / jobs.num_kv_heads, h = unit - i * jobs.num_kv_heads;
  const int64_t t = int64_t{jobs.lengths[b]} - job.q_len + i;
  if (i >= job.q_len || t < 0 || t >= jobs.max_length) return;
  const int slot = jobs.laps.slot(b, static_cast<int>(t)), row = jobs.laps.row(static_cast<int>(t));
  const bool has_channels = c < side.head_dim;
  Wide x[2] = {};
  if (has_channels) {
    const int64_t first = b * job.dense.stride_b + h * job.dense.stride_h + i * job.dense.stride_t + c;
    x[0] = load_widened(job.dense, first);
    x[1] = load_widened(job.dense, first + kChunk);
  }
  if (!is_identity(job.transform)) {
    LaneTransform<kOfLane> inverted(job.transform, side.head_dim, h, c);
    inverted.invert(job.transform);
    float channels[1][kOfLane];
    for_all<kOfLane>([&](int k) { channels[0][k] = x[k / kChunk][k % kChunk]; });
    transform_keys(job.transform, inverted, side.head_dim, lane, lane, channels);
    for_all<kOfLane>([&](int k) { x[k / kChunk].words[k % kChunk] = __float_as_uint(channels[0][k]); });
  }
  if (side.storage == Storage::none) {
    for_all<2>([&](int k) {
      if (has_channels) store_values(code_row(side, slot, h, row), side.dense_dtype, 2 * lane + k, x[k]);
    });
    return;
  }
  with_format(side, [&](auto storage, auto is_symmetric) {
    quantize_wide_row<storage, is_symmetric>(side, lane, has_channels, x, slot, h, row);
  });
}

// --- kernels

// How a side is appended.
enum class Way { rows, transformed_rows, wide_rows, tokens, blocks };

Way way_of(const Job& job) {
  if (job.side.head_dim > kMaxCudaHeadDim) return Way::wide_rows;
  if (job.side.has_channel_scales) return Way::blocks;
  if (job.side.is_shared_by_heads && !job.side.is_frozen) return Way::tokens;
  return is_identity(job.transform) ? Way::rows : Way::transformed_rows;
}

// The dtype in which rows are held. A transform returns float32, and few tokens are widened to it: they wait for memory
// in any dtype.
Dtype dtype_of_rows(const Job& job, bool is_prompt) {
  return is_prompt && way_of(job) == Way::rows ? job.dense.dtype : Dtype::fp32;
}

// Both sides of a launch go the same way, except that untransformed values may go with transformed keys: values of a
// prompt take 6 % longer in a launch of their own (H200, 2026-11).
template <Way kWay, bool kIsPrompt>
__global__ void __launch_bounds__(kNumWarps* kLanes) append_sides(const __grid_constant__ Jobs jobs) {
  const unsigned num_ctas = gridDim.x - jobs.num_tail_ctas;
  if (blockIdx.x >= num_ctas) return append_tail(jobs, blockIdx.x - num_ctas);
  const bool is_value = blockIdx.x >= jobs.jobs[0].num_ctas;
  const Job& job = jobs.jobs[is_value];
  const unsigned cta = blockIdx.x - (is_value ? jobs.jobs[0].num_ctas : 0);
  if constexpr (kWay == Way::blocks) return append_blocks(jobs, job, cta);
  if constexpr (kWay == Way::tokens) return append_token(jobs, job, cta);
  if constexpr (kWay == Way::wide_rows) return append_wide_row(jobs, job, cta);
  constexpr int kWideRows = rows_of_lane(kIsPrompt, Dtype::fp32);
  if constexpr (kWay == Way::transformed_rows) {
    if (!is_value) return append_rows<true, Dtype::fp32, kWideRows>(jobs, job, cta);
  }
  if constexpr (kIsPrompt) {
    constexpr int kNarrowRows = rows_of_lane(true, Dtype::bf16);
    if (job.dense.dtype == Dtype::fp16) return append_rows<false, Dtype::fp16, kNarrowRows>(jobs, job, cta);
    if (job.dense.dtype == Dtype::bf16) return append_rows<false, Dtype::bf16, kNarrowRows>(jobs, job, cta);
  }
  append_rows<false, Dtype::fp32, kWideRows>(jobs, job, cta);
}

using AppendKernel = void (*)(Jobs);

AppendKernel kernel_of(Way way, bool is_prompt) {
  switch (way) {
    case Way::rows: return is_prompt ? append_sides<Way::rows, true> : append_sides<Way::rows, false>;
    case Way::transformed_rows:
      return is_prompt ? append_sides<Way::transformed_rows, true> : append_sides<Way::transformed_rows, false>;
    case Way::tokens: return append_sides<Way::tokens, false>;
    case Way::wide_rows: return append_sides<Way::wide_rows, false>;
    case Way::blocks: break;
  }
  return append_sides<Way::blocks, false>;
}

// Runs before tokens are quantised with a frozen scale: a value that is not finite makes the scale of its sequence NaN,
// for all tokens of the sequence. A separate kernel, so that the next one reads the new scale.
__global__ void __launch_bounds__(kNumWarps* kLanes) spoil_frozen_scales(const __grid_constant__ Jobs jobs) {
  const Job& job = jobs.jobs[blockIdx.x % 2];
  const Token token(jobs, job, blockIdx.x / 2);
  if (!job.side.is_frozen || !token.has_room) return;
  token.for_heads([&](int, const Wide& x) {
    if (isfinite(Extent<Dtype::fp32, true>::of(x).high)) return;
    *scale_at(job.side, token.slot, 0, 0, 0) = kHalfNan;
    if (!job.side.is_symmetric) *zero_at(job.side, token.slot, 0, 0, 0) = kHalfNan;
  });
}

void check_wide_rows(const Side& side, int num_kv_heads) {
  const int of_group = side.head_dim / side.num_groups;
  const bool is_shared = side.is_shared_by_heads && num_kv_heads > 1;
  if (side.has_channel_scales || side.is_frozen || is_shared || of_group % 16 != 0) {
    throw std::invalid_argument("append: rows of more than " + std::to_string(kMaxCudaHeadDim) +
                                " channels must have scales of their own, of 16 channels or more, for the CUDA "
                                "kernels, got others. Use granularity 'head' or 'group'.");
  }
}

// A job with only its newest tokens, at most `most`.
Job newest(Job job, int most) {
  const int num_left_out = std::max(job.q_len - most, 0);
  const int bytes = job.dense.dtype == Dtype::fp32 ? 4 : 2;
  job.dense.data = static_cast<const char*>(job.dense.data) + num_left_out * job.dense.stride_t * bytes;
  job.q_len -= num_left_out;
  return job;
}

// Whether every row starts at a multiple of 16 bytes. The stride of an axis of size 1 does not matter.
bool has_aligned_rows(const Dense& dense, const AppendParams& params) {
  const int64_t elements = (params.batch > 1 ? dense.stride_b : 0) | (params.num_kv_heads > 1 ? dense.stride_h : 0) |
                           (params.q_len > 1 ? dense.stride_t : 0);
  const int64_t bytes = elements * (dense.dtype == Dtype::fp32 ? 4 : 2);
  return (reinterpret_cast<int64_t>(dense.data) | bytes) % 16 == 0;
}

Job job_of(const AppendParams& params, const Dense& dense, const Side& side, const KeyTransform& transform) {
  const int64_t elements = side.tail_stride_b | side.tail_stride_h | side.tail_stride_t | side.head_dim;
  const int64_t tail = reinterpret_cast<int64_t>(side.tail) | elements * (side.tail_dtype == Dtype::fp32 ? 4 : 2);
  return {dense, side, transform, params.q_len, has_aligned_rows(dense, params) && tail % 16 == 0, 1, 0, 0};
}

// Whether lanes take several tokens, whose rows must follow each other. In rings and pages they do not: looking for the
// end of one among the tokens of a lane made every prompt 2 to 8 % slower (H200, 2026-11).
bool is_prompt_of(const AppendParams& params) {
  const int64_t num_rows = int64_t{2} * params.batch * params.num_kv_heads * params.q_len;
  const int64_t num_warps = num_rows * params.key_side.head_dim / (kLanes * kChunk);
  return !params.is_ring && params.page_table == nullptr && params.q_len >= kMinPromptTokens &&
         num_warps >= kMinPromptWarps && has_aligned_rows(params.key, params) && has_aligned_rows(params.value, params);
}

}  // namespace

void append(const AppendParams& params, void* stream) {
  const bool is_prompt = is_prompt_of(params);
  const int q_len = params.q_len;
  const Jobs all = {{job_of(params, params.key, params.key_side, params.key_transform),
                     job_of(params, params.value, params.value_side, {})},
                    params.lengths,
                    params.starts,
                    0,
                    params.num_kv_heads,
                    params.capacity,
                    params.sink_length,
                    params.residual_length,
                    laps_of(params),
                    max_length_of(params)};
  // At most `capacity` of the newest tokens get rows in a ring. Blocks of tokens and tails may take older ones.
  const int num_rows = params.is_ring ? std::min(q_len, params.capacity) : q_len;
  Jobs of_rows = all;
  for (Job& job : of_rows.jobs) job = newest(job, num_rows);
  Jobs jobs = of_rows;
  if (params.key_side.has_channel_scales) jobs.jobs[0] = all.jobs[0];
  int64_t num_ctas[2];
  for (int side = 0; side < 2; ++side) {
    Job& job = jobs.jobs[side];
    int64_t ctas_per_sequence = job.q_len;
    if (way_of(job) == Way::blocks) {
      ctas_per_sequence = int64_t{params.num_kv_heads} * (job.q_len / kBlockSize + 1);
    } else if (way_of(job) == Way::wide_rows) {
      check_wide_rows(job.side, params.num_kv_heads);
      ctas_per_sequence = (int64_t{params.num_kv_heads} * job.q_len + kNumWarps - 1) / kNumWarps;
    } else if (way_of(job) != Way::tokens) {
      const int64_t tokens_per_tile =
          kLanes / (job.side.head_dim / kChunk) * rows_of_lane(is_prompt, dtype_of_rows(job, is_prompt));
      const int64_t tiles_per_head = (job.q_len + tokens_per_tile - 1) / tokens_per_tile;
      const int64_t num_tiles = 2 * params.batch * params.num_kv_heads * tiles_per_head;
      job.tiles_per_warp = static_cast<int>(std::clamp<int64_t>(num_tiles / kMinWarps, 1, kMaxTilesPerWarp));
      const int64_t warps_per_head = (tiles_per_head + job.tiles_per_warp - 1) / job.tiles_per_warp;
      ctas_per_sequence = (warps_per_head * params.num_kv_heads + kNumWarps - 1) / kNumWarps;
    }
    job.ctas_per_sequence = static_cast<unsigned>(ctas_per_sequence);
    num_ctas[side] = params.batch * ctas_per_sequence;
  }
  const int num_threads = kNumWarps * kLanes;
  if (params.key_side.is_frozen || params.value_side.is_frozen) {
    launch("append", spoil_frozen_scales, int64_t{2} * params.batch * num_rows, num_threads, 0, stream, of_rows);
  }
  const Way ways[] = {way_of(jobs.jobs[0]), way_of(jobs.jobs[1])};
  const auto has_rows_and_tail = [](const Side& side) { return side.tail != nullptr && !side.has_channel_scales; };
  const bool has_tails = has_rows_and_tail(params.key_side) || has_rows_and_tail(params.value_side);
  const int64_t num_tails = has_tails ? int64_t{2} * params.batch * params.num_kv_heads : 0;
  const auto launch_ctas = [&](Way way, int64_t of_keys, int64_t of_values, int64_t of_tails) {
    jobs.jobs[0].num_ctas = static_cast<unsigned>(of_keys), jobs.num_tail_ctas = static_cast<unsigned>(of_tails);
    launch("append", kernel_of(way, is_prompt), of_keys + of_values + of_tails, num_threads, 0, stream, jobs);
  };
  // In a ring, tails may take tokens that rows do not.
  const int64_t of_same = params.is_ring ? 0 : num_tails;
  if (ways[0] == ways[1] || (ways[0] == Way::transformed_rows && ways[1] == Way::rows)) {
    launch_ctas(ways[0], num_ctas[0], num_ctas[1], of_same);
  } else {
    launch_ctas(ways[0], num_ctas[0], 0, 0);
    launch_ctas(ways[1], 0, num_ctas[1], of_same);
  }
  if (of_same < num_tails) launch("append", append_tails, num_tails, num_threads, 0, stream, all);
}

}  // namespace hf_kvquant::cuda
