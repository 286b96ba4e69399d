// What is decided on the host before a kernel runs: device and stream, what there are kernels for, and how a decode
// call is cut into thread blocks. The cut sees shapes and the GPU's size, never a length, which only the device knows.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kMaxHeadDim = 256;  // a warp holds one row, eight channels a lane

// Enough thread blocks to fill every multiprocessor several times over, while a part keeps enough tokens to be worth a
// block and its share of the combine. First values, to be replaced by measured ones.
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kMinTokensPerSplit = 128;

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
  if (side.head_dim > kMaxHeadDim) {
    message << "`head_dim` must be at most " << kMaxHeadDim << " for the CUDA kernels, got " << side.head_dim
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

DecodePlan plan_decode(const DecodeParams& params) {
  int device = 0, num_multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t num_rows = int64_t{params.num_q_heads} / params.num_kv_heads * params.q_len;
  DecodePlan plan{};
  plan.rows_per_block = num_rows == 1 ? 1 : num_rows <= 4 ? 4 : 8;
  const int64_t num_tiles = (num_rows + plan.rows_per_block - 1) / plan.rows_per_block;
  const int64_t num_blocks = std::max<int64_t>(1, num_tiles * params.num_kv_heads * params.batch);
  const int64_t wanted = (int64_t{num_multiprocessors} * kBlocksPerMultiprocessor + num_blocks - 1) / num_blocks;
  const int64_t worthwhile = std::max(1, params.capacity / kMinTokensPerSplit);
  plan.num_splits = params.num_splits > 0 ? params.num_splits : static_cast<int>(std::min(wanted, worthwhile));
  if (plan.num_splits > 1) {
    plan.workspace_floats = int64_t{plan.num_splits} * params.batch * params.num_q_heads * params.q_len *
                            (params.value_side.head_dim + 2);
  }
  return plan;
}

}  // namespace hf_kvquant::cuda
