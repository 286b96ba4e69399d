// Plans a decode call on the host, which kernel serves it and how it is cut into thread blocks, and launches it.
#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace hf_kvquant::cuda {
namespace {

// For the generic kernel: enough thread blocks to fill every multiprocessor several times, and enough tokens in each to
// be worth a thread block and its share of the combine.
constexpr int kCtasPerMultiprocessor = 4;
constexpr int kMinTokensPerSplit = 128;

// The limit of the attention kernel's grid, which is thread blocks of a head x heads x sequences.
constexpr int64_t kMaxGridX = 0x7fffffff;

// Strides are in bytes, and multiples of 16 wherever the kernel uses them.
Origin origin(const void* data, int64_t stride_b, int64_t stride_h) {
  return {data, static_cast<uint32_t>(stride_b / 16), static_cast<uint32_t>(stride_h / 16)};
}

// Lists the planes of scales in the order in which the kernel copies them.
void list_scales(const DecodeParams& params, const AttendKernel& kernel, DecodePlan& plan) {
  PlaneOfScales* next = plan.scales;
  const auto add = [&](const Side& side, const half_bits* data, int64_t stride_b, int64_t stride_h, int64_t stride_g) {
    // A group of the cache is a multiple of a group of the kernel.
    const int groups_per_group = std::max(1, side.head_dim / side.num_groups / kGroupChannels);
    const bool is_single = side.scale_stride_t == 0 && !side.has_channel_scales;  // all tokens share one
    *next++ = {origin(is_single ? nullptr : data, 2 * stride_b, 2 * stride_h), static_cast<uint32_t>(2 * stride_g / 16),
               divisor(groups_per_group), side.num_groups - 1};
  };
  for (const Side* side : {&params.key_side, &params.value_side}) {
    add(*side, side->scale, side->scale_stride_b, side->scale_stride_h, side->scale_stride_g);
    if (side == &params.key_side ? kernel.has_key_zero : kernel.has_value_zero) {
      add(*side, side->zero, side->zero_stride_b, side->zero_stride_h, side->zero_stride_g);
    }
  }
}

// Whether rows of codes follow each other without gaps and are as wide as the kernel's.
bool is_dense(const Side& side, int kernel_head_dim) {
  const int64_t alignment = reinterpret_cast<int64_t>(side.codes) | side.codes_stride_b | side.codes_stride_h;
  return side.head_dim == kernel_head_dim && side.codes_stride_t == row_bytes_of(side) && alignment % 16 == 0;
}

// The largest chunks that rows can be cut into.
RowChunks row_chunks(const Side& side, int step_tokens) {
  const int64_t all = reinterpret_cast<int64_t>(side.codes) | side.codes_stride_b | side.codes_stride_h |
                      side.codes_stride_t | row_bytes_of(side);
  const int bytes = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : 4, per_row = row_bytes_of(side) / bytes;
  return {bytes, step_tokens * per_row, divisor(per_row)};
}

// Whether copies do not write all of a stage: see Pipeline::fill_gaps.
bool has_gaps(const Side& side, bool kernel_has_zero) {
  return (side.scale != nullptr && side.scale_stride_t == 0 && !side.has_channel_scales) ||
         (kernel_has_zero && side.zero == nullptr);
}

int64_t rows_of(const DecodeParams& params) { return int64_t{params.num_q_heads} / params.num_kv_heads * params.q_len; }

// Floats of the results of one split in the generic kernel.
int64_t part_floats(const DecodeParams& params) {
  return int64_t{params.batch} * params.num_q_heads * params.q_len * (params.value_side.head_dim + 2);
}

// The most tokens of a sequence that a call attends to. In a ring these are the tokens that its queries see.
int most_tokens(const DecodeParams& params) {
  return params.is_ring ? std::min(params.capacity, params.sliding_window - 1 + params.q_len) : params.capacity;
}

DecodePlan plan_general(const DecodeParams& params) {
  const int num_multiprocessors = current_device().num_multiprocessors;
  const int64_t num_rows = rows_of(params);
  DecodePlan plan{};
  plan.rows_per_tile = num_rows == 1 ? 1 : num_rows <= 4 ? 4 : 8;
  plan.num_row_tiles = static_cast<int>((num_rows + plan.rows_per_tile - 1) / plan.rows_per_tile);
  const int64_t num_units = std::max<int64_t>(1, int64_t{plan.num_row_tiles} * params.num_kv_heads * params.batch);
  const int64_t wanted = (int64_t{num_multiprocessors} * kCtasPerMultiprocessor + num_units - 1) / num_units;
  const int num_tokens = most_tokens(params);
  const int64_t worthwhile = std::max(1, num_tokens / kMinTokensPerSplit);
  const int64_t most = std::max(1, num_tokens);  // more would have no token
  const int64_t num_splits =
      params.num_splits > 0 ? std::min<int64_t>(params.num_splits, most) : std::min(wanted, worthwhile);
  plan.num_splits = divisor(num_splits);
  if (num_splits > 1) {
    plan.workspace_floats = num_splits * part_floats(params);
  }
  return plan;
}

// Places in shared memory behind the pipelines, in bytes.
struct Extras {
  int chunk_list;   // see Pipeline::list_chunks
  int plain_query;  // see DecodePlan::plain_query_at

