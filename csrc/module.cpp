// The extension's entry points: kernels for the ops that hf_kvquant/ops/ defines, and the Python module with the
// constants that ops/kernels.py compares. Every op checks its arguments (args.h), allocates results and launches.
// Schemas, fakes and the fallback are in ops/schemas.py. Only torch's stable ABI is used, so one binary serves every
// torch from 2.10 on.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "args.h"
#include "cpu/cpu.h"
#include "requirements.h"
#ifdef HF_KVQUANT_CUDA_ARCHS
#include <torch/csrc/stable/accelerator.h>

#include "cuda/cuda.h"
#include "cuda/latent/latent.h"
#endif

// The op namespace, the same as in hf_kvquant/_ops.py, and the name of the Python module. Builds for the kernels hub
// define TORCH_EXTENSION_NAME, as kernel-builder does: a name unique to the build, which replaces both, so that several
// such builds and the package can be loaded together.
#ifdef TORCH_EXTENSION_NAME
#define KVQ_NAMESPACE TORCH_EXTENSION_NAME
#define KVQ_MODULE TORCH_EXTENSION_NAME
#else
#define KVQ_NAMESPACE hf_kvquant
#define KVQ_MODULE _C
#endif
// Each of these passes its arguments on to another macro, so that the preprocessor expands them first. `...`, since a
// list of architectures may contain commas.
#define KVQ_STRING(...) KVQ_AS_IT_IS(__VA_ARGS__)
#define KVQ_AS_IT_IS(...) #__VA_ARGS__
#define KVQ_OPS(ns, device, library) STABLE_TORCH_LIBRARY_IMPL(ns, device, library)
#define KVQ_INIT(module) KVQ_CONCATENATE(PyInit_, module)
#define KVQ_CONCATENATE(a, b) a##b

namespace hf_kvquant {
namespace {

// An uninitialised contiguous tensor of at most four dimensions on the device of `other`. `dtype` is one of
// aoti_torch_dtype_*. torch::stable's own functions for this look up an op by name, which took 1.6 to 1.9 of the 16 us
// of host time of a decode (measured on a CPU), in every layer and step.
Tensor empty_beside(const Tensor& other, int32_t dtype, std::initializer_list<int64_t> shape) {
  int64_t strides[4], numel = 1;
  for (size_t d = shape.size(); d-- > 0; numel *= shape.begin()[d]) strides[d] = numel;
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(other.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(other.get(), &device_index));
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(), strides,
                                                         dtype, device_type, device_index, &out));
  return Tensor(out);
}

Tensor empty_beside(const Tensor& other, std::initializer_list<int64_t> shape) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(other.get(), &dtype));
  return empty_beside(other, dtype, shape);
}

// Runs the ops on a CPU. Lengths and factors are in host memory there, so their numbers are checked too, before
// anything is written.
struct CpuDevice {
  explicit CpuDevice(const Tensor&) {}

  void check(const char* where, const CacheParams& params, int = 0) const { check_numbers(where, params); }
  void append(const AppendParams& params) const { cpu::append(params); }
  void decode(const DecodeParams& params, const AppendParams* new_tokens) const {
    if (new_tokens != nullptr) cpu::append(*new_tokens);
    cpu::decode(params);
  }
  void attend_latent(const DecodeParams& params) const { cpu::decode(params); }
  // What GPUs would say.
  std::string why_general(const DecodeParams& params, const AppendParams* new_tokens) const {
    return cuda::why_general({params, new_tokens});
  }
};

#ifdef HF_KVQUANT_CUDA_ARCHS
// Runs the ops on a GPU: on the tensors' device and torch's current stream, with scratch memory from torch's
// allocator, so that a CUDA graph can capture them.
struct CudaDevice {
  explicit CudaDevice(const Tensor& tensor)
      : tensor(tensor), guard(tensor.get_device_index()), stream(cuda::current_stream(tensor.get_device_index())) {}

