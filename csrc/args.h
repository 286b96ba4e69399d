// Turns op arguments into plain structs. For both devices, everything that could make a kernel read or write out of
// bounds is checked here, before anything is written. Python has checked what users pass before, with more context.
// Torch types stop here: kernels see format.h only. On a GPU the lengths are not read, since that would synchronise
// with the host: kernels there skip tokens beyond the capacity, and attention returns NaN.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "format.h"
#include "fused.h"

namespace hf_kvquant {

using torch::stable::Tensor;

// What append and decode have in common.
struct CacheArgs {
  const char* where;  // the op's name
  const std::vector<Tensor>&key_planes, &value_planes;
  const Tensor& lengths;
  const std::optional<Tensor>&starts, &key_center, &key_smoothing;
  bool rotates_key;
  const std::vector<int64_t>& layout;  // the numbers of LayoutFields
  const std::optional<Tensor>& page_table;
};

// The tensor itself if its channels are contiguous, else a contiguous copy. The caller keeps it alive.
Tensor with_contiguous_channels(const Tensor& x);

// All functions below throw std::invalid_argument (ValueError in Python), and the message names the argument.

// The cache without new tokens: q_len is 0.
CacheParams cache_params(const CacheArgs& args);

// New tokens, which an append writes to the planes. `query`: queries of the same call; nullptr if there are none.
AppendParams append_params(const CacheArgs& args, const CacheParams& cache, const Tensor& key, const Tensor& value,
                           const Tensor* query);

// Attention to a cache. Leaves `out` and `lse` for the caller to allocate.
DecodeParams decode_params(const CacheArgs& args, const CacheParams& cache, const Tensor& query,
                           const std::optional<Tensor>& counters, const std::optional<Tensor>& sinks,
                           const std::optional<Tensor>& alibi_slopes, double softmax_scale, double softcap,
                           int64_t sliding_window, int64_t num_splits,
                           const std::optional<Tensor>& split_plan, bool is_latent = false);

// Leaves `key` and `value` for the caller to allocate. `dtype` is a number of Dtype.
DequantizeParams dequantize_params(const CacheParams& cache, int64_t begin, int64_t num_tokens, int64_t num_seen,
                                   int64_t dtype);

// New keys and values of a decode: both or neither, with as many tokens as the query.
void check_new_tokens(const char* where, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
                      const Tensor& query);

// For numbers in host memory. Lengths and starts: new tokens fit, nothing beyond the capacity is read, positions fit an
// int. Centers are finite, smoothing factors positive and finite: Python's KeyTransform ensures that, but its tensors
// can be modified afterwards.
void check_numbers(const char* where, const CacheParams& params);

// These leave results for the caller to allocate. `other` is added to x; nullptr: nothing is.
RmsNormParams rms_norm_params(const char* where, const Tensor& x, const Tensor* other, const Tensor& weight,
                              const std::optional<Tensor>& mean, double eps, bool is_zero_centered,
                              const std::optional<Tensor>& gate = std::nullopt);
RotaryParams rotary_params(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin);
SiluMulParams silu_mul_params(const Tensor& gate, const Tensor& up);
PackedLinearParams packed_linear_params(const Tensor& x, const Tensor& codes, const Tensor& scale_and_zero,
                                        int64_t group_size);
ConvStepParams conv_step_params(const Tensor& x, const Tensor& state, const Tensor& weight,
                                const std::optional<Tensor>& bias, bool has_silu,
                                const std::optional<Tensor>& read_slots, const std::optional<Tensor>& write_slots);
DeltaStepParams delta_step_params(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                                  const Tensor& beta, const Tensor& state, const Tensor& target, bool normalizes,
                                  const std::optional<Tensor>& read_slots, const std::optional<Tensor>& write_slots);
DeltaGatesParams delta_gates_params(const Tensor& x, const Tensor& decay_weight, const Tensor& beta_weight,
                                    const Tensor& A_log, const Tensor& dt_bias, double beta_factor);
ConvChunksParams conv_chunks_params(const Tensor& x, const Tensor& state, const Tensor& weight,
                                    const std::optional<Tensor>& bias, bool has_silu, const Tensor& begins,
                                    const Tensor& read_slots, const Tensor& write_slots);
DeltaChunksParams delta_chunks_params(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                                      const Tensor& beta, const Tensor& state, bool normalizes, const Tensor& begins,
                                      const Tensor& read_slots, const Tensor& write_slots);
// Lengths and starts of a batch, on the device, and how many slots its plan has.
void check_split_plan(const Tensor& lengths, const std::optional<Tensor>& starts, int64_t num_slots,
                      int64_t most_slots, int64_t min_tokens, int64_t tokens_between);

void check_prefetch(const Tensor& weight, int64_t num_bytes);

// Pointer and strides of [batch, heads, tokens, head_dim].
Dense dense_of(const Tensor& x, Dtype dtype);

}  // namespace hf_kvquant
