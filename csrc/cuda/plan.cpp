// What is decided on the host: device and stream, which kernel serves a call, how it is cut into thread blocks, and the
// launches. The cut sees shapes and the GPU's size, never a length, which only the device knows.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda.h"

namespace hf_kvquant::cuda {
namespace {

// The general kernel: enough thread blocks to fill every multiprocessor several times over, while a part keeps enough
// tokens to be worth a block and its share of the combine.
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kMinTokensPerSplit = 128;

// The warps of a block take steps in turn.
constexpr int kStepsAtATime = kAttendThreads / 32;

using StreamGetter = int32_t (*)(int32_t device_index, void** stream);

// Looked up in the library that torch has loaded: linked against, it would keep the extension from loading beside a
// torch without CUDA.
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

// How a kernel runs on a GPU.
struct Residency {
  int num_stages;  // of the rings: all where they fit, fewer where they do not; 0: the kernel does not fit
  int num_multiprocessors;
  int blocks_per_multiprocessor;                                  // at most
  int bytes_per_multiprocessor, bytes_per_block, reserved_bytes;  // of shared memory, the latter for every block
};

Residency find_residency(const AttendKernel& kernel, int device) {
  Residency found{};
  found.num_multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  found.bytes_per_multiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  found.bytes_per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  found.reserved_bytes = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, device);
  const auto bytes = [&](int stages) { return kernel.fixed_bytes + stages * kernel.bytes_per_stage; };
  const auto fits = [&](int stages) { return bytes(stages) <= found.bytes_per_block; };
  found.num_stages = fits(kernel.num_stages) ? kernel.num_stages : fits(kernel.min_stages) ? kernel.min_stages : 0;
  if (found.num_stages == 0) return found;
  check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, found.bytes_per_block),
             "the kernel must fit the GPU");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.blocks_per_multiprocessor, kernel.function,
                                                           kAttendThreads, bytes(found.num_stages)),
             "the kernel must fit the GPU");
  if (found.blocks_per_multiprocessor == 0) found.num_stages = 0;
  return found;
}

// The same, remembered, for the current device.
Residency residency(const AttendKernel& kernel) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Residency> known;
  const int device = current_device();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto place = known.find({kernel.function, device});
  if (place != known.end()) return place->second;
  return known[{kernel.function, device}] = find_residency(kernel, device);
}

// Shared memory of a block such that no more than `blocks` run on a multiprocessor.
int shared_bytes(const AttendKernel& kernel, const Residency& resident, int blocks) {
  const int needed = kernel.fixed_bytes + resident.num_stages * kernel.bytes_per_stage;
  if (blocks >= resident.blocks_per_multiprocessor) return needed;
  const int too_many = resident.bytes_per_multiprocessor / (blocks + 1) - resident.reserved_bytes;
  return std::min(std::max(needed, too_many + 1), resident.bytes_per_block);
}

// --- which kernel

// Scales are copied 16 bytes at a time, eight tokens, or not at all.
bool has_copyable_scales(const Side& side) {
  const auto is_aligned = [](const half_bits* data, int64_t stride_b, int64_t stride_h, int64_t stride_g) {
    return (reinterpret_cast<int64_t>(data) / 2 | stride_b | stride_h | stride_g) % 8 == 0;
  };
  if (side.scale_stride_t == 0) return side.zero == nullptr || side.zero_stride_t == 0;
  if (side.scale_stride_t != 1 || (side.zero != nullptr && side.zero_stride_t != 1)) return false;
  return is_aligned(side.scale, side.scale_stride_b, side.scale_stride_h, side.scale_stride_g) &&
         (side.zero == nullptr || is_aligned(side.zero, side.zero_stride_b, side.zero_stride_h, side.zero_stride_g));
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
      !has_copyable_scales(values)) {
    return {};
  }
  const int head_dim = std::max(keys.head_dim, values.head_dim);
  const int num_rows = params.num_q_heads / params.num_kv_heads * params.q_len;
  const bool is_grouped = has_groups(keys) || has_groups(values);
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

