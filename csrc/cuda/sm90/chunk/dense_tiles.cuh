// Tiles with tokens that are no codes: tiles of the tail, of a chunk, and of copies (shape.cuh). They are the same for
// all row tiles of a head. So `fill_dense` fills each once, in a launch before, and thread blocks that attend only copy
// them. With a scratch, tiles of new tokens alone are filled like those of codes (are_copied).
#pragma once

#include "../../attend/combine.cuh"
#include "../../common/transform.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

constexpr int kDenseThreads = 1024;  // one thread block a multiprocessor, as half of them with twice the registers

__device__ __forceinline__ bool is_finite_bits(uint32_t magnitude) { return magnitude < 0x7f800000u; }

__device__ __forceinline__ uint32_t magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The exponent of a tile whose magnitudes have this bound. `bits` as of kTileBits.
__device__ __forceinline__ int exponent_of(uint32_t bound, int bits) {
  return bound == 0 ? 0 : max(static_cast<int>(bound >> 23) - 127 - (bits - 1), -100);
}

// 2^exponent.
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// How many tokens are stored of those that attention is to.
__device__ __forceinline__ int num_stored_of(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds) {
  const int num_tokens = bounds.num_tokens(plan);
  return params.is_chunk ? min(max(bounds.length - params.q_len, 0), num_tokens) : num_tokens;
}

// The tiles of a side with tokens that are no codes: of the first tokens, then of the newest and of copies.
template <class Shape>
struct DenseTiles {
  int first, end_of_first, newest, end;

  // `num_stored` tokens are stored.
  __device__ __forceinline__ DenseTiles(const Side& side, const Tail& tail, int num_stored, const Copies& copies) {
    constexpr int kTileTokens = Shape::kTileTokens;
    const bool has_first = side.tail != nullptr && tail.dense_first > 0;
    const int end_of_all = min(tail.start + tail.dense_first, copies.num_tokens);
    first = tail.start / kTileTokens;
    end_of_first = has_first ? (end_of_all + kTileTokens - 1) / kTileTokens : first;
    end = (copies.end() + kTileTokens - 1) / kTileTokens;
    const int begin = min(tail.begin, num_stored);
    // Thread blocks have a step even where there is no token: such a tile is no dense one, since nobody fills it.
    newest = begin < copies.end() ? begin / kTileTokens : max(end, 1);
  }

  __device__ __forceinline__ bool has(int step) const {
    return step >= newest || (step >= first && step < end_of_first);
  }

  // A tile's place in the workspace, and the other way round; there may be no such tile.
  __device__ __forceinline__ int place(int step, int most_first) const {
    return step >= newest ? most_first + step - newest : step - first;
  }
  __device__ __forceinline__ int step(int place, int most_first) const {
    return place < most_first ? first + place : newest + (place - most_first);
  }
};

// Where the tiles of one side are in the workspace, of the sequence and head of a thread block: the dense ones, or all.
template <class Shape>
struct TilePlaces {
  unsigned char* tiles;
  TileNotes* notes;

  __device__ __forceinline__ TilePlaces(const DecodePlan& plan, float* workspace, bool is_key) {
    const int keys = Shape::kIsStreamed ? plan.scratch_tiles : plan.dense[0].count();
    const int values = Shape::kIsStreamed ? plan.scratch_tiles : plan.dense[1].count();
    const int64_t all = int64_t{gridDim.y} * gridDim.z, head = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
    const int64_t at = is_key ? head * keys : all * keys + head * values;
    unsigned char* const begin = reinterpret_cast<unsigned char*>(workspace);
    tiles = begin + at * Shape::kTileBytes;
    notes = reinterpret_cast<TileNotes*>(begin + all * (keys + values) * Shape::kTileBytes) + at;
  }
};

// The tokens that any row of a sequence attends to.
__device__ __forceinline__ Span whole_span(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds) {
  Span span;
  span.end = bounds.num_tokens(plan);
  span.first_position = span.end - params.q_len;
  span.begin = max(bounds.start, 0);
  if (params.sliding_window > 0) span.begin = max(span.begin, span.first_position - params.sliding_window + 1);
  if (span.begin >= span.end) span.begin = span.end = 0;
  return span;
}