  int total() const { return chunk_list + plain_query; }
};

// What does not depend on how the call is cut: where the kernel finds and how it copies planes and queries.
Extras place_operands(const DecodeParams& params, const AttendKernel& kernel, DecodePlan& plan) {
  const Side &keys = params.key_side, &values = params.value_side;
  plan.rows = {divisor(params.num_q_heads / params.num_kv_heads), static_cast<int>(rows_of(params))};
  plan.rows_per_tile = kernel.rows_per_tile;
  plan.key_codes = origin(keys.codes, keys.codes_stride_b, keys.codes_stride_h);
  plan.value_codes = origin(values.codes, values.codes_stride_b, values.codes_stride_h);
  plan.key_chunks = row_chunks(keys, kernel.step_tokens);
  plan.value_chunks = row_chunks(values, kernel.step_tokens);
  plan.query_stride_b = static_cast<uint32_t>(params.query.stride_b);
  plan.query_stride_h = static_cast<uint32_t>(params.query.stride_h);
  plan.query_stride_t = static_cast<uint32_t>(params.query.stride_t);
  plan.laps = laps_of(params);
  plan.max_length = max_length_of(params);
  list_scales(params, kernel, plan);
  plan.is_dense = is_dense(keys, kernel.head_dim) && is_dense(values, kernel.head_dim);
  plan.has_gaps = !plan.is_dense || has_gaps(keys, kernel.has_key_zero) || has_gaps(values, kernel.has_value_zero);
  const int num_chunks = plan.is_dense ? 0 : plan.key_chunks.num_chunks + plan.value_chunks.num_chunks;
  const bool has_plain_query = params.sink_length + params.residual_length > 0 || kernel.scales == Scales::blocks;
  return {num_chunks * kChunkPlaceBytes, has_plain_query ? 2 * kernel.rows_per_tile * kernel.head_dim : 0};
}

}  // namespace

void check_support(const char* where, const Side& side, int max_head_dim) {
  // Messages are built only when something is refused: every decode comes through here.
  const auto refuse = [where](const std::string& problem) {
    throw std::invalid_argument(std::string(where) + ": " + problem);
  };
  if (side.head_dim > max_head_dim) {
    refuse("`head_dim` must be at most " + std::to_string(max_head_dim) + " for the CUDA kernels, got " +
           std::to_string(side.head_dim) + ". Leave this model unpatched, or run it on the CPU.");
  }
  // Kernels load eight channels at a time: values 16 bytes at once, codes of b bits all b bytes at once or, where these
  // are no power of two, single bytes.
  const int bits = bits_of(side.storage), bytes = side.storage == Storage::none ? 16 : bits & -bits;
  const int64_t address = reinterpret_cast<int64_t>(side.codes);
  const int64_t offset = (address | side.codes_stride_b | side.codes_stride_h | side.codes_stride_t) % bytes;
  if (offset != 0) {
    refuse("codes must start at multiples of " + std::to_string(bytes) + " bytes for the CUDA kernels, got a " +
           "remainder of " + std::to_string(offset) + ". Planes are made by KVFormat.allocate.");
  }
}

int most_copies(const DecodeParams& params) {
  if (params.is_chunk || params.q_len == 1) return 0;
  const Side &keys = params.key_side, &values = params.value_side;
  const auto most = [&](const Side& side, int step) {
    if (side.tail == nullptr) return 0;
    const int num_steps = (params.q_len - 1 + step - 1) / step;
    return std::min(num_steps * step, side.ring);
  };
  const int of_keys = most(keys, keys.has_channel_scales ? kBlockSize : 1);
  return of_keys + (keys.has_channel_scales || keys.tail == nullptr ? most(values, 1) : 0);
}