  void check(const char* where, const CacheParams& params, int max_head_dim = kMaxCudaHeadDim) const {
    cuda::check_support(where, params.key_side, max_head_dim);
    cuda::check_support(where, params.value_side, max_head_dim);
  }
  void append(const AppendParams& params) const { cuda::append(params, stream); }
  void decode(DecodeParams params, const AppendParams* new_tokens) const {
    const cuda::DecodePlan plan = cuda::plan_decode(params, new_tokens);
    // The thread block that finishes last combines the splits; it finds out by counters, which must start at zero.
    // Those that a storage passes in are zero already.
    std::optional<Tensor> counters;
    if (plan.num_counters > (params.counters == nullptr ? 0 : kNumCounters)) {
      counters = empty_beside(tensor, aoti_torch_dtype_int32(), {plan.num_counters});
      params.counters = static_cast<int32_t*>(torch::stable::zero_(*counters).data_ptr());
    }
    const Tensor workspace = empty_beside(tensor, aoti_torch_dtype_float32(), {plan.workspace_floats});
    cuda::decode(params, new_tokens, plan, static_cast<float*>(workspace.data_ptr()), stream);
  }
  std::string why_general(const DecodeParams& params, const AppendParams* new_tokens) const {
    return cuda::why_general_here(params, new_tokens);
  }
  void attend_latent(const DecodeParams& params) const {
    const cuda::LatentPlan plan = cuda::plan_latent(params);
    const Tensor workspace = empty_beside(tensor, aoti_torch_dtype_float32(), {plan.workspace_floats});
    cuda::attend_latent(params, plan, static_cast<float*>(workspace.data_ptr()), stream);
  }

  const Tensor& tensor;
  torch::stable::accelerator::DeviceGuard guard;
  void* stream;
};
#endif

// Allocates what attention returns.
std::tuple<Tensor, Tensor> allocate_results(const Tensor& query, DecodeParams& params) {
  Tensor out = empty_beside(query, {params.batch, params.q_len, params.num_q_heads, values_of(params).head_dim});
  Tensor lse = empty_beside(query, aoti_torch_dtype_float32(), {params.batch, params.num_q_heads, params.q_len});
  params.out = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  return {out, lse};
}

template <class Device>
void append(const Tensor& key, const Tensor& value, const std::vector<Tensor>& key_planes,
            const std::vector<Tensor>& value_planes, const Tensor& lengths, const std::optional<Tensor>& starts,
            const std::optional<Tensor>& key_center, const std::optional<Tensor>& key_smoothing, bool rotates_key,
            const std::vector<int64_t>& layout, const std::optional<Tensor>& page_table) {
  const CacheArgs args{"append", key_planes, value_planes, lengths, starts, key_center, key_smoothing, rotates_key,
                       layout, page_table};
  const CacheParams cache = cache_params(args);
  const Tensor key_rows = with_contiguous_channels(key), value_rows = with_contiguous_channels(value);
  const AppendParams params = append_params(args, cache, key_rows, value_rows, nullptr);
  const Device device(key_planes[0]);
  device.check("append", params, kMaxCudaAppended);
  if (params.batch > 0 && params.q_len > 0) device.append(params);
}

// The arguments of a decode as plain structs.
struct DecodeCall {
  Tensor query;  // with contiguous channels
  std::optional<Tensor> key, value;
  DecodeParams params;
  AppendParams new_tokens;

  DecodeCall(const CacheArgs& args, const Tensor& query, const std::optional<Tensor>& key,
             const std::optional<Tensor>& value, const std::optional<Tensor>& counters,
             const std::optional<Tensor>& sinks, const std::optional<Tensor>& alibi_slopes, double softmax_scale,
             double softcap, int64_t sliding_window, int64_t num_splits, const std::optional<Tensor>& split_plan)
      : query(with_contiguous_channels(query)) {
    const CacheParams cache = cache_params(args);
    params = decode_params(args, cache, this->query, counters, sinks, alibi_slopes, softmax_scale, softcap,
                           sliding_window, num_splits, split_plan);
    check_new_tokens(args.where, key, value, query);
    new_tokens = {cache, {}, {}};
    if (key.has_value()) {
      this->key = with_contiguous_channels(*key);
      this->value = with_contiguous_channels(*value);
      new_tokens = append_params(args, cache, *this->key, *this->value, &this->query);
    }
  }

  const AppendParams* appended() const { return key.has_value() ? &new_tokens : nullptr; }
  bool is_empty() const { return params.batch == 0 || params.q_len == 0; }
};