// The tail as the first query reads it.
__device__ __forceinline__ Tail first_tail(const DecodeParams& params, const DecodePlan& plan, const Bounds& bounds,
                                           const Side& side, int b) {
  const int num_stored = num_stored_of(params, plan, bounds);
  const int num_seen = params.is_chunk ? num_stored : max(num_stored - params.q_len + 1, 0);
  return {params, plan.laps, side, b, num_seen, num_stored, bounds.start};
}

// The maximum over all threads of the thread block.
__device__ __forceinline__ uint32_t largest_of_all(uint32_t x, uint32_t* shared) {
  x = __reduce_max_sync(kAllLanes, x);
  __syncthreads();  // numbers of the call before are read
  if (threadIdx.x % kLanes == 0) shared[threadIdx.x / kLanes] = x;
  __syncthreads();
  for_all<kDenseThreads / kLanes>([&](int i) { x = max(x, shared[i]); });
  return x;
}

// Loads words of memory, or zeros if `is_held` is false, without a branch.
template <int kBytes>
__device__ __forceinline__ void load_words_if(bool is_held, const void* from, uint32_t* words) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  for_all<kBytes / 4>([&](int w) { words[w] = 0; });
  if constexpr (kBytes == 16) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %4, 0; @p ld.global.v4.b32 {%0,%1,%2,%3}, [%5];}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
                 : "r"(static_cast<int>(is_held)), "l"(from));
  } else if constexpr (kBytes == 4) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p ld.global.b32 %0, [%2];}"
                 : "+r"(words[0])
                 : "r"(static_cast<int>(is_held)), "l"(from));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.v2.b32 {%0,%1}, [%3];}"
                 : "+r"(words[0]), "+r"(words[1])
                 : "r"(static_cast<int>(is_held)), "l"(from));
  }
}

// Whether a streamed tile has a chunk's own tokens alone, from number `number` on, and as they are. fill_scratch copies
// these like rows without codes: with few threads for a tile, a multiprocessor loads several at once.
__device__ __forceinline__ bool are_copied(const DecodeParams& params, const Dense& dense, bool is_key, int number) {
  return params.is_chunk && number >= 0 && dense.dtype != Dtype::fp32 &&
         !(is_key && !is_identity(params.key_transform));
}