namespace {

// The most tiles of a side that have tokens without codes, wherever these begin: tiles of the tail, of a chunk, and of
// copies.
DensePlan dense_plan(const DecodeParams& params, const Side& side, int tile_tokens) {
  const auto most_tiles = [&](int num_tokens) {
    return num_tokens == 0 ? 0 : (num_tokens + tile_tokens - 2) / tile_tokens + 1;
  };
  const int num_new = params.is_chunk ? params.q_len : most_copies(params);
  if (side.tail == nullptr) return {0, most_tiles(num_new)};
  const int unfinished = side.has_channel_scales ? kBlockSize - 1 : 0;
  // Without copies, the first query has the window of the last one.
  const int earlier = num_new > 0 && !params.is_chunk ? params.q_len - 1 : 0;
  const int newest = std::min(params.residual_length + unfinished + earlier, std::max(side.ring, unfinished));
  return {most_tiles(params.sink_length), most_tiles(newest + num_new)};
}

// Cuts a call into slices whose tiles fit the scratch: of whole sequences, or else of heads of one sequence, all of
// about the same size.
void slice(const DecodeParams& params, DecodePlan& plan) {
  plan.slice_batch = params.batch, plan.slice_heads = params.num_kv_heads;
  if (plan.kernel.fill_scratch == nullptr) return;
  const Scratch scratch = scratch_of(params, plan.kernel);
  plan.scratch_tiles = scratch.tiles;
  const auto evenly = [](int count, int most) {
    const int slices = (count + most - 1) / most;
    return (count + slices - 1) / slices;
  };
  if (scratch.most_heads >= params.num_kv_heads) {
    plan.slice_batch = evenly(params.batch, scratch.most_heads / params.num_kv_heads);
  } else {
    plan.slice_batch = 1, plan.slice_heads = evenly(params.num_kv_heads, scratch.most_heads);
  }
}

// A plan for the chunk kernel; its `kernel.function` is nullptr where that does not serve.
DecodePlan plan_many_rows(const Call& call, std::string* why_not) {
  const DecodeParams& params = call.params;
  DecodePlan plan{};
  const AttendKernel& kernel = plan.kernel = choose_chunk_kernel(call, why_not);
  if (kernel.function == nullptr) return {};
  place_operands(params, kernel, plan);
  const int64_t row_tiles = (rows_of(params) + kernel.rows_per_tile - 1) / kernel.rows_per_tile;
  slice(params, plan);
  const int64_t num_heads = int64_t{plan.slice_batch} * plan.slice_heads, num_units = row_tiles * num_heads;
  const int64_t steps = std::max(1, (most_tokens(params) + kernel.step_tokens - 1) / kernel.step_tokens);
  const Device device = current_device();
  const int64_t splits = params.num_splits > 0 ? std::min<int64_t>(params.num_splits, steps)
                                               : choose_chunk_splits(kernel, device, num_units, steps);
  const int64_t ctas_of_head = row_tiles * splits;
  if (std::max(ctas_of_head, int64_t{plan.max_length} / kernel.step_tokens + 1) * splits > INT32_MAX ||
      rows_of(params) * plan.rows.num_q_per_kv.value > INT32_MAX) {
    if (why_not != nullptr) {
      *why_not = wanted("fewer thread blocks for a head", ctas_of_head, ", in ", splits, " splits");
    }
    return {};
  }
  plan.may_overlap = may_overlap(reinterpret_cast<const void*>(kernel.function));
  plan.shared_bytes = kernel.fixed_bytes;
  plan.num_row_tiles = static_cast<int>(row_tiles);
  plan.num_splits = divisor(splits);
  plan.ctas_of_head = static_cast<int>(ctas_of_head);
  plan.dense[0] = dense_plan(params, params.key_side, kernel.step_tokens);
  plan.dense[1] = dense_plan(params, params.value_side, kernel.step_tokens);
  const int64_t tiles_of_head = plan.scratch_tiles > 0 ? 2 * int64_t{plan.scratch_tiles}
                                                       : plan.dense[0].count() + plan.dense[1].count();
  plan.tile_floats =
      num_heads * tiles_of_head * kernel.filled_tile_bytes / static_cast<int64_t>(sizeof(float));
  plan.workspace_floats = plan.tile_floats + (splits > 1 ? num_units * splits * kernel.slot_floats : 0);
  return plan;
}

// A plan for the attention kernel; its `kernel.function` is nullptr where that does not serve.
DecodePlan plan_attend(const Call& call, std::string* why_not) {
  const DecodeParams& params = call.params;
  DecodePlan plan{};
  AttendKernel& kernel = plan.kernel = choose_kernel(call, why_not);
  if (kernel.function == nullptr) return {};
  const Extras extras = place_operands(params, kernel, plan);
  kernel.fixed_bytes += extras.total();
  const int64_t num_rows = rows_of(params);
  const int64_t num_row_tiles = (num_rows + kernel.rows_per_tile - 1) / kernel.rows_per_tile;
  const int64_t num_units = num_row_tiles * params.num_kv_heads * params.batch;
  const int64_t steps = std::max(1, (most_tokens(params) + kernel.step_tokens - 1) / kernel.step_tokens);
  // A Divisor assigns rounds to splits. With many splits, positions in a ring would go beyond its range, so a ring has
  // fewer; it has too few rows to need more.
  const int64_t all_steps = (int64_t{plan.max_length} + kernel.step_tokens - 1) / kernel.step_tokens;
  const int64_t rounds = all_steps / kernel.min_warps + 1;
  const int64_t most_splits = params.is_ring ? INT32_MAX / rounds : INT32_MAX;
  const int64_t wanted_splits = std::min<int64_t>(params.num_splits, most_splits);
  const bool is_planned = params.split_plan != nullptr && num_row_tiles == 1;
  // A fixed number of splits promises the same bits in every batch. Sums depend on the warps, too, so these are chosen
  // as for a batch of one.
  const int64_t planned_units = wanted_splits > 0 ? num_row_tiles * params.num_kv_heads : num_units;
  const Device device = current_device();
  const int num_slots = std::max(0, params.num_planned - params.batch);
  const bool is_fine = is_fine_plan(device, int64_t{num_slots} * params.num_kv_heads);
  const Cut cut = is_planned ? planned_cut(kernel, device, is_fine)
                             : choose_cut(kernel, device, planned_units, steps, wanted_splits, most_splits);
  if (cut.splits == 0) {
    if (why_not != nullptr) {
      *why_not = wanted(std::to_string(bytes_needed(kernel, kernel.min_warps, kernel.min_stages)) +
                            " bytes of shared memory for a thread block",
                        device.bytes_per_cta);
    }
    return {};
  }
  const Occupancy occupancy = occupancy_of(kernel, cut.num_warps, device);
  plan.num_stages = occupancy.num_stages;
  plan.may_overlap = occupancy.may_overlap;
  for (plan.warps_log2 = 0; 1 << plan.warps_log2 < cut.num_warps;) ++plan.warps_log2;
  plan.shared_bytes = shared_bytes(kernel, device, occupancy, cut);
  plan.has_dense_tokens = params.sink_length + params.residual_length > 0;
  plan.plain_query_at = bytes_needed(kernel, cut.num_warps, plan.num_stages) - extras.plain_query;
  plan.appends = can_append(kernel, call.new_tokens, num_row_tiles);
  // Limits of the grid and of Divisors: thread blocks of a head and rounds of steps by splits, rows by heads of a
  // group.
  const int64_t ctas_of_head = num_row_tiles * cut.splits;
  if (ctas_of_head > kMaxGridX || std::max(ctas_of_head, rounds) * cut.splits > INT32_MAX ||
      num_rows * plan.rows.num_q_per_kv.value > INT32_MAX) {
    throw std::runtime_error("decode: a call must need fewer thread blocks for a head than " +
                             std::to_string(ctas_of_head) + " (" + std::to_string(cut.splits) +
                             " splits). Use fewer splits, or smaller chunks.");
  }
  plan.num_row_tiles = static_cast<int>(num_row_tiles);
  plan.num_splits = divisor(cut.splits);
  plan.ctas_of_head = static_cast<int>(ctas_of_head);
  if (is_planned) {
    plan.split_plan = params.split_plan, plan.num_planned = params.num_planned;
    plan.num_slots = num_slots;
    // Thread blocks with shares of one length start and end together, and nothing is read meanwhile. So where very many
    // follow each other, long and short ones take turns: 424 requests of 0.5k to 2k tokens take 230 us with k8v4, and
    // else 250; with int8 272, and else 288. Scales of channels or groups take so many instructions that it is better
    // if warps execute the same ones and find them in the cache: int4 takes 257 us in turns, and else 236. `none` is at
    // the limit of memory either way (H200, 2026-12).
    plan.mixes_shares = is_fine && kernel.scales == Scales::rows && kernel.key != Storage::none;
    plan.num_counters = int64_t{plan.num_slots} * params.num_kv_heads;
    plan.workspace_floats = plan.num_counters * kernel.slot_floats;
  } else if (cut.splits > 1) {
    plan.num_counters = num_units;
    plan.workspace_floats = num_units * cut.splits * kernel.slot_floats;
  }
  return plan;
}

// Launches a chunk kernel, slice by slice. Slices use the same workspace one after the other.
void launch_chunk(const DecodeParams& params, const NewTokens& new_tokens, const DecodePlan& whole, float* workspace,
                  void* stream) {
  const AttendKernel& kernel = whole.kernel;
  const auto start = [&](auto function, const DecodePlan& plan, int num_ctas, int num_threads, int num_bytes) {
    const int heads = std::min(plan.slice_heads, params.num_kv_heads - plan.first_h);
    const int batch = std::min(plan.slice_batch, params.batch - plan.first_b);
    const Launch how = {dim3(num_ctas, heads, batch), num_threads, static_cast<size_t>(num_bytes), stream,
                        plan.may_overlap};
    launch("decode", function, how, params, new_tokens, plan, workspace);
  };
  DecodePlan plan = whole;
  for (plan.first_b = 0; plan.first_b < params.batch; plan.first_b += plan.slice_batch) {
    for (plan.first_h = 0; plan.first_h < params.num_kv_heads; plan.first_h += plan.slice_heads) {
      const int num_dense = plan.dense[0].count() + plan.dense[1].count();
      if (num_dense > 0) start(kernel.fill_dense, plan, num_dense, kernel.fill_dense_threads, 0);
      if (kernel.fill_scratch != nullptr) {
        start(kernel.fill_scratch, plan, 2 * plan.scratch_tiles, kernel.fill_scratch_threads,
              kernel.fill_scratch_bytes);
      }
      start(kernel.function, plan, plan.ctas_of_head, kernel.num_threads, plan.shared_bytes);
      if (plan.workspace_floats == plan.tile_floats) continue;
      start(kernel.combine, plan, plan.num_row_tiles * kernel.combine_ctas, kernel.combine_threads, 0);
    }
  }
}

}  // namespace

