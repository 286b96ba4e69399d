// Dense keys and values for attention that no kernel serves, bit for bit as reference.dequantize_tokens. A lane has
// eight channels of a few tokens at a time, so a warp has several rows side by side, and writes them without gaps.
//
// Of what a copy reaches, fp8 reaches 92 % without a transform, integers with rotated keys or values 40 to 57 % (H200,
// 2026-11, evals/results/dequantize.json): a rotation takes some twelve instructions and four shuffles a channel, so a
// row of 128 channels takes 16 cycles to issue and 16 to shuffle (computed), and memory has the next row after 17. To
// rotate four tokens together gave int8 60 % and int4 48 %. Channel scales reached 72 % before values were rotated. To
// load them together with the codes gave 66 % (ncu: multiprocessors 72 % busy, memory 47 %), to widen them once for all
// tokens as well 67 %: both take more registers.
#include <algorithm>

#include "../common/codes.cuh"
#include "../common/device.h"
#include "../common/transform.cuh"
#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kNumWarps = 4;
constexpr int kTokens = 8;   // of a lane, loaded together: the kernel waits for memory, so much has to be under way
constexpr int kMinCtas = 8;  // on a multiprocessor

// Eight channels of a row as loaded.
template <Storage kStorage>
struct Raw {
  Codes<kStorage> codes;
  half_bits scale, zero;  // where a token has its own
};

template <>
struct Raw<Storage::none> {
  uint4 words;
};

// The rows of one head, for the eight channels of a lane from `c` on.
template <Storage kStorage, bool kHasBlocks>
struct Head {
  const Side& side;
  uint8_t* codes;
  const half_bits *scale, *zero;  // of the lane's group; with channel scales, of its channels
  int c, block = -1;              // the block of tokens whose scales are here:
  half_bits scales[kChunk], zeros[kChunk];

  __device__ Head(const Side& side, int64_t b, int64_t h, int c) : side(side), codes(code_row(side, b, h, 0)), c(c) {
    if (kStorage == Storage::none) return;
    const int group = kHasBlocks ? 0 : c / (side.head_dim / side.num_groups);
    scale = scale_at(side, b, h, group, 0) + (kHasBlocks ? c : 0);
    zero = side.is_symmetric ? nullptr : zero_at(side, b, h, group, 0) + (kHasBlocks ? c : 0);
  }

  __device__ __forceinline__ Raw<kStorage> load(int row) const {
    uint8_t* const from = codes + row * side.codes_stride_t;
    Raw<kStorage> raw = {};
    if constexpr (kStorage == Storage::none) {
      // float32 is too wide to wait in registers; see `finish`.
      if (side.dense_dtype != Dtype::fp32) raw.words = reinterpret_cast<const uint4*>(from)[c / kChunk];
    } else {
      raw.codes = Codes<kStorage>::load(Codes<kStorage>::at(from, c));
      if (!kHasBlocks) raw.scale = scale[row * side.scale_stride_t];
      if (!kHasBlocks && zero != nullptr) raw.zero = zero[row * side.zero_stride_t];
    }
    return raw;
  }

  // code · scale + zero. A product of a code and a float16 number is exact in float32, so one rounding is left.
  __device__ __forceinline__ void finish(const Raw<kStorage>& raw, int row, float (&x)[kChunk]) {
    if constexpr (kStorage == Storage::none) {
      if (side.dense_dtype == Dtype::fp32) return load_values(codes + row * side.codes_stride_t, Dtype::fp32, c, x);
      widen(raw.words, side.dense_dtype, x);
    } else {
      if (kHasBlocks && row / kBlockSize != block) {
        block = row / kBlockSize;
        for_all<kChunk>([&](int k) {
          scales[k] = scale[block * side.scale_stride_g + k];
          zeros[k] = zero[block * side.zero_stride_g + k];
        });
      }
      const float offset = code_offset(kStorage, side.is_symmetric);
      for_all<kChunk>([&](int k) {
        const half_bits own_scale = kHasBlocks ? scales[k] : raw.scale, own_zero = kHasBlocks ? zeros[k] : raw.zero;
        x[k] = raw.codes.value(k, offset) * half_to_float(own_scale) + half_to_float(own_zero);
      });
    }
  }
};

// Undoes transform_keys. All lanes of the warp call this together.
__device__ __forceinline__ void undo_transform(const KeyTransform& transform, const LaneTransform<kChunk>& own,
                                               int head_dim, int position, float (&x)[kChunk]) {
  if (transform.is_rotated) rotate(x, head_dim, threadIdx.x % kLanes, position);
  if (transform.smoothing != nullptr) for_all<kChunk>([&](int k) { x[k] = __fmul_rn(x[k], own.smoothing[k]); });
  if (transform.center != nullptr) for_all<kChunk>([&](int k) { x[k] = __fadd_rn(x[k], own.center[k]); });
}