template <class Device>
std::tuple<Tensor, Tensor> decode(
    const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
    const std::vector<Tensor>& key_planes, const std::vector<Tensor>& value_planes, const Tensor& lengths,
    const std::optional<Tensor>& counters, const std::optional<Tensor>& starts, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& alibi_slopes, double softmax_scale, double softcap, int64_t sliding_window,
    int64_t num_splits, const std::optional<Tensor>& key_center, const std::optional<Tensor>& key_smoothing,
    bool rotates_key, const std::vector<int64_t>& layout, const std::optional<Tensor>& page_table,
    const std::optional<Tensor>& split_plan) {
  const CacheArgs args{"decode", key_planes, value_planes, lengths, starts, key_center, key_smoothing, rotates_key,
                       layout, page_table};
  DecodeCall call(args, query, key, value, counters, sinks, alibi_slopes, softmax_scale, softcap, sliding_window,
                  num_splits, split_plan);
  const Device device(key_planes[0]);
  device.check("decode", call.new_tokens);
  std::tuple<Tensor, Tensor> results = allocate_results(query, call.params);
  if (!call.is_empty()) device.decode(call.params, call.appended());
  return results;
}

// Why the general CUDA kernel serves a decode; empty: a faster one does. Launches nothing.
template <class Device>
std::string why_general(
    const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
    const std::vector<Tensor>& key_planes, const std::vector<Tensor>& value_planes, const Tensor& lengths,
    const std::optional<Tensor>& counters, const std::optional<Tensor>& starts, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& alibi_slopes, double softmax_scale, double softcap, int64_t sliding_window,
    int64_t num_splits, const std::optional<Tensor>& key_center, const std::optional<Tensor>& key_smoothing,
    bool rotates_key, const std::vector<int64_t>& layout, const std::optional<Tensor>& page_table,
    const std::optional<Tensor>& split_plan) {
  const CacheArgs args{"why_general", key_planes, value_planes, lengths, starts, key_center, key_smoothing,
                       rotates_key, layout, page_table};
  const DecodeCall call(args, query, key, value, counters, sinks, alibi_slopes, softmax_scale, softcap,
                        sliding_window, num_splits, split_plan);
  const Device device(key_planes[0]);
  device.check("why_general", call.new_tokens);
  return call.is_empty() ? "" : device.why_general(call.params, call.appended());
}

// Attention to latents, which are keys and values of all heads, and rope parts. See DecodeParams::is_latent.
template <class Device>
std::tuple<Tensor, Tensor> attend_latent(const Tensor& query, const std::vector<Tensor>& key_planes,
                                         const std::vector<Tensor>& value_planes, const Tensor& lengths,
                                         const std::optional<Tensor>& starts, double softmax_scale, int64_t num_splits,
                                         bool rotates_latent, const std::vector<int64_t>& layout,
                                         const std::optional<Tensor>& page_table) {
  const std::optional<Tensor> none;
  const CacheArgs args{"attend_latent", key_planes, value_planes, lengths, starts, none, none, rotates_latent, layout,
                       page_table};
  const Tensor query_rows = with_contiguous_channels(query);
  DecodeParams params = decode_params(args, cache_params(args), query_rows, std::nullopt, std::nullopt, std::nullopt,
                                      softmax_scale, 0, 0, num_splits, std::nullopt, /*is_latent=*/true);
  const Device device(key_planes[0]);
  device.check("attend_latent", params, kMaxCudaAppended);
  std::tuple<Tensor, Tensor> results = allocate_results(query, params);
  if (params.batch > 0 && params.q_len > 0) device.attend_latent(params);
  return results;
}

// Why no CUDA kernel serves an attend_latent; empty: one does, on a GPU that it fits.
std::string why_no_latent_kernel(const Tensor& query, const std::vector<Tensor>& key_planes,
                                 const std::vector<Tensor>& value_planes, const Tensor& lengths,
                                 const std::optional<Tensor>& starts, double softmax_scale, int64_t num_splits,
                                 bool rotates_latent, const std::vector<int64_t>& layout,
                                 const std::optional<Tensor>& page_table) {
  const std::optional<Tensor> none;
  const CacheArgs args{"why_no_latent_kernel", key_planes, value_planes, lengths, starts, none, none, rotates_latent,
                       layout, page_table};
  const Tensor query_rows = with_contiguous_channels(query);
  const DecodeParams params = decode_params(args, cache_params(args), query_rows, std::nullopt, std::nullopt,
                                            std::nullopt, softmax_scale, 0, 0, num_splits, std::nullopt,
                                            /*is_latent=*/true);
  const cuda::Call call{params, nullptr};
  const cuda::Unmet unmet = cuda::unmet_by_latent(call);
  return unmet ? unmet.sentence(call) : "";
}