DecodePlan plan_chunk(const DecodeParams& params, const AppendParams& new_tokens, std::string* why_not) {
  return plan_many_rows({params, &new_tokens}, why_not);
}

DecodePlan plan_decode(const DecodeParams& params, const AppendParams* new_tokens) {
  const Call call{params, new_tokens};
  if (const DecodePlan chunk = plan_many_rows(call, nullptr); chunk.kernel.function != nullptr) return chunk;
  DecodePlan plan = plan_attend(call, nullptr);
  if (plan.kernel.function == nullptr) plan = plan_general(params);
  return plan;
}

std::string why_general_here(const DecodeParams& params, const AppendParams* new_tokens) {
  const Call call{params, new_tokens};
  std::string why_not_attend, why_not_chunk;
  plan_many_rows(call, &why_not_chunk);
  plan_attend(call, &why_not_attend);
  return why_general(call, why_not_attend, why_not_chunk);
}

void decode(const DecodeParams& params, const AppendParams* new_tokens, const DecodePlan& plan, float* workspace,
            void* stream) {
  if (new_tokens != nullptr && !plan.appends && !params.is_chunk) append(*new_tokens, stream);
  if (plan.kernel.function == nullptr) {
    decode_general(params, plan, workspace, stream);
    return;
  }
  NewTokens appended{};
  if (plan.appends || params.is_chunk) appended = {new_tokens->key, new_tokens->value, new_tokens->q_len};
  const AttendKernel& kernel = plan.kernel;
  if (kernel.combine != nullptr) {
    launch_chunk(params, appended, plan, workspace, stream);
    return;
  }
  // An overlap with the previous launch saves 0.2 us a call (H200, 2026-11).
  const int last_axis = plan.split_plan == nullptr ? params.batch : plan.num_planned;
  const Launch how = {dim3(plan.ctas_of_head, params.num_kv_heads, last_axis), kLanesOfWarp << plan.warps_log2,
                      static_cast<size_t>(plan.shared_bytes), stream, plan.may_overlap};
  launch("decode", kernel.function, how, params, appended, plan, workspace);
}

}  // namespace hf_kvquant::cuda
