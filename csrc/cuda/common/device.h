// The current GPU: what its driver says, torch's stream on it, and launches. The answers of the driver are remembered.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace hf_kvquant::cuda {

// Throws std::runtime_error unless `error` is success. `what` says what must be, such as "the GPU must be usable".
void check_cuda(const char* where, cudaError_t error, const char* what);

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

struct Device {
  int number;
  int capability;  // such as 90
  int num_multiprocessors;
  int bytes_per_multiprocessor, bytes_per_cta, reserved_bytes;  // of shared memory; reserved for every thread block
};

Device current_device();

// The compute capability that a kernel's code is for, such as 90. That of the GPU may be higher.
int code_capability(const void* function);

// Whether a kernel may start before the previous launch ends; the kernel then has to wait for that itself.
bool may_overlap(const void* function);

struct Launch {
  dim3 grid;
  int num_threads;
  size_t shared_bytes;
  void* stream;
  bool may_overlap;
};

// For a kernel that calls `wait_for_launch_before`: its thread blocks may start before the previous launch ends.
template <class Kernel>
Launch early(Kernel kernel, dim3 grid, int num_threads, size_t shared_bytes, void* stream) {
  return {grid, num_threads, shared_bytes, stream, may_overlap(reinterpret_cast<const void*>(kernel))};
}

// `arguments` points to each argument. Throws if the kernel cannot start.
void launch(const char* where, const void* kernel, const Launch& how, void** arguments);

template <class... Parameters>
void launch(const char* where, void (*kernel)(Parameters...), const Launch& how, const Parameters&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  launch(where, reinterpret_cast<const void*>(kernel), how, pointers);
}

// A grid of one dimension. Throws if it would be too large.
dim3 grid_of(const char* where, int64_t num_ctas);

// Launches a kernel that starts after the previous launch.
template <class... Parameters>
void launch(const char* where, void (*kernel)(Parameters...), int64_t num_ctas, int num_threads, size_t shared_bytes,
            void* stream, const Parameters&... arguments) {
  launch(where, kernel, {grid_of(where, num_ctas), num_threads, shared_bytes, stream, false}, arguments...);
}

}  // namespace hf_kvquant::cuda
