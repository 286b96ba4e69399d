// Decisions on the host: device and stream, which kernel serves a call, how the call is cut into thread blocks, and the
// launches. The cut depends on shapes and the size of the GPU, never on lengths, which only the device knows.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

// For the general kernel: enough thread blocks to fill every multiprocessor several times, and enough tokens in each to
// be worth a thread block and its share of the combine.
constexpr int kCtasPerMultiprocessor = 4;
constexpr int kMinTokensPerSplit = 128;

constexpr int kLanesOfWarp = 32;

// The first PTX version whose kernels wait for the previous launch themselves (`wait_for_launch_before`), and the first
// driver whose CUDA graphs can record that.
constexpr int kOverlapPtx = 90, kOverlapDriver = 12030;

// The most new tokens that the attention kernel quantises itself: one warp does it while others wait.
constexpr int kMaxAppended = 4;

// Limits of the attention kernel's grid, which is thread blocks of a head x heads x sequences.
constexpr int64_t kMaxGridY = 65535, kMaxGridX = 0x7fffffff;

using StreamGetter = int32_t (*)(int32_t device_index, void** stream);

// Looks up torch's function in the library that torch has loaded. Linking against that library would keep the extension
// from loading with a torch that has no CUDA.
StreamGetter stream_getter() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  void* getter = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
  if (getter == nullptr) {
    throw std::runtime_error("ops: torch must be built with CUDA for tensors on a GPU, found no CUDA library of it.");
  }
  return reinterpret_cast<StreamGetter>(getter);
}

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("decode: ") + what + ", got: " + cudaGetErrorString(error) +
                           ". Was the extension built for this GPU (HF_KVQUANT_CUDA_ARCHS)?");
}

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "the GPU must be usable");
  return device;
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "the GPU must be usable");
  return value;
}

// How a kernel with a given number of warps per thread block runs on a GPU.
struct Occupancy {
  int num_stages;  // of a warp's pipeline: all if they fit, else fewer
  int num_multiprocessors;
  int ctas_per_multiprocessor;                                  // at most; 0: the kernel does not fit
  bool may_overlap;                                             // see cuda::may_overlap
  int bytes_per_multiprocessor, bytes_per_cta, reserved_bytes;  // of shared memory; reserved for every thread block
};

int bytes_needed(const AttendKernel& kernel, int num_warps, int num_stages) {
  return kernel.fixed_bytes + num_warps * num_stages * kernel.stage_bytes;
}

Occupancy find_occupancy(const AttendKernel& kernel, int num_warps, int device) {
  Occupancy found{};
  found.num_multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  found.bytes_per_multiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  found.bytes_per_cta = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  found.reserved_bytes = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, device);
  const auto fits = [&](int stages) { return bytes_needed(kernel, num_warps, stages) <= found.bytes_per_cta; };
  found.num_stages = fits(kernel.num_stages) ? kernel.num_stages : fits(kernel.min_stages) ? kernel.min_stages : 0;
  if (found.num_stages == 0) return found;
  check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, found.bytes_per_cta),
             "the kernel must fit the GPU");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.ctas_per_multiprocessor, kernel.function,
                                                           num_warps * kLanesOfWarp,
                                                           bytes_needed(kernel, num_warps, found.num_stages)),
             "the kernel must fit the GPU");
  found.may_overlap = may_overlap(kernel.function);
  return found;
}

// Returns what `make` returns, and remembers it by `key`. Each call site remembers its own results. A cache that grows
// asks for new keys again and again, so a full memory is cleared.
template <class Key, class Make>
auto remember(const Key& key, Make make) {
  constexpr size_t kMost = 4096;
  static std::mutex mutex;
  static std::map<Key, decltype(make())> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto place = known.find(key);
  if (place != known.end()) return place->second;
  if (known.size() == kMost) known.clear();
  return known.emplace(key, make()).first->second;
}

// find_occupancy for the current device, remembered.
Occupancy occupancy_of(const AttendKernel& kernel, int num_warps) {
  const int device = current_device();
  return remember(std::make_tuple(kernel.function, kernel.fixed_bytes, num_warps, device),
                  [&] { return find_occupancy(kernel, num_warps, device); });
}

