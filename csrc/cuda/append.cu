// Quantises new keys and values into their planes, bit for bit as reference.quantize: this file is compiled without
// contraction of multiplications and additions, divisions round correctly, and minima and maxima do not depend on their
// order. One thread block takes one token of one side, its warps take heads in turn, a lane takes eight channels.
#include "codes.cuh"
#include "cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kNumWarps = 4;
constexpr half_bits kMinScale = 1;  // 2^-24, the smallest positive float16

struct Range {
  float low, high;  // infinite where a value is not finite, so that no scale for it is
};

__device__ Range join(Range a, Range b) { return {fminf(a.low, b.low), fmaxf(a.high, b.high)}; }

// The code that the largest magnitude, or the whole range, maps to.
__device__ float max_code(const Side& side) {
  if (side.storage == Storage::fp8) return 448.f;
  if (side.storage == Storage::int8) return side.is_symmetric ? 127.f : 255.f;
  return side.is_symmetric ? 7.f : 15.f;
}

struct Scale {
  half_bits scale, zero;  // both NaN when one cannot be represented
};

__device__ Scale compute_scale(const Side& side, Range range) {
  const float span = side.is_symmetric ? fmaxf(fabsf(range.low), fabsf(range.high)) : range.high - range.low;
  Scale result = {float_to_half(span / max_code(side)), side.is_symmetric ? half_bits{0} : float_to_half(range.low)};
  if (!is_finite_half(result.scale) || !is_finite_half(result.zero)) return {kHalfNan, kHalfNan};
  if (result.scale < kMinScale) result.scale = kMinScale;
  return result;
}

__device__ void write_scale(const Side& side, Scale value, int64_t b, int64_t h, int64_t g, int64_t t) {
  *scale_at(side, b, h, g, t) = value.scale;
  if (!side.is_symmetric) *zero_at(side, b, h, g, t) = value.zero;
}

// One token of one side, as a thread block sees it.
struct Token {
  const Dense& dense;
  const Side& side;
  int64_t b, i, t;  // sequence, index in the chunk, position in the cache
  bool has_room;

  __device__ Token(const AppendParams& params)
      : dense(blockIdx.x % 2 ? params.value : params.key), side(blockIdx.x % 2 ? params.value_side : params.key_side) {
    i = blockIdx.x / 2 % params.q_len;
    b = blockIdx.x / 2 / params.q_len;
    t = int64_t{params.lengths[b]} - params.q_len + i;
    has_room = t >= 0 && t < params.capacity;
  }

  __device__ void load(int64_t h, int c, float (&x)[kChunk]) const {
    const int64_t first = b * dense.stride_b + h * dense.stride_h + i * dense.stride_t + c;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) x[k] = load_value(dense.data, dense.dtype, first + k);
  }
};

__device__ Range range_of(const float (&x)[kChunk]) {
  Range range = {INFINITY, -INFINITY};
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    range = join(range, isfinite(x[k]) ? Range{x[k], x[k]} : Range{-INFINITY, INFINITY});
  }
  return range;
}

__device__ uint32_t encode(const Side& side, float x, float scale, float zero) {
  const float limit = max_code(side);
  if (side.storage == Storage::fp8) {
    return __nv_cvt_float_to_fp8(fminf(fmaxf(x / scale, -limit), limit), __NV_SATFINITE, __NV_E4M3);
  }
  if (side.is_symmetric) {
    return static_cast<uint32_t>(fminf(fmaxf(rintf(x / scale), -limit), limit) + code_offset(side));
  }
  return static_cast<uint32_t>(fminf(fmaxf(rintf((x - zero) / scale), 0.f), limit));
}

__device__ void write_codes(const Side& side, uint8_t* row, int c, const float (&x)[kChunk], Scale value) {
  const bool is_bad = !is_finite_half(value.scale) || !is_finite_half(value.zero);
  const float scale = half_to_float(value.scale), zero = half_to_float(value.zero);
  uint32_t codes[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) codes[k] = is_bad ? 0 : encode(side, x[k], scale, zero);
  if (side.storage == Storage::int4) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) word |= codes[k] << (4 * k);
    reinterpret_cast<uint32_t*>(row)[c / kChunk] = word;
  } else {
    uint2 word = {0, 0};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      word.x |= codes[k] << (8 * k);
      word.y |= codes[k + 4] << (8 * k);
    }
    reinterpret_cast<uint2*>(row)[c / kChunk] = word;
  }
}

