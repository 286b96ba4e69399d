// Attention of the newest tokens over codes of latents (MLA): the kernel. A thread block of four warps takes a share of
// a sequence's tokens for up to 32 query rows, which are heads: all of them read the same latents, as keys and as
// values.
//
// It goes from tile to tile of 64 tokens. First each warp finds the scores of 16 tokens, with keys as the A operand and
// the query in shared memory; then each adds up a quarter of the channels over all 64. Weights pass from one to the
// other through shared memory. So no warp holds the query, and none all of the output. Two thread blocks share a
// multiprocessor: one multiplies while the other waits at a barrier.
//
// Integer codes are multiplied by the query as bytes, exactly. As values, codes become float16 numbers. Scales of
// latents act outside of the products. With u = score + log2(scale), a weight is 2^(u - m), which multiplies codes, and
// the sum of weights gets 2^(u - m) / scale; m is the largest u so far, or little less. Of several scales in a token,
// the largest counts, and the weights of a group are multiplied by its share of that.
//
// H200, 2026-11, 512 + 64 channels, both kernels and their launch, L2 cache cold, in us, of int8 with dense rope parts,
// of int4 without and with 4 + 28 dense tokens, and of FlashAttention-3 in bfloat16 (fa3-fwd 0.0.3):
//   16 heads: 64 x 8k 117, 105, 115, 162; 8 x 16k 49, 45, 46, 61; 1 x 128k 58, 55, 55, 67; 1 x 8k 21, 22, 22, 23
//   64 x 8k: 20 heads 132, 143, 158, 177; 32 heads 197, 214, 229, 167; 128 heads 839, 744, 807, 244
// With rope parts of 8 bits, int8 took 162 and 555 at 32 and 128 heads, since 32 rows shared a tile, not 24.
// Of 121, merging takes some 15 (computed from ncu), and reading 305 MB alone 68. Products of bytes instead of float16
// numbers for keys, 40 % of the instructions less, changed nothing. A maximum that may lag (random scores raised an
// exact one in two of three tiles), running addresses and two chains of products gave 10 %. Eight warps for a tile,
// each with half of the rows and channels, changed nothing.
#pragma once

#include <type_traits>

#include "../attend/combine.cuh"
#include "../common/quantize.cuh"
#include "shape.cuh"

namespace hf_kvquant::cuda {

// Copies tiles to shared memory.
template <class Shape>
class LatentCopy {
  static constexpr int kLatentChunks = Shape::kLatentBytes / 16, kRopeChunks = Shape::kRopeBytes / 16;
  static constexpr int kTokensAtOnce = kLatentThreads / kLatentChunks, kPartsAtOnce = kLatentThreads / kRopeChunks;
  static_assert(Shape::kNumPlanes * kLatentTokens / 8 <= kLatentThreads);

 public:
  __device__ __forceinline__ LatentCopy(const DecodeParams& params, const LatentPlan& plan, const LatentTokens& tokens,
                                        int b, uint32_t stages)
      : params_(params),
        laps_(plan.laps),
        b_(b),
        begin_(tokens.begin),
        end_(tokens.end),
        bytes_of_rope_(params.value_side.head_dim * (Shape::kRopeBytes / kRopeChannels)),
        token_(tokens.first_tile() * kLatentTokens),
        to_(stages) {
    const int thread = threadIdx.x, chunk = thread % kRopeChunks * 16;
    latent_to_ = thread / kLatentChunks * Shape::kPitch + thread % kLatentChunks * 16;
    rope_to_ = thread / kRopeChunks * Shape::kPitch + Shape::kLatentBytes + chunk;
    has_rope_ = chunk < bytes_of_rope_;
    // Eight tokens of a plane in each thread.
    plane_to_ = Shape::kPlanesAt + thread * 16;
  }

  // Goes on with the tile that is `num_tiles` further.
  __device__ __forceinline__ void skip(int num_tiles) { token_ += num_tiles * kLatentTokens; }

