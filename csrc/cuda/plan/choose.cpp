// Chooses the attention kernel for a call: the first row of the table that computes what the formats mean.
#include <algorithm>

#include "../attend/attend_table.h"
#include "plan.h"

namespace hf_kvquant::cuda {
namespace {

// The most new tokens that the attention kernel quantises itself: one warp does it while others wait. Of tokens that
// share the scales of a block, a second one might already be in the next round.
constexpr int kMaxAppended = 4, kMaxAppendedToBlock = 1;

// The fewest query rows of a key-value head for which the chunk kernel is faster (H200, 2026-11): where the attention
// kernel would read the codes more than four times, but for short caches, of which the chunk kernel's start takes most.
constexpr int kMinChunkRows = 65, kMinChunkRowsOfShort = 128, kShortCapacity = 8192;
constexpr int kUnitChannels = 16;  // that a thread of it takes at a time

// Whether long chunks read tiles from a scratch that a launch before fills (chunk/scratch.cuh), from how many query
// rows of a key-value head on, and how large it may be: 16k tokens of eight heads of 128 channels.
constexpr bool kHasScratch = true;
constexpr int kMinScratchRows = 2048;
constexpr int64_t kMaxScratchBytes = int64_t{64} << 20;

// Whether scales can be copied 16 bytes (eight tokens) at a time, or need no copy because all tokens share one.
bool has_copyable_scales(const Side& side) {
  const auto is_aligned = [](const half_bits* data, int64_t stride_b, int64_t stride_h, int64_t stride_g) {
    return (reinterpret_cast<int64_t>(data) / 2 | stride_b | stride_h | stride_g) % 8 == 0;
  };
  if (side.has_channel_scales) {
    return is_aligned(side.scale, side.scale_stride_b, side.scale_stride_h, side.scale_stride_g) &&
           is_aligned(side.zero, side.zero_stride_b, side.zero_stride_h, side.zero_stride_g);
  }
  if (side.scale_stride_t == 0) return side.zero == nullptr || side.zero_stride_t == 0;
  if (side.scale_stride_t != 1 || (side.zero != nullptr && side.zero_stride_t != 1)) return false;
  return is_aligned(side.scale, side.scale_stride_b, side.scale_stride_h, side.scale_stride_g) &&
         (side.zero == nullptr || is_aligned(side.zero, side.zero_stride_b, side.zero_stride_h, side.zero_stride_g));
}

// Whether rows of codes can be copied 4 bytes at a time; int2 rows may have any even number of bytes.
bool has_copyable_codes(const Side& side) {
  const int64_t all = reinterpret_cast<int64_t>(side.codes) | side.codes_stride_b | side.codes_stride_h |
                      side.codes_stride_t | row_bytes_of(side);
  return all % 4 == 0;
}

// Whether the tail, if there is one, has the query's dtype and rows at multiples of 16 bytes.
bool has_loadable_tail(const Side& side, Dtype query_dtype) {
  const int64_t start = reinterpret_cast<int64_t>(side.tail) / 2;
  return side.tail == nullptr || (side.tail_dtype == query_dtype &&
                                  (start | side.tail_stride_b | side.tail_stride_h | side.tail_stride_t) % 8 == 0);
}

// Whether keys or values without codes are numbers of the query's dtype, which tensor cores multiply as they are.
bool has_multipliable_values(const Side& side, Dtype query_dtype) {
  return side.storage != Storage::none || side.dense_dtype == query_dtype;
}

// Whether the kernels of a row compute what the formats of a call mean.
bool serves(const AttendRow& row, const Side& keys, const Side& values) {
  const auto has_groups = [](const Side& side) { return side.num_groups > 1; };
  const auto fits_groups = [&](const Side& side) {
    return !has_groups(side) || side.head_dim / side.num_groups % kGroupChannels == 0;
  };
  const Scales scales = keys.has_channel_scales                  ? Scales::blocks
                        : has_groups(keys) || has_groups(values) ? Scales::groups
                                                                 : Scales::rows;
  return row.key == keys.storage && row.value == values.storage && row.scales == scales &&
         (row.has_key_zero || keys.is_symmetric) && (row.has_value_zero || values.is_symmetric) &&
         (scales == Scales::groups ? fits_groups(keys) && fits_groups(values) : !has_groups(values));
}

// Whether one warp can take a new key and its value at once: 16 bytes per lane, each row in half of the lanes. Without
// codes, rows are copied.
bool are_pairs(const AppendParams& new_tokens) {
  const Dense &key = new_tokens.key, &value = new_tokens.value;
  const Side &keys = new_tokens.key_side, &values = new_tokens.value_side;
  if (!has_multipliable_values(keys, key.dtype) || !has_multipliable_values(values, value.dtype)) return false;
  return key.dtype == value.dtype && has_aligned_rows(key) && has_aligned_rows(value) &&
         keys.head_dim == values.head_dim && keys.num_groups == values.num_groups;
}

}  // namespace

bool has_aligned_rows(const Dense& dense) {
  return dense.dtype != Dtype::fp32 &&
         (reinterpret_cast<int64_t>(dense.data) / 2 | dense.stride_b | dense.stride_h | dense.stride_t) % 8 == 0;
}

AttendKernel choose_kernel(const DecodeParams& params) {
  const Side &keys = params.key_side, &values = params.value_side;
  for (const AttendRow& row : kAttendTable) {
    if (!serves(row, keys, values)) continue;
    const bool is_loadable = params.query.dtype != Dtype::fp32 && has_copyable_codes(keys) &&
                             has_copyable_codes(values) && has_copyable_scales(keys) &&
                             has_copyable_scales(values) && has_loadable_tail(keys, params.query.dtype) &&
                             has_loadable_tail(values, params.query.dtype) &&
                             has_multipliable_values(keys, params.query.dtype) &&
                             has_multipliable_values(values, params.query.dtype) &&
                             (keys.storage != Storage::none || is_identity(params.key_transform));
    if (!is_loadable) return {};
    const int num_rows = params.num_q_heads / params.num_kv_heads * params.q_len;
    const int head_dim = std::max(keys.head_dim, values.head_dim);
    const AttendKernel paged = row.kernel(head_dim, num_rows, true);
    const bool is_planned = params.split_plan != nullptr && num_rows <= paged.rows_per_tile;
    return params.page_table != nullptr || is_planned ? paged : row.kernel(head_dim, num_rows, false);
  }
  return {};
}

AttendKernel choose_chunk_kernel(const DecodeParams& params) {
  const Side &keys = params.key_side, &values = params.value_side;
  const int num_rows = params.num_q_heads / params.num_kv_heads * params.q_len;
  const int min_rows = params.is_chunk ? 1 : params.capacity < kShortCapacity ? kMinChunkRowsOfShort : kMinChunkRows;
  if (num_rows < min_rows || params.query.dtype == Dtype::fp32) return {};
  const auto kernel_for_rows = [&](bool is_streamed) {
    return chunk_kernel_for(std::max(keys.head_dim, values.head_dim),
                            params.softcap > 0.f || params.alibi_slopes != nullptr, is_streamed);
  };
  AttendKernel kernel = kernel_for_rows(kHasScratch && num_rows >= kMinScratchRows);
  if (kernel.fill_scratch != nullptr && scratch_of(params, kernel).most_heads == 0) kernel = kernel_for_rows(false);
  for (const Side* side : {&keys, &values}) {
    const bool has_codes = side->storage != Storage::none;
    if (!has_codes && (kernel.fill_scratch == nullptr || side->dense_dtype == Dtype::fp32)) return {};
    if (side->head_dim % kUnitChannels != 0) return {};
    // All codes that a thread takes have one scale, and are loaded at once.
    if (side->head_dim / side->num_groups % kUnitChannels != 0) return {};
    const int64_t bytes = has_codes ? kUnitChannels * bits_of(side->storage) / 8 : 16;
    const int64_t all = reinterpret_cast<int64_t>(side->codes) | side->codes_stride_b | side->codes_stride_h |
                        side->codes_stride_t;
    if (all % bytes != 0 || side->num_groups > kernel.head_dim / kGroupChannels) return {};
  }
  return has_chunk_code(kernel, current_device()) ? kernel : AttendKernel{};
}

Scratch scratch_of(const DecodeParams& params, const AttendKernel& kernel) {
  const int64_t tile_tokens = kernel.step_tokens;
  const int64_t whole = std::max<int64_t>(1, (params.capacity + tile_tokens - 1) / tile_tokens);
  // With a window, tokens that any query sees; they may begin anywhere in a tile.
  const int64_t seen = int64_t{params.sliding_window} - 1 + params.q_len;
  const int64_t of_window = (seen + tile_tokens - 2) / tile_tokens + 1;
  const int64_t tiles = params.is_ring              ? of_window
                        : params.sliding_window > 0 ? std::min(whole, of_window)
                                                    : whole;
  const int64_t bytes_of_head = 2 * tiles * kernel.step_tokens * kernel.head_dim * 2;  // keys and values, float16
  return {static_cast<int>(std::min<int64_t>(tiles, INT32_MAX)),
          static_cast<int>(std::min<int64_t>(kMaxScratchBytes / bytes_of_head, INT32_MAX))};
}

bool can_append(const AttendKernel& kernel, const AppendParams* new_tokens, int64_t num_row_tiles, int num_warps) {
  const bool is_blocked = kernel.scales == Scales::blocks;
  if (new_tokens == nullptr || num_row_tiles > 1) return false;
  if (new_tokens->q_len > (is_blocked ? kMaxAppendedToBlock : kMaxAppended)) return false;
  const int window = new_tokens->residual_length;
  if (new_tokens->sink_length + window > 0) {
    // The tail gets only the tokens of windows, not the tokens of a block that begins behind the first tokens.
    if (is_blocked && window == 0) return false;
    if (!has_aligned_rows(new_tokens->key) || !has_aligned_rows(new_tokens->value)) return false;
  }
  // Nor others that it keeps for a crop. Without a window, keys of blocks go to a tail of one block.
  const int num_written = is_blocked && window == 0 ? kBlockSize : window;
  const bool has_slack = std::max(new_tokens->key_side.ring, new_tokens->value_side.ring) > num_written;
  if (has_slack && new_tokens->q_len > window) return false;
  // Tokens that share the scale of a channel must be in one round.
  if (is_blocked && kernel.step_tokens * num_warps % kBlockSize != 0) return false;
  if (kernel.has_pairs && !are_pairs(*new_tokens)) return false;
  const auto is_own = [](const Side& side) { return !side.is_frozen && !side.is_shared_by_heads; };
  const Side &keys = new_tokens->key_side, &values = new_tokens->value_side;
  return is_own(keys) && is_own(values) && keys.is_symmetric == !kernel.has_key_zero &&
         values.is_symmetric == !kernel.has_value_zero;
}

}  // namespace hf_kvquant::cuda