Divisor divisor(int64_t value) {
  const auto small = static_cast<unsigned>(value);
  return {small, static_cast<unsigned>((0x7fffffffull + small) / small)};
}

// --- which kernel

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

// Whether the tail, if there is one, has the query's dtype and rows at multiples of 16 bytes.
bool has_loadable_tail(const Side& side, Dtype query_dtype) {
  const int64_t start = reinterpret_cast<int64_t>(side.tail) / 2;
  return side.tail == nullptr || (side.tail_dtype == query_dtype &&
                                  (start | side.tail_stride_b | side.tail_stride_h | side.tail_stride_t) % 8 == 0);
}

// Whether new tokens are 16-bit numbers, in rows at multiples of 16 bytes.
bool has_aligned_rows(const Dense& dense) {
  return dense.dtype != Dtype::fp32 &&
         (reinterpret_cast<int64_t>(dense.data) / 2 | dense.stride_b | dense.stride_h | dense.stride_t) % 8 == 0;
}

bool has_groups(const Side& side) { return side.num_groups > 1; }

AttendKernel choose_kernel(const DecodeParams& params) {
  const Side &keys = params.key_side, &values = params.value_side;
  const auto are = [&](Storage key, Storage value) { return keys.storage == key && values.storage == value; };
  const auto fits_groups = [](const Side& side) {
    return !has_groups(side) || side.head_dim / side.num_groups % 32 == 0;
  };
  const bool is_quantized = keys.storage != Storage::none && values.storage != Storage::none;
  if (params.query.dtype == Dtype::fp32 || !is_quantized || !has_copyable_scales(keys) ||
      !has_copyable_scales(values) || !has_loadable_tail(keys, params.query.dtype) ||
      !has_loadable_tail(values, params.query.dtype)) {
    return {};
  }
  const int head_dim = std::max(keys.head_dim, values.head_dim);
  const int num_rows = params.num_q_heads / params.num_kv_heads * params.q_len;
  const bool is_grouped = has_groups(keys) || has_groups(values);
  if (keys.has_channel_scales) {
    const bool fits = are(Storage::int4, Storage::int4) && !has_groups(values);
    return fits ? attend_int4_channel(head_dim, num_rows) : AttendKernel{};
  }
  if (is_grouped) {
    const bool fits = are(Storage::int4, Storage::int4) && fits_groups(keys) && fits_groups(values);
    return fits ? attend_int4_groups(head_dim, num_rows) : AttendKernel{};
  }
  if (are(Storage::int4, Storage::int4)) return attend_int4(head_dim, num_rows);
  if (are(Storage::fp8, Storage::fp8)) return attend_fp8(head_dim, num_rows);
  if (are(Storage::int8, Storage::int8) && keys.is_symmetric && values.is_symmetric) {
    return attend_int8(head_dim, num_rows);
  }
  if (are(Storage::int8, Storage::int4) && keys.is_symmetric) return attend_k8v4(head_dim, num_rows);
  return {};
}

// Whether one warp can take a new key and its value at once: 16 bytes per lane, each row in half of the lanes.
bool are_pairs(const AppendParams& new_tokens) {
  const Dense &key = new_tokens.key, &value = new_tokens.value;
  const Side &keys = new_tokens.key_side, &values = new_tokens.value_side;
  return key.dtype == value.dtype && has_aligned_rows(key) && has_aligned_rows(value) &&
         keys.head_dim == values.head_dim && keys.num_groups == values.num_groups;
}