// The range of all heads of a token. Every thread returns the same.
__device__ Range range_of_heads(const Token& token, int num_heads, int warp, int lane) {
  __shared__ Range ranges[kNumWarps];
  Range range = {INFINITY, -INFINITY};
  for (int h = warp; h < num_heads; h += kNumWarps) {
    if (lane * kChunk >= token.side.head_dim) continue;
    float x[kChunk];
    token.load(h, lane * kChunk, x);
    range = join(range, range_of(x));
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    range = join(range, {__shfl_xor_sync(kAllLanes, range.low, distance),
                         __shfl_xor_sync(kAllLanes, range.high, distance)});
  }
  if (lane == 0) ranges[warp] = range;
  __syncthreads();
  for (int w = 0; w < kNumWarps; ++w) range = join(range, ranges[w]);
  return range;
}

// Before tokens are coded with a frozen scale: a value that is not finite makes the scale of its sequence NaN, and all
// tokens of the sequence see that. A kernel of its own, so that the next one reads the scale as it has become.
__global__ void spoil_frozen_scales(const __grid_constant__ AppendParams params) {
  const Token token(params);
  const Side& side = token.side;
  if (!token.has_room || !side.is_frozen) return;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (lane * kChunk >= side.head_dim) return;
  for (int h = warp; h < params.num_kv_heads; h += kNumWarps) {
    float x[kChunk];
    token.load(h, lane * kChunk, x);
    if (isinf(range_of(x).high)) write_scale(side, {kHalfNan, kHalfNan}, token.b, 0, 0, 0);
  }
}

__global__ void append_token(const __grid_constant__ AppendParams params) {
  const Token token(params);
  const Side& side = token.side;
  if (!token.has_room) return;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, c = lane * kChunk;
  const bool is_active = c < side.head_dim;
  const int64_t b = token.b, t = token.t;

  if (side.storage == Storage::none) {
    for (int h = warp; h < params.num_kv_heads; h += kNumWarps) {
      if (!is_active) continue;
      float x[kChunk];
      token.load(h, c, x);
      for (int k = 0; k < kChunk; ++k) store_value(code_row(side, b, h, t), side.dense_dtype, c + k, x[k]);
    }
    return;
  }

  Scale value{};
  if (side.is_frozen) {
    value.scale = *scale_at(side, b, 0, 0, 0);
    if (!side.is_symmetric) value.zero = *zero_at(side, b, 0, 0, 0);
  } else if (side.is_shared_by_heads) {
    value = compute_scale(side, range_of_heads(token, params.num_kv_heads, warp, lane));
    if (threadIdx.x == 0) write_scale(side, value, b, 0, 0, t);
  }
  const int group_size = side.head_dim / side.num_groups, lanes_per_group = group_size / kChunk;
  const int first_lane = lane - lane % lanes_per_group;
  for (int h = warp; h < params.num_kv_heads; h += kNumWarps) {
    float x[kChunk] = {};
    if (is_active) token.load(h, c, x);
    if (!side.is_frozen && !side.is_shared_by_heads) {
      // Groups need not be powers of two, so a lane asks each lane of its group.
      const Range own = range_of(x);
      Range range = own;
      for (int i = 0; i < lanes_per_group; ++i) {
        range = join(range, {__shfl_sync(kAllLanes, own.low, first_lane + i),
                             __shfl_sync(kAllLanes, own.high, first_lane + i)});
      }
      value = compute_scale(side, range);
      if (is_active && lane == first_lane) write_scale(side, value, b, h, c / group_size, t);
    }
    if (is_active) write_codes(side, code_row(side, b, h, t), c, x, value);
  }
}

}  // namespace

void append(const AppendParams& params, void* stream) {
  const int64_t num_blocks = int64_t{2} * params.batch * params.q_len;
  const int num_threads = kNumWarps * kLanes;
  if (params.key_side.is_frozen || params.value_side.is_frozen) {
    launch("append", spoil_frozen_scales, num_blocks, num_threads, 0, stream, params);
  }
  launch("append", append_token, num_blocks, num_threads, 0, stream, params);
}

}  // namespace hf_kvquant::cuda