// One side. A warp takes kTokens tokens in each of its rows.
template <Storage kStorage, bool kHasBlocks, bool kIsTransformed>
__global__ void __launch_bounds__(kNumWarps* kLanes, kMinCtas)
    dequantize_side(const __grid_constant__ DequantizeParams params, bool is_key, unsigned ctas_of_head, Laps laps,
                    int max_length) {
  const Side& side = is_key ? params.key_side : params.value_side;
  const unsigned head_number = blockIdx.x / ctas_of_head, part = blockIdx.x - head_number * ctas_of_head;
  const unsigned b = head_number / params.num_kv_heads, h = head_number - b * params.num_kv_heads;
  const int lanes_per_row = static_cast<unsigned>(side.head_dim) / kChunk, rows = kLanes / lanes_per_row;
  const int lane = threadIdx.x % kLanes, row = lane / lanes_per_row, chunk = lane - row * lanes_per_row;
  const int c = chunk * kChunk;
  Head<kStorage, kHasBlocks> head(side, b, h, row < rows ? c : 0);

  const int length = min(max(params.lengths[b], 0), max_length);
  int first_held = params.is_ring ? length - params.capacity : 0;
  if (params.num_seen > 0) first_held = max(first_held, length - params.num_seen);
  const int warp = static_cast<int>(part * kNumWarps + threadIdx.x / kLanes), first = warp * kTokens * rows + row;
  const int end = row < rows ? params.num_tokens : 0;
  const auto is_held = [&](int position) { return position < length && position >= first_held; };
  Raw<kStorage> raw[kTokens];
#pragma unroll
  for (int r = 0; r < kTokens; ++r) {
    const int i = first + r * rows, position = params.begin + i;
    raw[r] = {};
    if (i < end && is_held(position)) raw[r] = head.load(laps.row(position));
  }
  LaneTransform<kChunk> own;
  if constexpr (kIsTransformed) own = {params.key_transform, side.head_dim, static_cast<int>(h), c};
  void* const out = is_key ? params.key : params.value;
  const int64_t out_first = int64_t{head_number} * params.num_tokens * side.head_dim + c;
#pragma unroll
  for (int r = 0; r < kTokens; ++r) {
    const int i = first + r * rows, position = params.begin + i;
    const bool is_there = i < end && is_held(position);
    float x[kChunk] = {};
    if (is_there) head.finish(raw[r], laps.row(position), x);
    if constexpr (kIsTransformed) {
      undo_transform(params.key_transform, own, side.head_dim, chunk, x);
      if (!is_there) for_all<kChunk>([&](int k) { x[k] = 0.f; });
    }
    if (i < end) store_values(out, params.dtype, out_first + int64_t{i} * side.head_dim, x);
  }
  if (side.tail == nullptr) return;
  // Dense tokens, over what their codes gave.
  const int start = params.starts == nullptr ? 0 : min(params.starts[b], max_length);
  const Tail tail(params, laps, side, b, length, length, start);
#pragma unroll 1
  for (int r = 0; r < kTokens; ++r) {
    const int i = first + r * rows, position = params.begin + i;
    if (i >= end || !is_held(position) || !tail.has(side, position)) continue;
    float x[kChunk];
    tail.load(side, h, position, c, x);
    store_values(out, params.dtype, out_first + int64_t{i} * side.head_dim, x);
  }
}

using DequantizeKernel = void (*)(DequantizeParams, bool, unsigned, Laps, int);

template <bool kIsTransformed>
DequantizeKernel kernel_of(const Side& side) {
  if (side.has_channel_scales) return dequantize_side<Storage::int4, true, kIsTransformed>;
  switch (side.storage) {
    case Storage::none: return dequantize_side<Storage::none, false, kIsTransformed>;
    case Storage::int8: return dequantize_side<Storage::int8, false, kIsTransformed>;
    case Storage::int4: return dequantize_side<Storage::int4, false, kIsTransformed>;
    case Storage::fp8: return dequantize_side<Storage::fp8, false, kIsTransformed>;
    case Storage::int2: return dequantize_side<Storage::int2, false, kIsTransformed>;
    case Storage::int3: break;
  }
  return nullptr;
}

}  // namespace

void dequantize(const DequantizeParams& params, void* stream) {
  for (const bool is_key : {true, false}) {
    const Side& side = is_key ? params.key_side : params.value_side;
    const bool is_transformed = is_key && !is_identity(params.key_transform);
    const DequantizeKernel kernel = is_transformed ? kernel_of<true>(side) : kernel_of<false>(side);
    const int64_t tokens_of_cta = int64_t{kNumWarps} * kTokens * (kLanes / (side.head_dim / kChunk));
    const int64_t ctas_of_head = (params.num_tokens + tokens_of_cta - 1) / tokens_of_cta;
    launch("dequantize", kernel, ctas_of_head * params.num_kv_heads * params.batch, kNumWarps * kLanes, 0, stream,
           params, is_key, static_cast<unsigned>(ctas_of_head), laps_of(params),
           max_length_of(params));
  }
}

}  // namespace hf_kvquant::cuda