// Whether the attention kernel can quantise the new tokens itself. It must support their formats in full, and a single
// thread block must see all values that share a scale and all queries of a head.
bool can_append(const AttendKernel& kernel, const AppendParams* new_tokens, int64_t num_row_tiles, int num_warps) {
  if (new_tokens == nullptr || num_row_tiles > 1 || new_tokens->q_len > kMaxAppended) return false;
  if (new_tokens->sink_length + new_tokens->residual_length > 0) {
    // With dense windows, older tokens complete blocks of keys.
    if (kernel.is_blocked || !has_aligned_rows(new_tokens->key) || !has_aligned_rows(new_tokens->value)) return false;
  }
  // Tokens that share the scale of a channel must be in one round, and a second new token might already be in the next.
  if (kernel.is_blocked && (new_tokens->q_len > 1 || kernel.step_tokens * num_warps % kBlockSize != 0)) return false;
  if (kernel.has_pairs && !are_pairs(*new_tokens)) return false;
  const auto is_own = [](const Side& side) { return !side.is_frozen && !side.is_shared_by_heads; };
  const Side &keys = new_tokens->key_side, &values = new_tokens->value_side;
  return is_own(keys) && is_own(values) && keys.is_symmetric == !kernel.has_key_zero &&
         values.is_symmetric == !kernel.has_value_zero;
}

// Strides are in bytes, and multiples of 16 wherever the kernel uses them.
Origin origin(const void* data, int64_t stride_b, int64_t stride_h) {
  return {data, static_cast<uint32_t>(stride_b / 16), static_cast<uint32_t>(stride_h / 16)};
}

// Whether strides of planes fit an Origin and offsets in the query fit 32 bits. Only a plane of 64 GB would not fit.
bool has_short_strides(const DecodeParams& params) {
  const auto is_short = [](int64_t stride_b, int64_t stride_h) {
    return std::max(std::abs(stride_b), std::abs(stride_h)) / 16 <= INT32_MAX;
  };
  for (const Side* side : {&params.key_side, &params.value_side}) {
    if (!is_short(side->codes_stride_b, side->codes_stride_h)) return false;
    if (std::abs(side->codes_stride_t) > INT32_MAX / kBlockSize) return false;  // so that a whole step fits, too
    if (!is_short(2 * side->scale_stride_b, 2 * side->scale_stride_h)) return false;
    if (!is_short(2 * side->zero_stride_b, 2 * side->zero_stride_h)) return false;
  }
  const Dense& query = params.query;
  return params.batch * query.stride_b + params.num_q_heads * query.stride_h + params.q_len * query.stride_t <=
         INT32_MAX;
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
  return (side.scale_stride_t == 0 && !side.has_channel_scales) || (kernel_has_zero && side.zero == nullptr);
}

// --- how a call is cut

int64_t rows_of(const DecodeParams& params) { return int64_t{params.num_q_heads} / params.num_kv_heads * params.q_len; }

// Floats of the results of one split in the general kernel.
int64_t part_floats(const DecodeParams& params) {
  return int64_t{params.batch} * params.num_q_heads * params.q_len * (params.value_side.head_dim + 2);
}

// The most tokens of a sequence that a call attends to. In a ring these are the tokens that its queries see.
int most_tokens(const DecodeParams& params) {
  return params.is_ring ? std::min(params.capacity, params.sliding_window - 1 + params.q_len) : params.capacity;
}

DecodePlan plan_general(const DecodeParams& params) {
  const int num_multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, current_device());
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

// Into how many thread blocks to split a unit, with how many warps, and how many of them may share a multiprocessor.
struct Cut {
  int64_t splits;
  int num_warps;
  int ctas_per_multiprocessor;

  int64_t slots(int num_multiprocessors) const { return int64_t{num_multiprocessors} * ctas_per_multiprocessor; }
};

// Shared memory of a thread block: at least so much that no more of them run on a multiprocessor than the cut wants.
int shared_bytes(const AttendKernel& kernel, const Occupancy& occupancy, const Cut& cut) {
  const int needed = bytes_needed(kernel, cut.num_warps, occupancy.num_stages);
  if (cut.ctas_per_multiprocessor >= occupancy.ctas_per_multiprocessor) return needed;
  const int too_many =
      occupancy.bytes_per_multiprocessor / (cut.ctas_per_multiprocessor + 1) - occupancy.reserved_bytes;
  return std::min(std::max(needed, too_many + 1), occupancy.bytes_per_cta);
}