// Whether the kernel may quantise the new tokens itself: it must know every format in full, and a single block of it
// must see all that shares a scale, and all queries of a head.
bool can_append(const AttendKernel& kernel, const AppendParams* new_tokens, int64_t num_row_tiles) {
  if (new_tokens == nullptr || num_row_tiles > 1) return false;
  const auto is_own = [](const Side& side) { return !side.is_frozen && !side.is_shared_by_heads; };
  const Side &keys = new_tokens->key_side, &values = new_tokens->value_side;
  return is_own(keys) && is_own(values) && keys.is_symmetric == !kernel.has_key_zero &&
         values.is_symmetric == !kernel.has_value_zero;
}

// --- how it is cut

Divisor divisor(int64_t value) {
  const auto small = static_cast<unsigned>(value);
  return {small, static_cast<unsigned>((0xffffffffull + small) / small)};
}

DecodePlan plan_general(const DecodeParams& params) {
  const int num_multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, current_device());
  const int64_t num_rows = int64_t{params.num_q_heads} / params.num_kv_heads * params.q_len;
  DecodePlan plan{};
  plan.rows_per_tile = num_rows == 1 ? 1 : num_rows <= 4 ? 4 : 8;
  plan.num_row_tiles = divisor((num_rows + plan.rows_per_tile - 1) / plan.rows_per_tile);
  const int64_t num_units =
      std::max<int64_t>(1, int64_t{plan.num_row_tiles.value} * params.num_kv_heads * params.batch);
  const int64_t wanted = (int64_t{num_multiprocessors} * kBlocksPerMultiprocessor + num_units - 1) / num_units;
  const int64_t worthwhile = std::max(1, params.capacity / kMinTokensPerSplit);
  const int64_t num_splits = params.num_splits > 0 ? params.num_splits : std::min(wanted, worthwhile);
  plan.num_splits = divisor(num_splits);
  if (num_splits > 1) {
    plan.workspace_floats =
        num_splits * params.batch * params.num_q_heads * params.q_len * (params.value_side.head_dim + 2);
  }
  return plan;
}

// Into how many parts to cut units, and how many blocks to let run on a multiprocessor.
struct Cut {
  int64_t splits;
  int blocks_per_multiprocessor;
};

// What a cut takes, in microseconds. Blocks run in waves; those of a wave share the bandwidth, a multiprocessor each as
// much as another, but none reads faster than its warps compute. The first start and the last end cost time during
// which nothing is read; in between, neighbours fill in, better the more there are. Whoever combines parts takes longer
// the more there are. Constants fitted to an H200 (2026-11). They carry over to other GPUs as far as choosing needs it,
// since what counts is the ratio of a wave to its rest.
double predict(const AttendKernel& kernel, const Residency& resident, int64_t num_units, int64_t steps,
               const Cut& cut) {
  constexpr double kBandwidth = 4.5e6, kMaxPerBlock = 26e3;  // bytes a microsecond
  constexpr double kStartAndEnd = 7.5, kBetweenTwo = 2.5, kBetweenMore = 0.5, kCombine = 2.5, kCombinePart = 0.15;
  const double bytes = static_cast<double>(kernel.bytes_per_stage) / kStepsAtATime *
                       static_cast<double>((steps + cut.splits - 1) / cut.splits);
  const int64_t processors = resident.num_multiprocessors, slots = processors * cut.blocks_per_multiprocessor;
  const auto wave = [&](int64_t blocks) {
    const double sharing = static_cast<double>((blocks + processors - 1) / processors * processors);
    return bytes / std::min(kBandwidth / sharing, kMaxPerBlock);
  };
  const int64_t blocks = num_units * cut.splits, whole = blocks / slots, rest = blocks % slots;
  const double between = cut.blocks_per_multiprocessor <= 2 ? kBetweenTwo : kBetweenMore;
  return static_cast<double>(whole) * wave(slots) + (rest > 0 ? wave(rest) : 0) + kStartAndEnd +
         between * static_cast<double>(whole - (rest > 0 ? 0 : 1)) +
         (cut.splits > 1 ? kCombine + kCombinePart * static_cast<double>(cut.splits) : 0);
}

