// The runtime calls of the extension on the current GPU, each with a sentence that helps if it fails.
#include "device.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

// The first code whose kernels wait for the previous launch themselves (`wait_for_launch_before`), and the first driver
// whose CUDA graphs can record that.
constexpr int kOverlapCode = 90, kOverlapDriver = 12030;

constexpr const char* kUsable = "the GPU must be usable";

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

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda("decode", cudaDeviceGetAttribute(&value, attribute, device), kUsable);
  return value;
}

int current_number() {
  int number = 0;
  check_cuda("decode", cudaGetDevice(&number), kUsable);
  return number;
}

}  // namespace

void check_cuda(const char* where, cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(where) + ": " + what + ", got: " + cudaGetErrorString(error) +
                           ". Was the extension built for this GPU (HF_KVQUANT_CUDA_ARCHS)?");
}

Device current_device() {
  const int number = current_number();
  return remember(number, [number] {
    return Device{number,
                  10 * attribute_of(number, cudaDevAttrComputeCapabilityMajor) +
                      attribute_of(number, cudaDevAttrComputeCapabilityMinor),
                  attribute_of(number, cudaDevAttrMultiProcessorCount),
                  attribute_of(number, cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                  attribute_of(number, cudaDevAttrMaxSharedMemoryPerBlockOptin),
                  attribute_of(number, cudaDevAttrReservedSharedMemoryPerBlock)};
  });
}

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

int code_capability(const void* function) {
  return remember(std::make_tuple(function, current_number()), [function] {
    cudaFuncAttributes attributes;
    check_cuda("decode", cudaFuncGetAttributes(&attributes, function), "the kernel must fit the GPU");
    return attributes.ptxVersion;
  });
}

bool may_overlap(const void* function) {
  return remember(std::make_tuple(function, current_number()), [function] {
    int driver = 0;
    check_cuda("decode", cudaDriverGetVersion(&driver), kUsable);
    return code_capability(function) >= kOverlapCode && driver >= kOverlapDriver;
  });
}

void launch(const char* where, const void* kernel, const Launch& how, void** arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = dim3(how.num_threads);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = &overlap;
  config.numAttrs = how.may_overlap ? 1 : 0;
  check_cuda(where, cudaLaunchKernelExC(&config, kernel, arguments), "the kernel must start");
}

dim3 grid_of(const char* where, int64_t num_ctas) {
  if (num_ctas <= 0x7fffffff) return dim3(static_cast<unsigned>(num_ctas));
  throw std::runtime_error(std::string(where) + ": a call must need fewer than 2^31 thread blocks, got " +
                           std::to_string(num_ctas) + ". Feed the tokens in smaller chunks.");
}

}  // namespace hf_kvquant::cuda