#ifdef HF_KVQUANT_CUDA_ARCHS
// The arguments of a chunk, which is not stored yet.
struct Chunk {
  Tensor query, key, value;  // with contiguous channels
  DecodeParams params;
  AppendParams new_tokens;

  Chunk(const CacheArgs& args, const Tensor& query, const Tensor& key, const Tensor& value,
        const std::optional<Tensor>& sinks, const std::optional<Tensor>& alibi_slopes, double softmax_scale,
        double softcap)
      : query(with_contiguous_channels(query)),
        key(with_contiguous_channels(key)),
        value(with_contiguous_channels(value)) {
    const CacheParams cache = cache_params(args);
    params = decode_params(args, cache, this->query, std::nullopt, sinks, alibi_slopes, softmax_scale, softcap, 0, 0,
                           std::nullopt);
    check_new_tokens(args.where, key, value, query);
    new_tokens = append_params(args, cache, this->key, this->value, &this->query);
    params.is_chunk = true;
  }
};

// Attention of a chunk. It is not stored here either.
std::tuple<Tensor, Tensor> attend_chunk(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::vector<Tensor>& key_planes,
    const std::vector<Tensor>& value_planes, const Tensor& lengths, const std::optional<Tensor>& starts,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& alibi_slopes, double softmax_scale,
    double softcap, const std::optional<Tensor>& key_center, const std::optional<Tensor>& key_smoothing,
    bool rotates_key, const std::vector<int64_t>& layout, const std::optional<Tensor>& page_table) {
  const CacheArgs args{"attend_chunk", key_planes, value_planes, lengths, starts, key_center, key_smoothing,
                       rotates_key, layout, page_table};
  Chunk chunk(args, query, key, value, sinks, alibi_slopes, softmax_scale, softcap);
  DecodeParams& params = chunk.params;
  const CudaDevice device(key_planes[0]);
  device.check("attend_chunk", params);
  std::tuple<Tensor, Tensor> results = allocate_results(query, params);
  if (params.batch == 0 || params.q_len == 0) return results;
  std::string why_not;
  const cuda::DecodePlan plan = cuda::plan_chunk(params, chunk.new_tokens, &why_not);
  if (plan.kernel.function == nullptr) {
    throw std::invalid_argument("attend_chunk: `query` must be of a chunk that the kernel serves: " + why_not +
                                ". Ask serves_chunk first.");
  }
  const Tensor workspace = empty_beside(query, aoti_torch_dtype_float32(), {plan.workspace_floats});
  cuda::decode(params, &chunk.new_tokens, plan, static_cast<float*>(workspace.data_ptr()), device.stream);
  return results;
}

// Whether attend_chunk has a kernel for a chunk.
bool serves_chunk(const Tensor& query, const Tensor& key, const Tensor& value, const std::vector<Tensor>& key_planes,
                  const std::vector<Tensor>& value_planes, const Tensor& lengths, const std::vector<int64_t>& layout,
                  const std::optional<Tensor>& page_table) {
  const CacheArgs args{"serves_chunk", key_planes, value_planes, lengths, std::nullopt, std::nullopt, std::nullopt,
                       false, layout, page_table};
  const Chunk chunk(args, query, key, value, std::nullopt, std::nullopt, 1., 0.);
  const CudaDevice device(key_planes[0]);
  return cuda::plan_chunk(chunk.params, chunk.new_tokens).kernel.function != nullptr;
}