  // Starts the copy of the next tile.
  __device__ __forceinline__ void start(int stage) {
    if (tiles_left_ == 0) locate();
    const uint32_t to = to_ + stage * Shape::kStageBytes;
    // Codes of e4m3 that nobody has written may be NaN, so all outside of the sequence become 0. Others cannot: their
    // weights are 0. Nor can rope parts, whose scores are replaced.
    constexpr bool kClears = Shape::kLatent == Storage::fp8;
    const bool is_whole = !kClears || (token_ >= begin_ && token_ + kLatentTokens <= end_);
    const auto valid = [&](int token) {
      return is_whole || (token_ + token >= begin_ && token_ + token < end_) ? 16 : 0;
    };
#pragma unroll
    for (int token = 0; token < kLatentTokens; token += kTokensAtOnce) {
      copy_async<16>(to + latent_to_ + token * Shape::kPitch, latent_ + token * Shape::kLatentBytes,
                     kClears ? valid(token + static_cast<int>(threadIdx.x) / kLatentChunks) : 16);
    }
#pragma unroll
    for (int token = 0; token < kLatentTokens; token += kPartsAtOnce) {
      copy_async<16>(to + rope_to_ + token * Shape::kPitch, rope_ + token * bytes_of_rope_,
                     has_rope_ ? valid(token + static_cast<int>(threadIdx.x) / kRopeChunks) : 0);
    }
    if (threadIdx.x < Shape::kNumPlanes * kLatentTokens / 8) copy_async<16>(to + plane_to_, plane_);
    latent_ += kLatentTokens * Shape::kLatentBytes;
    rope_ += kLatentTokens * bytes_of_rope_;
    plane_ += kLatentTokens;
    token_ += kLatentTokens;
    --tiles_left_;
  }

 private:
  // Finds the rows of the next tile, which go on to the end of a page.
  __device__ __forceinline__ void locate() {
    const Side &latent = params_.key_side, &rope = params_.value_side;
    const int64_t slot = laps_.slot(b_, token_), row = laps_.row(token_);
    tiles_left_ = (laps_.num_rows - static_cast<int>(row)) / kLatentTokens;
    const int thread = threadIdx.x, chunk = has_rope_ ? thread % kRopeChunks * 16 : 0;
    latent_ = latent.codes + slot * latent.codes_stride_b + row * Shape::kLatentBytes + thread * 16;  // without gaps
    rope_ = rope.codes + slot * rope.codes_stride_b + (row + thread / kRopeChunks) * bytes_of_rope_ + chunk;
    const int plane = thread / (kLatentTokens / 8);
    if (plane < Shape::kGroups) {
      plane_ = latent.scale + slot * latent.scale_stride_b + plane * latent.scale_stride_g;
    } else if (Shape::kHasZero && plane < 2 * Shape::kGroups) {
      plane_ = latent.zero + slot * latent.zero_stride_b + (plane - Shape::kGroups) * latent.zero_stride_g;
    } else {
      plane_ = rope.scale + slot * rope.scale_stride_b;
    }
    plane_ += row + thread % (kLatentTokens / 8) * 8;
  }

  const DecodeParams& params_;
  const Laps& laps_;
  int b_, begin_, end_, bytes_of_rope_;
  int token_, tiles_left_ = 0;  // of the next tile, and in its page
  uint32_t to_, latent_to_, rope_to_, plane_to_;
  bool has_rope_;
  const uint8_t *latent_ = nullptr, *rope_ = nullptr;
  const half_bits* plane_ = nullptr;
};

// --- the query

// Four channels of a query row as bytes, in two parts: 128 · high + low.
__device__ __forceinline__ uint2 bytes_of(const int (&x)[4]) {
  uint2 parts = {0, 0};
  for_all<4>([&](int i) {
    parts.x |= (static_cast<uint32_t>(x[i] >> 7) & 0xffu) << (8 * i);
    parts.y |= (static_cast<uint32_t>(x[i]) & 0x7fu) << (8 * i);
  });
  return parts;
}

// Writes kChannels channels of a row from `channel` on, in the order of the product, and returns their sum as integers.
template <Storage kStorage, int kChannels>
__device__ __forceinline__ int store_query(uint8_t* to, int row, int channel, const float (&x)[kChannels],
                                           float inverse) {
  const auto word = [&](int block, int t, int i) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(to + query_place(row, block, t, i));
  };
  if constexpr (!is_integer(kStorage)) {
#pragma unroll
    for (int k = 0; k < kChannels; k += 4) {
      const int c = channel + k, block = c / 32, t = c % 16 / 4, first = c % 32 / 16 * 2;
      word(block, t, first) = pack_halves(x[k] * inverse, x[k + 1] * inverse);
      word(block, t, first + 1) = pack_halves(x[k + 2] * inverse, x[k + 3] * inverse);
    }
    return 0;
  }
  int sum = 0, codes[kChannels];
  for_all<kChannels>([&](int k) { sum += codes[k] = __float2int_rn(x[k] * inverse); });
  if constexpr (bits_of(kStorage) == 8) {
#pragma unroll
    for (int k = 0; k < kChannels; k += 4) {
      const int c = channel + k, block = c / 32, t = c % 16 / 4, half = c % 32 / 16;
      const uint2 parts = bytes_of({codes[k], codes[k + 1], codes[k + 2], codes[k + 3]});
      word(block, t, half) = parts.x, word(block, t, 2 + half) = parts.y;
    }
  } else {
    // Lower and upper codes of bytes are multiplied one after the other.
#pragma unroll
    for (int k = 0; k < kChannels; k += 8) {
      const int c = channel + k, t = c % 32 / 8, half = c % 64 / 32;
      for_all<2>([&](int i) {
        const uint2 parts = bytes_of({codes[k + i], codes[k + 2 + i], codes[k + 4 + i], codes[k + 6 + i]});
        word(c / 64 * 2 + i, t, half) = parts.x, word(c / 64 * 2 + i, t, 2 + half) = parts.y;
      });
    }
  }
  return sum;
}