// Predicts the time of a cut, in microseconds. Thread blocks run in waves. Those of a wave share the bandwidth, every
// multiprocessor alike, but none reads faster than its warps compute. Nothing is read during the first start and the
// last end; between waves, other thread blocks of a multiprocessor fill in as far as they can. Combining takes longer
// the more parts there are. Constants are fitted to an H200 (2026-11). On other GPUs they are good enough to choose by,
// since the ratio of a full wave to a partial one decides.
double predict(const AttendKernel& kernel, int num_multiprocessors, int64_t num_units, int64_t steps, const Cut& cut) {
  constexpr double kBandwidth = 4.5e6;                         // bytes a microsecond
  constexpr double kChannels = 6700, kGroupedChannels = 5400;  // of keys and values, per warp and microsecond
  constexpr double kStartAndEnd[] = {3.5, 4.2};                // with the fewest warps, with the most
  constexpr double kTurn = 2.5, kCombine = 1.25, kCombinePart = 0.12;
  const int64_t rounds = (steps + cut.num_warps - 1) / cut.num_warps, slots = cut.slots(num_multiprocessors);
  const double step_bytes = kernel.stage_bytes;
  const double bytes = step_bytes * cut.num_warps * static_cast<double>((rounds + cut.splits - 1) / cut.splits);
  const double most = step_bytes / (static_cast<double>(kernel.step_tokens) * kernel.head_dim) *
                      (kernel.is_grouped || kernel.is_blocked ? kGroupedChannels : kChannels) * cut.num_warps;
  const auto wave = [&](int64_t ctas) {
    const int64_t sharing = (ctas + num_multiprocessors - 1) / num_multiprocessors * num_multiprocessors;
    return bytes / std::min(kBandwidth / static_cast<double>(sharing), most);
  };
  const int64_t ctas = num_units * cut.splits, whole = ctas / slots, rest = ctas % slots;
  const double filled_in = std::min(1.0, (cut.ctas_per_multiprocessor - 1) * most * num_multiprocessors / kBandwidth);
  return static_cast<double>(whole) * wave(slots) + (rest > 0 ? wave(rest) : 0) +
         kStartAndEnd[cut.num_warps > kMinAttendWarps] +
         kTurn * (1 - filled_in) * static_cast<double>(whole - (rest > 0 ? 0 : 1)) +
         (cut.splits > 1 ? kCombine + kCombinePart * static_cast<double>(cut.splits) : 0);
}

// The fastest cut with `splits` splits, or with at most `most_splits` if that is 0. It has 0 splits if the kernel does
// not fit the GPU.
Cut choose_cut(const AttendKernel& kernel, int64_t num_units, int64_t steps, int64_t splits, int64_t most_splits) {
  Cut best{};
  double least = 0;
  for (int num_warps = kMinAttendWarps; num_warps <= kMaxAttendWarps; num_warps *= 2) {
    const Occupancy occupancy = occupancy_of(kernel, num_warps);
    const int most_ctas = occupancy.ctas_per_multiprocessor;
    for (int ctas = std::min(2, most_ctas); ctas > 0 && ctas <= most_ctas; ++ctas) {
      Cut cut{std::max<int64_t>(1, splits), num_warps, ctas};
      const int64_t worthwhile =
          std::min({steps / num_warps, 4 * cut.slots(occupancy.num_multiprocessors) / num_units, most_splits});
      for (; cut.splits <= std::max({int64_t{1}, splits, splits > 0 ? 0 : worthwhile}); ++cut.splits) {
        const double time = predict(kernel, occupancy.num_multiprocessors, num_units, steps, cut);
        if (best.splits == 0 || time < least) best = cut, least = time;
      }
    }
  }
  return best;
}

}  // namespace

void* current_stream(int device_index) {
  static const StreamGetter getter = stream_getter();
  void* stream = nullptr;
  const cudaError_t error = cudaSetDevice(device_index);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("ops: the GPU must be usable, got: ") + cudaGetErrorString(error) + ".");
  }
  if (getter(device_index, &stream) != 0) throw std::runtime_error("ops: torch must name its stream, got none.");
  return stream;
}