std::tuple<Tensor, Tensor> dequantize(const std::vector<Tensor>& key_planes, const std::vector<Tensor>& value_planes,
                                      const Tensor& lengths, const std::optional<Tensor>& starts, int64_t begin,
                                      int64_t num_tokens, int64_t num_seen, int64_t dtype,
                                      const std::optional<Tensor>& key_center,
                                      const std::optional<Tensor>& key_smoothing, bool rotates_key,
                                      const std::vector<int64_t>& layout) {
  const CacheArgs args{"dequantize", key_planes, value_planes, lengths, starts, key_center, key_smoothing, rotates_key,
                       layout, std::nullopt};
  DequantizeParams params = dequantize_params(cache_params(args), begin, num_tokens, num_seen, dtype);
  const CudaDevice device(key_planes[0]);
  device.check("dequantize", params);
  const int32_t types[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16()};
  const auto result = [&](const Side& side) {
    return empty_beside(key_planes[0], types[dtype], {params.batch, params.num_kv_heads, num_tokens, side.head_dim});
  };
  const Tensor key = result(params.key_side), value = result(params.value_side);
  params.key = key.data_ptr();
  params.value = value.data_ptr();
  if (params.batch > 0 && num_tokens > 0) cuda::dequantize(params, device.stream);
  return {key, value};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& mean, double eps,
                bool is_zero_centered, const std::optional<Tensor>& gate) {
  RmsNormParams params = rms_norm_params("rms_norm", x, nullptr, weight, mean, eps, is_zero_centered, gate);
  const CudaDevice device(x);
  Tensor out = torch::stable::empty_like(x);
  params.out = out.data_ptr();
  if (params.num_rows > 0) cuda::rms_norm(params, device.stream);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& other, const Tensor& weight, double eps,
                                        bool is_zero_centered) {
  RmsNormParams params = rms_norm_params("add_rms_norm", x, &other, weight, std::nullopt, eps, is_zero_centered);
  const CudaDevice device(x);
  Tensor total = torch::stable::empty_like(x), out = torch::stable::empty_like(x);
  params.total = total.data_ptr();
  params.out = out.data_ptr();
  if (params.num_rows > 0) cuda::rms_norm(params, device.stream);
  return {total, out};
}

std::tuple<Tensor, Tensor> rotary(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin) {
  RotaryParams params = rotary_params(query, key, cos, sin);
  const CudaDevice device(query);
  // The layout that PyTorch gives: elementwise results are laid out like their inputs, concatenated parts contiguously.
  const auto empty = [&](const Tensor& x) {
    if (params.rotary_dim == params.head_dim) return torch::stable::empty_like(x);
    return empty_beside(x, {x.size(0), x.size(1), x.size(2), x.size(3)});
  };
  const Tensor out_query = empty(query), out_key = empty(key);
  params.out_query = dense_of(out_query, params.query.dtype);
  params.out_key = dense_of(out_key, params.key.dtype);
  if (query.numel() + key.numel() > 0) cuda::rotary(params, device.stream);
  return {out_query, out_key};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  SiluMulParams params = silu_mul_params(gate, up);
  const CudaDevice device(gate);
  Tensor out = torch::stable::empty_like(gate);
  params.out = out.data_ptr();
  if (params.numel > 0) cuda::silu_mul(params, device.stream);
  return out;
}

Tensor packed_linear(const Tensor& x, const Tensor& codes, const Tensor& scale_and_zero, int64_t group_size) {
  PackedLinearParams params = packed_linear_params(x, codes, scale_and_zero, group_size);
  const CudaDevice device(x);
  const Tensor out = empty_beside(x, {params.num_rows, params.num_outputs});
  params.out = out.data_ptr();
  if (params.num_rows > 0) cuda::packed_linear(params, device.stream);
  return out;
}

Tensor conv_step(const Tensor& x, const Tensor& state, const Tensor& weight, const std::optional<Tensor>& bias,
                 bool has_silu, const std::optional<Tensor>& read_slots, const std::optional<Tensor>& write_slots) {
  ConvStepParams params = conv_step_params(x, state, weight, bias, has_silu, read_slots, write_slots);
  const CudaDevice device(x);
  const Tensor out = empty_beside(x, {params.batch, params.channels, 1});
  params.out = out.data_ptr();
  if (out.numel() > 0) cuda::conv_step(params, device.stream);
  return out;
}

Tensor delta_step(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g, const Tensor& beta,
                  const Tensor& state, const Tensor& target, bool normalizes, const std::optional<Tensor>& read_slots,
                  const std::optional<Tensor>& write_slots) {
  DeltaStepParams params =
      delta_step_params(query, key, value, g, beta, state, target, normalizes, read_slots, write_slots);
  const CudaDevice device(query);
  const Tensor out = empty_beside(query, {params.batch, 1, params.num_heads, params.value_dim});
  params.out = out.data_ptr();
  if (out.numel() > 0) cuda::delta_step(params, device.stream);
  return out;
}