// The cut that takes least, with `splits` parts if that is not 0.
Cut choose_cut(const AttendKernel& kernel, const Residency& resident, int64_t num_units, int64_t steps,
               int64_t splits) {
  const int64_t slots = int64_t{resident.num_multiprocessors} * resident.blocks_per_multiprocessor;
  const int64_t most = std::max<int64_t>(1, std::min(steps / kStepsAtATime, 4 * slots / num_units));
  Cut best{1, 0};
  double least = 0;
  for (int blocks = std::min(2, resident.blocks_per_multiprocessor); blocks <= resident.blocks_per_multiprocessor;
       ++blocks) {
    for (int64_t tried = splits > 0 ? splits : 1; tried <= (splits > 0 ? splits : most); ++tried) {
      const double time = predict(kernel, resident, num_units, steps, {tried, blocks});
      if (best.blocks_per_multiprocessor == 0 || time < least) best = {tried, blocks}, least = time;
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

void check_support(const char* where, const Side& side) {
  std::ostringstream message;
  message << where << ": ";
  if (side.head_dim > kMaxCudaHeadDim) {
    message << "`head_dim` must be at most " << kMaxCudaHeadDim << " for the CUDA kernels, got " << side.head_dim
            << ". Leave this model unpatched, or run it on the CPU.";
    throw std::invalid_argument(message.str());
  }
  // Kernels load eight channels at a time, 16 bytes at most.
  const int bytes = side.storage == Storage::int4 ? 4 : side.storage == Storage::none ? 16 : 8;
  const int64_t address = reinterpret_cast<int64_t>(side.codes);
  const int64_t offset = (address | side.codes_stride_b | side.codes_stride_h | side.codes_stride_t) % bytes;
  if (offset != 0) {
    message << "codes must start at multiples of " << bytes << " bytes for the CUDA kernels, got a remainder of "
            << offset << ". Planes are made by KVFormat.allocate.";
    throw std::invalid_argument(message.str());
  }
}

DecodePlan plan_decode(const DecodeParams& params, const AppendParams* new_tokens) {
  const AttendKernel kernel = choose_kernel(params);
  if (kernel.function == nullptr) return plan_general(params);
  const Residency resident = residency(kernel);
  if (resident.num_stages == 0) return plan_general(params);
  const int64_t num_rows = int64_t{params.num_q_heads} / params.num_kv_heads * params.q_len;
  DecodePlan plan{};
  plan.kernel = kernel;
  plan.num_stages = resident.num_stages;
  plan.rows.num_q_per_kv = divisor(params.num_q_heads / params.num_kv_heads);
  plan.rows.num_rows = static_cast<int>(num_rows);
  plan.rows_per_tile = kernel.rows_per_tile;
  const int64_t num_row_tiles = (num_rows + kernel.rows_per_tile - 1) / kernel.rows_per_tile;
  plan.num_row_tiles = divisor(num_row_tiles);
  plan.num_kv_heads = divisor(params.num_kv_heads);
  plan.appends = can_append(kernel, new_tokens, num_row_tiles);
  const int64_t num_units = num_row_tiles * params.num_kv_heads * params.batch;
  const int64_t steps = std::max(1, (params.capacity + kernel.step_tokens - 1) / kernel.step_tokens);
  const Cut cut = choose_cut(kernel, resident, num_units, steps, params.num_splits);
  const int64_t num_splits = cut.splits;
  plan.shared_bytes = shared_bytes(kernel, resident, cut.blocks_per_multiprocessor);
  const int64_t num_blocks = num_units * num_splits;
  // What Divisor can take: blocks by splits, units by heads and tiles, rows by heads of a group.
  const int64_t largest = std::max({num_splits, num_row_tiles, int64_t{params.num_kv_heads}});
  if (num_blocks * largest > UINT32_MAX || num_rows * plan.rows.num_q_per_kv.value > UINT32_MAX) {
    throw std::runtime_error("decode: a call must need fewer thread blocks than " + std::to_string(num_blocks) + " (" +
                             std::to_string(num_splits) + " splits). Use a smaller batch, or smaller chunks.");
  }
  plan.num_splits = divisor(num_splits);
  plan.num_blocks = static_cast<int>(num_blocks);
  if (num_splits > 1) {
    plan.num_counters = num_units;
    plan.workspace_floats = num_blocks * kernel.slot_floats;
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
  check_cuda(cudaLaunchKernel(plan.kernel.function, dim3(plan.num_blocks), dim3(kAttendThreads), arguments,
                              plan.shared_bytes, static_cast<cudaStream_t>(stream)),
             "the kernel must start");
}

}  // namespace hf_kvquant::cuda