bool may_overlap(const void* function) {
  return remember(std::make_tuple(function, current_device()), [function] {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, function), "the kernel must fit the GPU");
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver), "the GPU must be usable");
    return attributes.ptxVersion >= kOverlapPtx && driver >= kOverlapDriver;
  });
}

void check_support(const char* where, const Side& side) {
  // Messages are built only when something is refused: every decode comes through here.
  const auto refuse = [where](const std::string& problem) {
    throw std::invalid_argument(std::string(where) + ": " + problem);
  };
  if (side.head_dim > kMaxCudaHeadDim) {
    refuse("`head_dim` must be at most " + std::to_string(kMaxCudaHeadDim) + " for the CUDA kernels, got " +
           std::to_string(side.head_dim) + ". Leave this model unpatched, or run it on the CPU.");
  }
  // Kernels load eight channels at a time, 16 bytes at most.
  const int bytes = side.storage == Storage::int4 ? 4 : side.storage == Storage::none ? 16 : 8;
  const int64_t address = reinterpret_cast<int64_t>(side.codes);
  const int64_t offset = (address | side.codes_stride_b | side.codes_stride_h | side.codes_stride_t) % bytes;
  if (offset != 0) {
    refuse("codes must start at multiples of " + std::to_string(bytes) + " bytes for the CUDA kernels, got a " +
           "remainder of " + std::to_string(offset) + ". Planes are made by KVFormat.allocate.");
  }
}