std::tuple<Tensor, Tensor> delta_gates(const Tensor& x, const Tensor& decay_weight, const Tensor& beta_weight,
                                       const Tensor& A_log, const Tensor& dt_bias, double beta_factor) {
  DeltaGatesParams params = delta_gates_params(x, decay_weight, beta_weight, A_log, dt_bias, beta_factor);
  const CudaDevice device(x);
  const Tensor beta = empty_beside(x, {x.size(0), x.size(1), params.num_heads});
  const Tensor g = empty_beside(x, aoti_torch_dtype_float32(), {x.size(0), x.size(1), params.num_heads});
  params.g = static_cast<float*>(g.data_ptr()), params.beta = beta.data_ptr();
  if (g.numel() > 0) cuda::delta_gates(params, device.stream);
  return {g, beta};
}

Tensor conv_chunks(const Tensor& x, const Tensor& state, const Tensor& weight, const std::optional<Tensor>& bias,
                   bool has_silu, const Tensor& begins, const Tensor& read_slots, const Tensor& write_slots) {
  ConvChunksParams params = conv_chunks_params(x, state, weight, bias, has_silu, begins, read_slots, write_slots);
  const CudaDevice device(x);
  const Tensor out = empty_beside(x, {1, params.sequences.num_tokens, params.channels});
  params.out = out.data_ptr();
  if (params.channels > 0 && params.sequences.count > 0) cuda::conv_chunks(params, device.stream);
  return out;
}

Tensor delta_chunks(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g, const Tensor& beta,
                    const Tensor& state, bool normalizes, const Tensor& begins, const Tensor& read_slots,
                    const Tensor& write_slots) {
  DeltaChunksParams params =
      delta_chunks_params(query, key, value, g, beta, state, normalizes, begins, read_slots, write_slots);
  const CudaDevice device(query);
  const Tensor out = empty_beside(query, {1, params.sequences.num_tokens, params.num_heads, params.value_dim});
  params.out = out.data_ptr();
  if (params.num_heads > 0 && params.value_dim > 0) cuda::delta_chunks(params, device.stream);
  return out;
}

Tensor split_plan(const Tensor& lengths, const std::optional<Tensor>& starts, int64_t num_slots, int64_t most_slots,
                  int64_t min_tokens, int64_t tokens_between) {
  check_split_plan(lengths, starts, num_slots, most_slots, min_tokens, tokens_between);
  const CudaDevice device(lengths);
  Tensor plan = empty_beside(lengths, {lengths.size(0) + most_slots, 4});
  const void* const padding = starts.has_value() ? starts->const_data_ptr() : nullptr;
  cuda::split_plan(static_cast<const int32_t*>(lengths.const_data_ptr()), static_cast<const int32_t*>(padding),
                   static_cast<int>(lengths.size(0)), static_cast<int>(num_slots), static_cast<int>(most_slots),
                   static_cast<int>(min_tokens), static_cast<int>(tokens_between), static_cast<int32_t*>(plan.data_ptr()),
                   device.stream);
  return plan;
}

void prefetch(const Tensor& weight, int64_t num_bytes) {
  check_prefetch(weight, num_bytes);
  cuda::prefetch(weight.const_data_ptr(), num_bytes, CudaDevice(weight).stream);
}
#endif

PyObject* cpu_capability(PyObject*, PyObject*) { return PyUnicode_FromString(cpu::capability()); }

PyObject* set_cpu_capability(PyObject*, PyObject* name) {
  PyObject* bytes = name == Py_None ? nullptr : PyUnicode_AsUTF8String(name);
  if (name != Py_None && bytes == nullptr) return nullptr;
  const bool is_known = cpu::set_capability(bytes == nullptr ? nullptr : PyBytes_AsString(bytes));
  Py_XDECREF(bytes);
  return PyBool_FromLong(is_known);
}

#ifdef HF_KVQUANT_CUDA_ARCHS
PyObject* cuda_archs(PyObject*, PyObject*) { return PyUnicode_FromString(KVQ_STRING(HF_KVQUANT_CUDA_ARCHS)); }
#endif

