// Dense keys and values for attention that no kernel serves, bit for bit as reference.dequantize_tokens. A lane has
// eight channels of a few tokens, so a warp has several rows side by side, and writes them without gaps.
#include <algorithm>

#include "../common/codes.cuh"
#include "../common/device.h"
#include "../common/transform.cuh"
#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kNumWarps = 4;
constexpr int kTokens = 4;  // of a lane, whose loads overlap

// Undoes transform_keys. All lanes of the warp call this together.
__device__ void undo_transform(const KeyTransform& transform, const LaneTransform<kChunk>& own, int head_dim,
                               int position, float (&x)[kTokens][kChunk]) {
  if (transform.is_rotated) rotate(x, head_dim, threadIdx.x % kLanes, position);
  if (transform.smoothing != nullptr) {
    for_all<kTokens, kChunk>([&](int r, int k) { x[r][k] = __fmul_rn(x[r][k], own.smoothing[k]); });
  }
  if (transform.center != nullptr) {
    for_all<kTokens, kChunk>([&](int r, int k) { x[r][k] = __fadd_rn(x[r][k], own.center[k]); });
  }
}

// blockIdx.y: keys or values; blockIdx.x: head and part of its tokens.
__global__ void __launch_bounds__(kNumWarps* kLanes)
    dequantize_rows(const __grid_constant__ DequantizeParams params, unsigned ctas_of_head, Laps laps, int max_length) {
  const bool is_value = blockIdx.y == 1;
  const Side& side = is_value ? params.value_side : params.key_side;
  const unsigned head = blockIdx.x / ctas_of_head, part = blockIdx.x - head * ctas_of_head;
  const unsigned b = head / params.num_kv_heads, h = head - b * params.num_kv_heads;
  const int lanes_per_row = static_cast<unsigned>(side.head_dim) / kChunk, rows = kLanes / lanes_per_row;
  const int lane = threadIdx.x % kLanes, row = lane / lanes_per_row, chunk = lane - row * lanes_per_row;
  const int c = chunk * kChunk;

  const int length = min(max(params.lengths[b], 0), max_length);
  int first_held = params.is_ring ? length - params.capacity : 0;
  if (params.num_seen > 0) first_held = max(first_held, length - params.num_seen);
  const int start = params.starts == nullptr ? 0 : min(params.starts[b], max_length);
  const Tail tail(params, side, length, start);
  const auto token_of = [&](int r) {
    return ((static_cast<int>(part) * kNumWarps + static_cast<int>(threadIdx.x) / kLanes) * kTokens + r) * rows + row;
  };
  const auto is_held = [&](int position) { return position < length && position >= first_held; };

  float x[kTokens][kChunk] = {};
#pragma unroll
  for (int r = 0; r < kTokens; ++r) {
    const int position = params.begin + token_of(r);
    if (row < rows && token_of(r) < params.num_tokens && is_held(position) && !tail.has(side, position)) {
      load_channels(side, b, h, laps.row(position), c, x[r]);
    }
  }
  if (!is_value && !is_identity(params.key_transform)) {
    const LaneTransform<kChunk> own(params.key_transform, side.head_dim, h, c);
    undo_transform(params.key_transform, own, side.head_dim, chunk, x);
  }
#pragma unroll
  for (int r = 0; r < kTokens; ++r) {
    const int i = token_of(r), position = params.begin + i;
    if (row >= rows || i >= params.num_tokens) continue;
    if (!is_held(position)) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) x[r][k] = 0.f;
    } else if (tail.has(side, position)) {
      tail.load(side, b, h, position, c, x[r]);
    }
    const int64_t first = (int64_t{head} * params.num_tokens + i) * side.head_dim + c;
    store_values(is_value ? params.value : params.key, params.dtype, first, x[r]);
  }
}

}  // namespace

void dequantize(const DequantizeParams& params, void* stream) {
  const int most_channels = std::max(params.key_side.head_dim, params.value_side.head_dim);
  const int64_t tokens_of_cta = int64_t{kNumWarps} * kTokens * (kLanes / (most_channels / kChunk));
  const int64_t ctas_of_head = (params.num_tokens + tokens_of_cta - 1) / tokens_of_cta;
  dim3 grid = grid_of("dequantize", ctas_of_head * params.num_kv_heads * params.batch);
  grid.y = 2;
  launch("dequantize", dequantize_rows, {grid, kNumWarps * kLanes, 0, stream, false}, params,
         static_cast<unsigned>(ctas_of_head), laps_of(params.capacity, params.is_ring),
         max_length_of(params.capacity, params.is_ring));
}

}  // namespace hf_kvquant::cuda