DecodePlan plan_decode(const DecodeParams& params, const AppendParams* new_tokens) {
  AttendKernel kernel = choose_kernel(params);
  if (kernel.function == nullptr || std::max(params.batch, params.num_kv_heads) > kMaxGridY ||
      !has_short_strides(params)) {
    return plan_general(params);
  }
  const int64_t num_rows = rows_of(params);
  const int64_t num_row_tiles = (num_rows + kernel.rows_per_tile - 1) / kernel.rows_per_tile;
  const int64_t num_units = num_row_tiles * params.num_kv_heads * params.batch;
  const int64_t steps = std::max(1, (most_tokens(params) + kernel.step_tokens - 1) / kernel.step_tokens);
  const int max_length = max_length_of(params.capacity, params.is_ring);
  // A Divisor assigns rounds to splits. With many splits, positions in a ring would go beyond its range, so a ring has
  // fewer; it has too few rows to need more.
  const int64_t rounds = (int64_t{max_length} + kernel.step_tokens - 1) / kernel.step_tokens / kMinAttendWarps + 1;
  const int64_t most_splits = params.is_ring ? INT32_MAX / rounds : INT32_MAX;
  const RowChunks key_chunks = row_chunks(params.key_side, kernel.step_tokens);
  const RowChunks value_chunks = row_chunks(params.value_side, kernel.step_tokens);
  const bool are_dense = is_dense(params.key_side, kernel.head_dim) && is_dense(params.value_side, kernel.head_dim);
  // Shared memory behind the pipelines: a list of chunks, and the untransformed query.
  const int list_bytes = are_dense ? 0 : (key_chunks.num_chunks + value_chunks.num_chunks) * kChunkPlaceBytes;
  const bool has_dense_tokens = params.sink_length + params.residual_length > 0;
  const int plain_query_bytes = has_dense_tokens ? 2 * kernel.rows_per_tile * kernel.head_dim : 0;
  kernel.fixed_bytes += list_bytes + plain_query_bytes;
  // The cut is remembered, since trying all cuts takes microseconds, in every layer and step.
  const int64_t wanted_splits = std::min<int64_t>(params.num_splits, most_splits);
  // A fixed number of splits promises the same bits in every batch. Sums depend on the warps, too, so these are chosen
  // as for a batch of one.
  const int64_t planned_units = wanted_splits > 0 ? num_row_tiles * params.num_kv_heads : num_units;
  const Cut cut = remember(std::make_tuple(kernel.function, kernel.fixed_bytes, current_device(), planned_units, steps,
                                           wanted_splits, most_splits),
                           [&] { return choose_cut(kernel, planned_units, steps, wanted_splits, most_splits); });
  if (cut.splits == 0) return plan_general(params);  // the kernel does not fit the GPU
  const Occupancy occupancy = occupancy_of(kernel, cut.num_warps);
  const int64_t num_splits = cut.splits;
  DecodePlan plan{};
  plan.kernel = kernel;
  plan.num_stages = occupancy.num_stages;
  plan.warps_log2 = cut.num_warps == kMinAttendWarps ? 2 : 3;
  plan.shared_bytes = shared_bytes(kernel, occupancy, cut);
  plan.may_overlap = occupancy.may_overlap;
  plan.rows.num_q_per_kv = divisor(params.num_q_heads / params.num_kv_heads);
  plan.rows.num_rows = static_cast<int>(num_rows);
  plan.rows_per_tile = kernel.rows_per_tile;
  plan.num_row_tiles = static_cast<int>(num_row_tiles);
  plan.appends = can_append(kernel, new_tokens, num_row_tiles, cut.num_warps);
  plan.key_codes = origin(params.key_side.codes, params.key_side.codes_stride_b, params.key_side.codes_stride_h);
  plan.value_codes =
      origin(params.value_side.codes, params.value_side.codes_stride_b, params.value_side.codes_stride_h);
  plan.key_chunks = key_chunks;
  plan.value_chunks = value_chunks;
  plan.query_stride_b = static_cast<uint32_t>(params.query.stride_b);
  plan.query_stride_h = static_cast<uint32_t>(params.query.stride_h);
  plan.query_stride_t = static_cast<uint32_t>(params.query.stride_t);
  plan.laps = laps_of(params.capacity, params.is_ring);
  plan.max_length = max_length;
  if (has_dense_tokens) plan.plain_query_at = bytes_needed(kernel, cut.num_warps, plan.num_stages) - plain_query_bytes;
  list_scales(params, kernel, plan);
  plan.is_dense = are_dense;
  plan.has_gaps = !plan.is_dense || has_gaps(params.key_side, kernel.has_key_zero) ||
                  has_gaps(params.value_side, kernel.has_value_zero);
  // Limits of the grid and of Divisors: thread blocks of a head and rounds of steps by splits, rows by heads of a
  // group.
  const int64_t ctas_of_head = num_row_tiles * num_splits;
  if (ctas_of_head > kMaxGridX || std::max(ctas_of_head, rounds) * num_splits > INT32_MAX ||
      num_rows * plan.rows.num_q_per_kv.value > INT32_MAX) {
    throw std::runtime_error("decode: a call must need fewer thread blocks for a head than " +
                             std::to_string(ctas_of_head) + " (" + std::to_string(num_splits) +
                             " splits). Use fewer splits, or smaller chunks.");
  }
  plan.num_splits = divisor(num_splits);
  plan.ctas_of_head = static_cast<int>(ctas_of_head);
  if (num_splits > 1) {
    plan.num_counters = num_units;
    plan.workspace_floats = num_units * num_splits * kernel.slot_floats;
  }
  return plan;
}

void decode(const DecodeParams& params, const AppendParams* new_tokens, const DecodePlan& plan, float* workspace,
            void* stream) {
  if (new_tokens != nullptr && !plan.appends) append(*new_tokens, stream);
  if (plan.kernel.function == nullptr) {
    decode_general(params, plan, workspace, stream);
    return;
  }
  NewTokens appended{};
  if (plan.appends) appended = {new_tokens->key, new_tokens->value, new_tokens->q_len};
  void* arguments[] = {const_cast<DecodeParams*>(&params), &appended, const_cast<DecodePlan*>(&plan), &workspace};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.ctas_of_head, params.num_kv_heads, params.batch);
  config.blockDim = dim3(kLanesOfWarp << plan.warps_log2);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  // Thread blocks may start before the previous launch ends, as they wait for it themselves: saves 0.2 us a call (H200,
  // 2026-11).
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = plan.may_overlap ? 1 : 0;
  check_cuda(cudaLaunchKernelExC(&config, plan.kernel.function, arguments), "the kernel must start");
}

}  // namespace hf_kvquant::cuda
