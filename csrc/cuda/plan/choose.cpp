// Whether one kernel serves a call, and which instantiation of it does: the call meets what the kernel requires, of the
// call (csrc/requirements.h) and of the GPU. `plan_decode` in plan.cpp decides which kernel serves: it asks them in
// turn.
#include <algorithm>
#include <string>
#include <utility>

#include "../attend/attend_table.h"
#include "plan.h"

namespace hf_kvquant::cuda {
namespace {

// The most new tokens that the attention kernel quantises itself: one warp does it while others wait. Of tokens that
// share the scales of a block, a second one might already be in the next round.
constexpr int kMaxAppended = 4, kMaxAppendedToBlock = 1;

// The kernels of each row of kAttendTable.
template <size_t... kRows>
AttendKernel kernel_of_row(size_t row, int head_dim, int num_rows, bool is_paged, std::index_sequence<kRows...>) {
  constexpr AttendKernel (*kKernels[])(int, int, bool) = {
      kernel_for<kAttendTable[kRows].key, kAttendTable[kRows].value, kAttendTable[kRows].has_key_zero,
                 kAttendTable[kRows].has_value_zero, kAttendTable[kRows].scales>...};
  return kKernels[row](head_dim, num_rows, is_paged);
}

// What the chunk kernel asks, after what it asks of a call, of its instantiation for the call, the GPU and the build.
struct ChunkRequirement {
  bool (*is_met)(const AttendKernel& kernel, const DecodeParams& params, const Device& device);
  std::string (*sentence)(const AttendKernel& kernel, const DecodeParams& params, const Device& device);
};

int most_groups(const AttendKernel& kernel) { return kernel.head_dim / kGroupChannels; }

constexpr ChunkRequirement kChunkHere[] = {
    {[](const AttendKernel& kernel, const DecodeParams& params, const Device&) {
       const bool has_codes = params.key_side.storage != Storage::none && params.value_side.storage != Storage::none;
       return has_codes || kernel.fill_scratch != nullptr;
     },
     [](const AttendKernel&, const DecodeParams& params, const Device&) {
       return wanted("unquantised tokens of a head within " + std::to_string(kMaxScratchBytes) + " bytes",
                     params.capacity, " tokens");
     }},
    {[](const AttendKernel& kernel, const DecodeParams& params, const Device&) {
       return std::max(params.key_side.num_groups, params.value_side.num_groups) <= most_groups(kernel);
     },
     [](const AttendKernel& kernel, const DecodeParams& params, const Device&) {
       return wanted("at most " + std::to_string(most_groups(kernel)) + " groups in a row", params.key_side.num_groups,
                     " for keys and ", params.value_side.num_groups, " for values");
     }},
    {[](const AttendKernel&, const DecodeParams&, const Device& device) { return device.capability == 90; },
     [](const AttendKernel&, const DecodeParams&, const Device& device) {
       return wanted("a GPU of compute capability 9.0", device.capability / 10, ".", device.capability % 10);
     }},
    {[](const AttendKernel& kernel, const DecodeParams&, const Device& device) {
       return kernel.fixed_bytes <= device.bytes_per_cta;
     },
     [](const AttendKernel& kernel, const DecodeParams&, const Device& device) {
       return wanted(std::to_string(kernel.fixed_bytes) + " bytes of shared memory for a thread block",
                     device.bytes_per_cta);
     }},
    {[](const AttendKernel& kernel, const DecodeParams&, const Device& device) {
       return has_chunk_code(kernel, device);
     },
     [](const AttendKernel&, const DecodeParams&, const Device&) {
       return wanted("an extension built for compute capability 9.0", "one without its code");
     }},
};

int head_dim_of(const DecodeParams& params) { return std::max(params.key_side.head_dim, params.value_side.head_dim); }

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

AttendKernel choose_kernel(const Call& call, std::string* why_not) {
  if (const Unmet unmet = unmet_by_attend(call)) {
    if (why_not != nullptr) *why_not = unmet.sentence(call);
    return {};
  }
  const DecodeParams& params = call.params;
  const auto kernel = [&](bool is_paged) {
    return kernel_of_row(call.row - kAttendTable, head_dim_of(params), num_rows_of(params), is_paged,
                         std::make_index_sequence<kNumAttendRows>());
  };
  const AttendKernel paged = kernel(true);
  const bool is_planned = params.split_plan != nullptr && num_rows_of(params) <= paged.rows_per_tile;
  return params.page_table != nullptr || is_planned ? paged : kernel(false);
}

AttendKernel choose_chunk_kernel(const Call& call, std::string* why_not) {
  if (const Unmet unmet = unmet_by_chunk(call)) {
    if (why_not != nullptr) *why_not = unmet.sentence(call);
    return {};
  }
  const DecodeParams& params = call.params;
  const auto kernel_for = [&](ChunkKind kind) {
    return chunk_kernel_for(head_dim_of(params), changes_scores(params), kind);
  };
  const bool are_few = num_rows_of(params) <= kMostFewRows && !changes_scores(params);
  AttendKernel kernel = kernel_for(are_few ? ChunkKind::few_rows
                                   : kHasScratch && num_rows_of(params) >= kMinScratchRows ? ChunkKind::streamed
                                                                                           : ChunkKind::many_rows);
  if (kernel.fill_scratch != nullptr && scratch_of(params, kernel).most_heads == 0) {
    kernel = kernel_for(ChunkKind::many_rows);
  }
  const Device device = current_device();
  for (const ChunkRequirement& requirement : kChunkHere) {
    if (requirement.is_met(kernel, params, device)) continue;
    if (why_not != nullptr) *why_not = requirement.sentence(kernel, params, device);
    return {};
  }
  return kernel;
}

Scratch scratch_of(const DecodeParams& params, const AttendKernel& kernel) {
  const int64_t tile_tokens = kernel.step_tokens;
  const int64_t whole = std::max<int64_t>(1, (params.capacity + tile_tokens - 1) / tile_tokens);
  // With a window, tokens that any query sees; they may begin anywhere in a tile.
  const int64_t seen = int64_t{params.sliding_window} - 1 + params.q_len;
  const int64_t of_window = (seen + tile_tokens - 2) / tile_tokens + 1;
  const int64_t of_tokens = params.is_ring              ? of_window
                            : params.sliding_window > 0 ? std::min(whole, of_window)
                                                        : whole;
  const int64_t tiles = of_tokens + (most_copies(params) + tile_tokens - 1) / tile_tokens;
  const int64_t bytes_of_head = 2 * tiles * kernel.step_tokens * kernel.head_dim * 2;  // keys and values, float16
  return {static_cast<int>(std::min<int64_t>(tiles, INT32_MAX)),
          static_cast<int>(std::min<int64_t>(kMaxScratchBytes / bytes_of_head, INT32_MAX))};
}

bool can_append(const AttendKernel& kernel, const AppendParams* new_tokens, int64_t num_row_tiles) {
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
  if (kernel.has_pairs && !are_pairs(*new_tokens)) return false;
  const auto is_own = [](const Side& side) { return !side.is_frozen && !side.is_shared_by_heads; };
  const Side &keys = new_tokens->key_side, &values = new_tokens->value_side;
  return is_own(keys) && is_own(values) && keys.is_symmetric == !kernel.has_key_zero &&
         values.is_symmetric == !kernel.has_value_zero;
}

}  // namespace hf_kvquant::cuda