// Each thread block fills one tile, each thread eight channels of some of its tokens. A key that is no code is
// transformed as it would be before it is quantised. Streamed tiles lie in the order of the sequence.
template <class Shape>
__global__ void __launch_bounds__(kDenseThreads)
    fill_dense(const __grid_constant__ DecodeParams params, const __grid_constant__ NewTokens new_tokens,
               const __grid_constant__ DecodePlan plan, float* workspace) {
  constexpr int kLanesOfToken = Shape::kHeadDim / kChunk, kTokens = kDenseThreads / kLanesOfToken;
  constexpr int kItems = Shape::kTileTokens / kTokens;
  static_assert(kItems * kTokens == Shape::kTileTokens && kLanesOfToken <= kLanes);
  __shared__ uint32_t shared[kDenseThreads / kLanes], bad[4];
  const bool is_key = static_cast<int>(blockIdx.x) < plan.dense[0].count();
  const int place = blockIdx.x - (is_key ? 0 : plan.dense[0].count());
  const int b = plan.first_b + blockIdx.z, h = plan.first_h + blockIdx.y;
  const int most_first = plan.dense[!is_key].most_first;
  const Side& side = is_key ? params.key_side : params.value_side;
  if (threadIdx.x < 4) bad[threadIdx.x] = 0;
  wait_for_launch_before();
  start_launch_behind();
  const Bounds bounds(params, plan, b);
  const int num_stored = num_stored_of(params, plan, bounds);
  const Tail tail = first_tail(params, plan, bounds, side, b);
  const Copies copies(params, plan, bounds, b);
  const DenseTiles<Shape> tiles(side, tail, num_stored, copies);
  const Dense& dense = is_key ? new_tokens.key : new_tokens.value;
  const int step = tiles.step(place, most_first), first = step * Shape::kTileTokens;
  if (step >= tiles.end || !tiles.has(step) || tiles.place(step, most_first) != place) return;
  int target = place;
  if constexpr (Shape::kIsStreamed) {
    target = step - step_of<Shape::kTileTokens>(whole_span(params, plan, bounds).begin);
    if (target < 0 || target >= plan.scratch_tiles) return;  // no row sees it
    if (are_copied(params, dense, is_key, first - num_stored)) return;
  }

  const int c = threadIdx.x % kLanesOfToken * kChunk, own = threadIdx.x / kLanesOfToken;
  const bool is_transformed = is_key && !is_identity(params.key_transform);
  float x[kItems][kChunk];
  bool is_plain[kItems];
  if (params.is_chunk && first >= num_stored && dense.dtype != Dtype::fp32) {
    // All tokens are new, so their loads need not wait for each other.
    const int64_t from = int64_t{b} * dense.stride_b + h * dense.stride_h + c;
    uint32_t words[kItems][4];
    for_all<kItems>([&](int i) {
      const int token = first + own + i * kTokens;
      is_plain[i] = c < side.head_dim && token < copies.end();
      const int64_t at = from + (token - num_stored) * dense.stride_t;
      load_words_if<16>(is_plain[i], static_cast<const uint16_t*>(dense.data) + at, words[i]);
    });
    const bool is_half = dense.dtype == Dtype::fp16;
    for_all<kItems, kChunk>([&](int i, int k) {
      const uint32_t bits = words[i][k / 2] >> (k % 2 * 16) & 0xffff;
      x[i][k] = is_half ? half_to_float(bits) : __uint_as_float(bits << 16);
    });
  } else {
    for_all<kItems>([&](int i) {
      const int place = first + own + i * kTokens, token = copies.token(place);
      const bool is_held = c < side.head_dim && place < copies.end(), is_new = is_held && token >= num_stored;
      is_plain[i] = is_new || (is_held && tail.has(side, token) && !copies.has_codes(place, is_key));
      for_all<kChunk>([&](int k) { x[i][k] = 0.f; });
      if (is_new) {
        const int64_t at = int64_t{b} * dense.stride_b + h * dense.stride_h + (token - num_stored) * dense.stride_t;
        load_values(dense.data, dense.dtype, at + c, x[i]);
      } else if (is_plain[i]) {
        tail.load(side, h, token, c, x[i]);
      } else if (is_held) {
        load_channels(side, plan.laps.slot(b, token), h, plan.laps.row(token), c, x[i]);
      }
    });
  }
  if (is_transformed) {
    LaneTransform<kChunk> inverted(params.key_transform, side.head_dim, h, c);
    inverted.invert(params.key_transform);
    float transformed[kItems][kChunk];
    for_all<kItems, kChunk>([&](int i, int k) { transformed[i][k] = x[i][k]; });
    transform_keys(params.key_transform, inverted, side.head_dim, threadIdx.x % kLanes, c / kChunk, transformed);
    for_all<kItems, kChunk>([&](int i, int k) { x[i][k] = is_plain[i] ? transformed[i][k] : x[i][k]; });
  }
  uint32_t bound = 0, finite = 0;
  for_all<kItems, kChunk>([&](int i, int k) {
    const uint32_t magnitude = magnitude_of(x[i][k]);
    bound = max(bound, magnitude);
    if (is_finite_bits(magnitude)) finite = max(finite, magnitude);
  });
  bound = largest_of_all(bound, shared);
  const bool is_finite = is_finite_bits(bound);
  if (!is_finite) bound = largest_of_all(finite, shared);
  const int exponent = exponent_of(bound, kTileBits);
  const float unit = power_of_two(-exponent);
  const TilePlaces<Shape> places(plan, workspace, is_key);
  unsigned char* const tile = places.tiles + int64_t{target} * Shape::kTileBytes;
  const bool is_split = is_interleaved(side.storage);
  for_all<kItems>([&](int i) {
    const int row = own + i * kTokens;
    uint32_t halves[kChunk], words[4];
    for_all<kChunk>([&](int k) {
      if (!is_key && !is_finite_bits(magnitude_of(x[i][k]))) {
        atomicOr(&bad[row / 32], 1u << (row % 32));
        x[i][k] = 0.f;
      }
      halves[k] = float_to_half(x[i][k] * unit);
    });
    for_all<4>([&](int k) {
      words[k] = is_split ? halves[k] | halves[k + 4] << 16 : halves[2 * k] | halves[2 * k + 1] << 16;
    });
    *reinterpret_cast<uint4*>(tile + unit_at(Shape::kTileTokens, row, c / kChunk)) = {words[0], words[1], words[2],
                                                                                      words[3]};
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    places.notes[target] = {static_cast<float>(exponent), !is_finite, power_of_two(exponent),
                            {bad[0], bad[1], bad[2], bad[3]}};
  }
}

}  // namespace hf_kvquant::cuda