// Writes four channels of a row's dense rope part, likewise.
__device__ __forceinline__ void store_dense_query(uint8_t* to, int row, int channel, const uint32_t (&words)[2]) {
  const int place = channel % 32 / 16 * 2 + channel % 16 / 8;
  for_all<2>([&](int i) {
    *reinterpret_cast<uint32_t*>(to + query_place(row, channel / 32, channel % 8 / 2 + i, place)) = words[i];
  });
}

// Writes the query to shared memory: rotated, and as integers of 15 bits or as float16 numbers. A warp takes kAtOnce
// rows at a time, which go through the rotation together. Products are multiplied by what `factors` gets, but for those
// with dense rope parts.
template <class Shape>
__device__ __forceinline__ void prepare_query(const DecodeParams& params, const LatentPlan& plan, int b, int row_tile,
                                              uint8_t* shared, float* factors) {
  constexpr int kChannels = Shape::kRank / kLanes;  // of a lane
  constexpr int kAtOnce = Shape::kColumnTiles % 2 == 0 ? 4 : 2, kOfRope = 4, kRopeLanes = kRopeChannels / kOfRope;
  const int lane = threadIdx.x % kLanes;
  int* const sums = reinterpret_cast<int*>(shared + Shape::kSumsAt);
  const bool is_aligned = has_aligned_rows(params.query);
#pragma unroll 1
  for (int first_row = threadIdx.x / kLanes * kAtOnce; first_row < Shape::kRows; first_row += kLatentWarps * kAtOnce) {
    uint32_t words[kAtOnce][kChannels / 2], words_of_rope[kAtOnce][kOfRope / 2];
    const bool has_rope = kOfRope * lane < params.value_side.head_dim;
    const auto load = [&](auto is_aligned) {
      for_all<kAtOnce>([&](int r) {
        const int index = min(row_tile * Shape::kRows + first_row + r, plan.rows.num_rows - 1);
        const int token = plan.rows.token(index), head = plan.rows.head(index, token);
        const uint16_t* const row = static_cast<const uint16_t*>(params.query.data) + b * params.query.stride_b +
                                    head * params.query.stride_h + token * params.query.stride_t;
        load_words<is_aligned>(row + lane * kChannels, words[r]);
        load_words<is_aligned>(row + Shape::kRank + (has_rope ? kOfRope * lane : 0), words_of_rope[r]);
      });
    };
    is_aligned ? load(std::true_type{}) : load(std::false_type{});
    float x[kAtOnce][kChannels], rope[kAtOnce][kOfRope];
    for_all<kAtOnce>([&](int r) {
      const bool exists = row_tile * Shape::kRows + first_row + r < plan.rows.num_rows;
      floats_of(words[r], params.query.dtype, x[r]), floats_of(words_of_rope[r], params.query.dtype, rope[r]);
      for_all<kChannels>([&](int k) { x[r][k] = exists ? x[r][k] : 0.f; });
      for_all<kOfRope>([&](int k) { rope[r][k] = exists && has_rope ? rope[r][k] : 0.f; });
    });
    if (params.key_transform.is_rotated) rotate(x, Shape::kRank, lane, lane);
    for_all<kAtOnce>([&](int r) {
      const int row = first_row + r;
      float largest = 0.f;
      for_all<kChannels>([&](int k) { largest = max_or_nan(largest, fabsf(x[r][k])); });
      if constexpr (!Shape::kHasDenseRope) {
        for_all<kOfRope>([&](int k) { largest = max_or_nan(largest, fabsf(rope[r][k])); });
      }
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
        largest = max_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, distance));
      }
      // Products of 512 codes of 8 bits and integers up to 16,383 fit 32 bits. Float16 numbers up to 2^12 stay normal
      // where they count.
      constexpr float kLimit = is_integer(Shape::kLatent) ? 16383.f : 4096.f, kLeast = 1e-30f;
      const float factor = max_or_nan(largest, kLeast) * (1.f / kLimit), inverse = kLimit / fmaxf(largest, kLeast);
      uint8_t* const to = shared + Shape::kQueryAt + row * Shape::kQueryPitch;
      int sum = store_query<Shape::kLatent>(to, row, lane * kChannels, x[r], inverse), of_rope = 0;
      if (lane < kRopeLanes) {
        if constexpr (Shape::kHasDenseRope) {
          const bool is_read = has_rope && row_tile * Shape::kRows + row < plan.rows.num_rows;
          store_dense_query(to + 2 * Shape::kRank, row, kOfRope * lane,
                            {is_read ? words_of_rope[r][0] : 0, is_read ? words_of_rope[r][1] : 0});
        } else {
          of_rope = store_query<Shape::kRope>(to + 2 * Shape::kRank, row, kOfRope * lane, rope[r], inverse);
        }
      }
      constexpr int kLanesOfGroup = kLanes / Shape::kGroups;
#pragma unroll
      for (int distance = 1; distance < kLanesOfGroup; distance *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      of_rope = static_cast<int>(__reduce_add_sync(kAllLanes, of_rope));
      // Codes of 8 bits count from 128. Sums that zeros multiply are floats from here on: conversions are slow.
      if (lane % kLanesOfGroup == 0) {
        sums[lane / kLanesOfGroup * Shape::kRows + row] =
            Shape::kHasZero ? __float_as_int(__int2float_rn(sum)) : -128 * sum;
      }
      if (lane == 0) {
        sums[Shape::kGroups * Shape::kRows + row] = -128 * of_rope;
        factors[row] = params.softmax_scale * kLog2E * factor;
      }
    });
  }
}