PyMethodDef kMethods[] = {
#ifdef HF_KVQUANT_CUDA_ARCHS
    {"cuda_archs", cuda_archs, METH_NOARGS, "The compute capabilities compiled for, such as '80;90'."},
#endif
    {"cpu_capability", cpu_capability, METH_NOARGS, "The instruction set in use: 'portable', 'avx2' or 'avx512'."},
    {"set_cpu_capability", set_cpu_capability, METH_O,
     "Choose an instruction set by name, None for the best one; False when it is unknown or not available here."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, KVQ_STRING(KVQ_MODULE), "Compiled kernels of hf_kvquant.", -1, kMethods,
                       nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace hf_kvquant

KVQ_OPS(KVQ_NAMESPACE, CPU, library) {
  library.impl("append", TORCH_BOX(&hf_kvquant::append<hf_kvquant::CpuDevice>));
  library.impl("decode", TORCH_BOX(&hf_kvquant::decode<hf_kvquant::CpuDevice>));
  library.impl("attend_latent", TORCH_BOX(&hf_kvquant::attend_latent<hf_kvquant::CpuDevice>));
  library.impl("why_general", TORCH_BOX(&hf_kvquant::why_general<hf_kvquant::CpuDevice>));
  library.impl("why_no_latent_kernel", TORCH_BOX(&hf_kvquant::why_no_latent_kernel));
}

#ifdef HF_KVQUANT_CUDA_ARCHS
KVQ_OPS(KVQ_NAMESPACE, CUDA, library) {
  library.impl("append", TORCH_BOX(&hf_kvquant::append<hf_kvquant::CudaDevice>));
  library.impl("decode", TORCH_BOX(&hf_kvquant::decode<hf_kvquant::CudaDevice>));
  library.impl("attend_chunk", TORCH_BOX(&hf_kvquant::attend_chunk));
  library.impl("serves_chunk", TORCH_BOX(&hf_kvquant::serves_chunk));
  library.impl("dequantize", TORCH_BOX(&hf_kvquant::dequantize));
  library.impl("rms_norm", TORCH_BOX(&hf_kvquant::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&hf_kvquant::add_rms_norm));
  library.impl("rotary", TORCH_BOX(&hf_kvquant::rotary));
  library.impl("silu_mul", TORCH_BOX(&hf_kvquant::silu_mul));
  library.impl("packed_linear", TORCH_BOX(&hf_kvquant::packed_linear));
  library.impl("conv_step", TORCH_BOX(&hf_kvquant::conv_step));
  library.impl("delta_step", TORCH_BOX(&hf_kvquant::delta_step));
  library.impl("delta_gates", TORCH_BOX(&hf_kvquant::delta_gates));
  library.impl("conv_chunks", TORCH_BOX(&hf_kvquant::conv_chunks));
  library.impl("delta_chunks", TORCH_BOX(&hf_kvquant::delta_chunks));
  library.impl("prefetch", TORCH_BOX(&hf_kvquant::prefetch));
  library.impl("attend_latent", TORCH_BOX(&hf_kvquant::attend_latent<hf_kvquant::CudaDevice>));
  library.impl("split_plan", TORCH_BOX(&hf_kvquant::split_plan));
  library.impl("why_general", TORCH_BOX(&hf_kvquant::why_general<hf_kvquant::CudaDevice>));
  library.impl("why_no_latent_kernel", TORCH_BOX(&hf_kvquant::why_no_latent_kernel));
}
#endif

PyMODINIT_FUNC KVQ_INIT(KVQ_MODULE)() {
  PyObject* module = PyModule_Create(&hf_kvquant::kModule);
  if (module == nullptr) return nullptr;
#ifdef HF_KVQUANT_CUDA_ARCHS
  constexpr int kHasCuda = 1;
#else
  constexpr int kHasCuda = 0;
#endif
  const std::pair<const char*, long> constants[] = {
      {"OPS_VERSION", hf_kvquant::kOpsVersion},
      {"TOKEN_ALIGNMENT", hf_kvquant::kTokenAlignment},
      {"NUM_COUNTERS", hf_kvquant::kNumCounters},
      {"BLOCK_SIZE", hf_kvquant::kBlockSize},
      {"MAX_RING_LENGTH", hf_kvquant::kMaxRingLength},
      {"MAX_SCRATCH_BYTES", hf_kvquant::kMaxScratchBytes},
      {"MAX_CUDA_HEAD_DIM", hf_kvquant::kMaxCudaHeadDim},
      {"HAS_CPU", 1},
      {"HAS_CUDA", kHasCuda}};
  bool is_complete = PyModule_AddStringConstant(module, "LAYOUT_FIELDS", hf_kvquant::kLayoutFields) == 0 &&
                     PyModule_AddStringConstant(module, "LAYOUT_VALUES", hf_kvquant::kLayoutValues) == 0;
  for (const auto& [name, number] : constants) {
    is_complete = is_complete && PyModule_AddIntConstant(module, name, number) == 0;
  }
  if (is_complete) return module;
  Py_DECREF(module);
  return nullptr;
}