// --- scores

// Products of kBytes of codes of 16 keys with the query. `keys` is this lane's part of an `ldmatrix` of two times 16
// bytes, `query` its part of the first block, both in shared memory. Integer products begin at `start` for each query
// row of the lane; codes of 4 and of 8 bits count from 0; with 8 bits, the middle is 128.
template <class Shape, Storage kStorage, int kBytes>
__device__ __forceinline__ void multiply_keys(uint32_t keys, uint32_t query,
                                              const int (&start)[2 * Shape::kColumnTiles],
                                              float (&products)[Shape::kColumnTiles][4]) {
  constexpr int kColumnTiles = Shape::kColumnTiles, kBlocksOfLoad = 8 / bits_of(kStorage);
  const auto load_query = [&](int block, uint32_t (&words)[kColumnTiles][4]) {
    for_all<kColumnTiles>([&](int n) {
      load_shared((query ^ (block % 2 << 6)) + block / 2 * 128 + n * 8 * Shape::kQueryPitch, words[n]);
    });
  };
  if constexpr (is_integer(kStorage)) {
    // Products wait for those before them, so few columns are summed in two chains.
    constexpr int kChains = kColumnTiles <= 2 && kBytes >= 128 ? 2 : 1;
    int high[kChains][kColumnTiles][4] = {}, low[kChains][kColumnTiles][4] = {};
    for_all<kColumnTiles, 4>([&](int n, int i) { low[0][n][i] = start[2 * n + i % 2]; });
    for_all<kBytes / 32>([&](int load) {
      uint32_t x[4];
      load_matrices<false>(keys + 32 * load, x);
      for_all<kBlocksOfLoad>([&](int i) {
        uint32_t q[kColumnTiles][4], a[4];
        load_query(load * kBlocksOfLoad + i, q);
        for_all<4>([&](int k) { a[k] = kBlocksOfLoad == 1 ? x[k] : x[k] >> (4 * i) & 0x0f0f0f0fu; });
        for_all<kColumnTiles>([&](int n) {
          const int chain = (load * kBlocksOfLoad + i) % kChains;
          multiply_bytes(high[chain][n], a[0], a[1], a[2], a[3], q[n][0], q[n][1]);
          multiply_bytes(low[chain][n], a[0], a[1], a[2], a[3], q[n][2], q[n][3]);
        });
      });
    });
    for_all<kColumnTiles, 4>([&](int n, int i) {
      for_all<kChains - 1>([&](int chain) {
        high[0][n][i] += high[chain + 1][n][i], low[0][n][i] += low[chain + 1][n][i];
      });
      products[n][i] = __int2float_rn(high[0][n][i] * 128 + low[0][n][i]);
    });
  } else {
    for_all<kColumnTiles, 4>([&](int n, int i) { products[n][i] = 0.f; });
    for_all<kBytes / 32>([&](int load) {
      uint32_t x[4], q[kColumnTiles][4];
      load_matrices<false>(keys + 32 * load, x);
      load_query(load, q);
      for_all<2>([&](int i) {
        const uint32_t a[4] = {low_halves(x[2 * i]), low_halves(x[2 * i + 1]), high_halves(x[2 * i]),
                               high_halves(x[2 * i + 1])};
        for_all<kColumnTiles>(
            [&](int n) { multiply_halves(products[n], a[0], a[1], a[2], a[3], q[n][2 * i], q[n][2 * i + 1]); });
      });
    });
  }
}

// The same of dense rope parts of 16 keys, which are numbers of the query's dtype.
template <class Shape>
__device__ __forceinline__ void multiply_dense_keys(uint32_t keys, uint32_t query, bool is_half,
                                                    float (&products)[Shape::kColumnTiles][4]) {
  for_all<Shape::kColumnTiles, 4>([&](int n, int i) { products[n][i] = 0.f; });
  for_all<kRopeChannels / 32>([&](int block) {
    uint32_t q[Shape::kColumnTiles][4];
    for_all<Shape::kColumnTiles>([&](int n) {
      load_shared((query ^ (block % 2 << 6)) + block / 2 * 128 + n * 8 * Shape::kQueryPitch, q[n]);
    });
    for_all<2>([&](int i) {
      uint32_t a[4];
      load_matrices<false>(keys + 64 * block + 32 * i, a);
      for_all<Shape::kColumnTiles>([&](int n) {
        if (is_half) {
          multiply_halves(products[n], a[0], a[1], a[2], a[3], q[n][2 * i], q[n][2 * i + 1]);
        } else {
          multiply_bfloats(products[n], a[0], a[1], a[2], a[3], q[n][2 * i], q[n][2 * i + 1]);
        }
      });
    });
  });
}

template <class Shape>
__global__ void __launch_bounds__(kLatentThreads, 2)
    attend_latent(const __grid_constant__ DecodeParams params, const __grid_constant__ LatentPlan plan,
                  float* workspace) {
  constexpr int kColumnTiles = Shape::kColumnTiles, kColumns = 2 * kColumnTiles, kRows = Shape::kRows;
  constexpr int kGroups = Shape::kGroups, kStages = Shape::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, g = lane / 4, t = lane % 4;
  const unsigned unit = blockIdx.x / plan.num_splits, part = blockIdx.x - unit * plan.num_splits;
  const int b = unit / plan.num_row_tiles, row_tile = unit - b * plan.num_row_tiles;
  wait_for_launch_before();
  start_launch_behind();

  // --- this part's tiles
  const LatentTokens tokens(params, plan, b);
  const int all_tiles = tokens.num_tiles();
  const int share = (all_tiles + plan.num_splits - 1) / plan.num_splits;
  const int num_tiles = min(max(all_tiles - static_cast<int>(part) * share, 0), share);
  if (num_tiles == 0) return;  // `combine` knows
  const int first_token = (tokens.first_tile() + static_cast<int>(part) * share) * kLatentTokens;

  LatentCopy<Shape> copy(params, plan, tokens, b, shared_address(shared));
  copy.skip(static_cast<int>(part) * share);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < num_tiles) copy.start(stage);
    commit_copies();
  }
  float* const maxima = reinterpret_cast<float*>(shared + Shape::kMaximaAt);
  prepare_query<Shape>(params, plan, b, row_tile, shared, maxima);
  __syncthreads();
  // For this lane's query rows: what multiplies products, and where products begin.
  float factor[kColumns];
  int latent_start[kColumns] = {}, rope_start[kColumns] = {};
  const int* const query_sums = reinterpret_cast<const int*>(shared + Shape::kSumsAt);
  for_all<kColumnTiles, 2>([&](int n, int e) {
    const int row = 8 * n + 2 * t + e;
    factor[2 * n + e] = maxima[row];
    if (!Shape::kHasZero) latent_start[2 * n + e] = query_sums[row];
    if (!Shape::kHasDenseRope) rope_start[2 * n + e] = query_sums[kGroups * kRows + row];
  });

  // --- where this lane finds its operands
  const uint32_t stages = shared_address(shared);
  const int token = 16 * warp + g;  // and 8 behind it
  const uint32_t row_at = (lane & 15) * Shape::kPitch + (lane >> 4 << 4);
  const uint32_t key_at = 16 * warp * Shape::kPitch + row_at;
  const uint32_t value_at = warp * (Shape::kLatentBytes / kLatentWarps) + row_at;
  const uint32_t query_at = stages + Shape::kQueryAt + g * Shape::kQueryPitch + query_place(g, 0, t, 0);
  const int group = warp * kGroups / kLatentWarps;  // of the values

  float largest[kColumns], sum[kColumns] = {}, zero_sum[Shape::kHasZero ? kGroups : 1][kColumns] = {};
  float out[Shape::kOutputTiles][kColumnTiles][4] = {};
  for_all<kColumns>([&](int c) { largest[c] = -INFINITY; });

  int stage = 0;
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the tile is there, and the one before is not needed any more
    {
      if (tile + kStages - 1 < num_tiles) copy.start(stage == 0 ? kStages - 1 : stage - 1);
      commit_copies();
    }
    const uint32_t codes = stages + stage * Shape::kStageBytes;
    const uint8_t* const planes = shared + stage * Shape::kStageBytes + Shape::kPlanesAt;
    const auto plane = [&](int p, int i) {
      return half_to_float(*reinterpret_cast<const half_bits*>(planes + (p * kLatentTokens + token + 8 * i) * 2));
    };

    // --- scores of 16 tokens: [8 n + 2 t + e] of token g (registers 0, 1) and g + 8 (2, 3)
    constexpr int kGroupBytes = Shape::kLatentBytes / kGroups;
    float score[kColumnTiles][4] = {};
    float scale[kGroups][2], zero[kGroups][2];
    for_all<kGroups, 2>([&](int p, int i) {
      scale[p][i] = plane(p, i);
      if constexpr (Shape::kHasZero) zero[p][i] = plane(kGroups + p, i);
    });
    for_all<kGroups>([&](int p) {
      float products[kColumnTiles][4];
      multiply_keys<Shape, Shape::kLatent, kGroupBytes>(codes + key_at + p * kGroupBytes,
                                                        query_at + p * (2 * Shape::kRank / kGroups), latent_start,
                                                        products);
      for_all<kColumnTiles, 4>([&](int n, int i) {
        score[n][i] = fmaf(products[n][i], scale[p][i / 2], score[n][i]);
        if constexpr (Shape::kHasZero) {
          const float sum = __int_as_float(query_sums[p * kRows + 8 * n + 2 * t + i % 2]);
          score[n][i] = fmaf(sum, zero[p][i / 2], score[n][i]);
        }
      });
    });
    if constexpr (Shape::kHasDenseRope) {
      float products[kColumnTiles][4];
      multiply_dense_keys<Shape>(codes + key_at + Shape::kLatentBytes, query_at + 2 * Shape::kRank,
                                 params.query.dtype == Dtype::fp16, products);
      const float scale = params.softmax_scale * kLog2E;
      for_all<kColumnTiles, 4>([&](int n, int i) {
        score[n][i] = fmaf(products[n][i], scale, score[n][i] * factor[2 * n + i % 2]);
      });
    } else {
      float products[kColumnTiles][4];
      multiply_keys<Shape, Shape::kRope, kRopeChannels>(codes + key_at + Shape::kLatentBytes,
                                                        query_at + 2 * Shape::kRank, rope_start, products);
      const float of_rope[2] = {plane(Shape::kNumPlanes - 1, 0), plane(Shape::kNumPlanes - 1, 1)};
      for_all<kColumnTiles, 4>([&](int n, int i) {
        score[n][i] = fmaf(products[n][i], of_rope[i / 2], score[n][i]) * factor[2 * n + i % 2];
      });
    }

    // --- weights
    float largest_scale[2], inverse[2];
    for_all<2>([&](int i) {
      largest_scale[i] = scale[0][i];
      for_all<kGroups>([&](int p) { largest_scale[i] = max_or_nan(largest_scale[i], scale[p][i]); });
      inverse[i] = approximate_reciprocal(largest_scale[i]);
    });
    for_all<kColumnTiles, 4>([&](int n, int i) { score[n][i] += log2_approx(largest_scale[i / 2]); });
    const int position = first_token + tile * kLatentTokens + token;
    const int tile_begin = first_token + tile * kLatentTokens;
    const bool is_plain =
        tile_begin >= tokens.begin &&
        tile_begin + kLatentTokens <= min(min(tokens.end, tokens.dense_from), tokens.first_query + 1);
    uint32_t hidden = 0;  // bit 4 n + i
    if (!is_plain) {
      // One bound for each row. With the causal bound as a condition of its own, nvcc 13.0 let some rows of fp8 latents
      // see one token too many (256 channels, H200, 2026-11).
      for_all<kColumnTiles, 2>([&](int n, int e) {
        const int until = tokens.end_of(params, plan.rows.token(row_tile * kRows + 8 * n + 2 * t + e));
        for_all<2>([&](int h) {
          const int at = position + 8 * h;
          if (at < tokens.begin || at >= until) hidden |= 1u << (4 * n + 2 * h + e);
        });
      });
      for_all<kColumnTiles, 4>([&](int n, int i) {
        if (hidden >> (4 * n + i) & 1) score[n][i] = -INFINITY;
      });
    }
    // Weights up to 2^kSlack are as exact as smaller ones, so the maximum follows scores only if they are far above it.
    constexpr float kSlack = 6.f;
    float before[kColumns];
    bool is_raised = false;
    for_all<kColumnTiles, 2>([&](int n, int e) {
      before[2 * n + e] = largest[2 * n + e];
      is_raised |= fmaxf(score[n][e], score[n][2 + e]) > largest[2 * n + e] + kSlack;
    });
    is_raised = __any_sync(kAllLanes, is_raised);
    if (is_raised) {
      for_all<kColumnTiles, 2>([&](int n, int e) {
        const int c = 2 * n + e;
        float most = fmaxf(score[n][e], score[n][2 + e]);
#pragma unroll
        for (int distance = 4; distance < kLanes; distance *= 2) {
          most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
        }
        if (most > largest[c] + kSlack) largest[c] = most;
        const float kept = exp2_below(before[c], largest[c]);
        sum[c] *= kept;
        if constexpr (Shape::kHasZero) for_all<kGroups>([&](int p) { zero_sum[p][c] *= kept; });
      });
    }
    for_all<kColumnTiles, 2>([&](int n, int e) {
      if (g == 0) maxima[warp * kRows + 8 * n + 2 * t + e] = largest[2 * n + e];
    });
    for_all<kColumnTiles, 4>(
        [&](int n, int i) { score[n][i] = exp2_below(score[n][i], largest[2 * n + i % 2]); });
    for_all<kGroups>([&](int p) {
      float share[2] = {1.f, 1.f}, of_zero[2];
      if constexpr (Shape::kHasZero) {
        for_all<2>([&](int i) {
          share[i] = scale[p][i] * inverse[i];
          of_zero[i] = fmaf(8.f, scale[p][i], zero[p][i]) * inverse[i];
        });
      }
      for_all<kColumnTiles>([&](int n) {
        float weight[4];
        for_all<4>([&](int i) {
          const bool is_hidden = !is_plain && (hidden >> (4 * n + i) & 1);
          weight[i] = Shape::kHasZero ? (is_hidden ? 0.f : score[n][i] * share[i / 2]) : score[n][i];
          if (p == 0) sum[2 * n + i % 2] += is_hidden ? 0.f : score[n][i] * inverse[i / 2];
        });
        const uint32_t pairs[2] = {pack_halves(weight[0], weight[1]), pack_halves(weight[2], weight[3])};
        // Codes are multiplied as they are, but what a rounded weight costs should not grow with a middle of 8.
        if constexpr (Shape::kHasZero) {
          for_all<4>([&](int i) {
            const bool is_hidden = !is_plain && (hidden >> (4 * n + i) & 1);
            const float further = fmaf(-8.f, half_of(pairs[i / 2], i % 2), score[n][i] * of_zero[i / 2]);
            zero_sum[p][2 * n + i % 2] += is_hidden ? 0.f : further;
          });
        }
        uint8_t* const to = shared + (Shape::kHasWeightsInTile
                                          ? stage * Shape::kStageBytes
                                          : Shape::kWeightsAt + p * kLatentTokens * Shape::kWeightsPitch);
        for_all<2>([&](int i) {
          *reinterpret_cast<uint32_t*>(to + weights_place<Shape>(token + 8 * i, n) + 4 * t) = pairs[i];
        });
      });
    });
    const bool is_uneven = __syncthreads_or(is_raised);  // warps may have different maxima

    // --- sums of values
    float kept[kColumnTiles] = {};  // the maximum of the row of this lane's weights
    if (is_uneven) {
      for_all<kColumnTiles, 2>([&](int n, int e) {
        const int c = 2 * n + e;
        float most = maxima[8 * n + 2 * t + e];
        for_all<kLatentWarps>([&](int w) { most = fmaxf(most, maxima[w * kRows + 8 * n + 2 * t + e]); });
        const float own = exp2_below(largest[c], most), of_out = exp2_below(before[c], most);
        sum[c] *= own;
        if constexpr (Shape::kHasZero) for_all<kGroups>([&](int p) { zero_sum[p][c] *= own; });
        for_all<Shape::kOutputTiles, 2>([&](int j, int i) { out[j][n][2 * i + e] *= of_out; });
        largest[c] = most;
      });
      for_all<kColumnTiles>([&](int n) {
        kept[n] = -INFINITY;
        for_all<kLatentWarps>([&](int w) { kept[n] = fmaxf(kept[n], maxima[w * kRows + 8 * n + g]); });
      });
    }
    const uint32_t weights = Shape::kHasWeightsInTile
                                 ? codes
                                 : stages + Shape::kWeightsAt + group * kLatentTokens * Shape::kWeightsPitch;
    for_all<kLatentTokens / 16>([&](int step) {
      uint32_t weight[(kColumnTiles + 1) / 2][4];
      for_all<(kColumnTiles + 1) / 2>([&](int n) {
        const int column = min(2 * n + (lane >> 4), kColumnTiles - 1);
        load_matrices<true>(weights + weights_place<Shape>(16 * step + (lane & 15), column), weight[n]);
      });
      if (is_uneven) {  // the tokens of a step belong to one warp
        for_all<kColumnTiles>([&](int n) {
          const float own = exp2_below(maxima[step * kRows + 8 * n + g], kept[n]);
          const uint32_t factors = pack_halves(own, own);
          for_all<2>([&](int i) {
            uint32_t& pair = weight[n / 2][n % 2 * 2 + i];
            pair = multiply_halves(pair, factors);
          });
        });
      }
      for_all<Shape::kLoads>([&](int load) {
        uint32_t x[4];
        load_matrices<true>(codes + value_at + 32 * load + 16 * step * Shape::kPitch, x);
        for_all<2>([&](int half) {
          for_value_operands<Shape::kLatent>(
              x[2 * half], x[2 * half + 1], [&](int i, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
                const int j = Shape::kHasZero ? 4 * load + 2 * half + i : 2 * load + half;
                for_all<kColumnTiles>([&](int n) {
                  multiply_halves(out[j][n], a0, a1, a2, a3, weight[n / 2][n % 2 * 2], weight[n / 2][n % 2 * 2 + 1]);
                });
              });
        });
      });
    });
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // --- the part's result: sums of lanes and warps, then values
  wait_for_copies<0>();
  __syncthreads();
  constexpr int kSums = Shape::kHasZero ? 1 + kGroups : 1;
  float* const sums = reinterpret_cast<float*>(shared);  // [warp][kSums][kRows]
  for_all<kSums, kColumnTiles, 2>([&](int p, int n, int e) {
    float x = p == 0 ? sum[2 * n + e] : zero_sum[p == 0 ? 0 : p - 1][2 * n + e];
    x += __shfl_xor_sync(kAllLanes, x, 4);
    x += __shfl_xor_sync(kAllLanes, x, 8);
    x += __shfl_xor_sync(kAllLanes, x, 16);
    if (g == 0) sums[(warp * kSums + p) * kRows + 8 * n + 2 * t + e] = x;
  });
  __syncthreads();
  const auto sum_of_warps = [&](int p, int row) {
    float x = 0.f;
    for_all<kLatentWarps>([&](int w) { x += sums[(w * kSums + p) * kRows + row]; });
    return x;
  };
  float* const slot = workspace + int64_t{blockIdx.x} * kRows * (Shape::kRank + 2);
  for_all<kColumnTiles, 2>([&](int n, int e) {
    const int row = 8 * n + 2 * t + e;
    if (warp == 0 && g == 0) {
      *reinterpret_cast<float2*>(slot + kRows * Shape::kRank + 2 * row) = {largest[2 * n + e], sum_of_warps(0, row)};
    }
    const float added = Shape::kHasZero ? sum_of_warps(1 + group, row) : 0.f;
    float* const to = slot + row * Shape::kRank + warp * Shape::kWarpChannels;
    for_all<Shape::kOutputTiles>([&](int j) {
      const auto value = [&](int i) { return fmaf(out[j][n][2 * i + e], unit_of_latent<Shape::kLatent>(i), added); };
      *reinterpret_cast<float2*>(to + Shape::channel(g, j, 0)) = {value(0), value(1)};
    });
  });
}

}  // namespace hf_kvquant::cuda
