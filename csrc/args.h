// Turns op arguments into plain structs. For both devices, everything that could make a kernel read or write out of
// bounds is checked here, before anything is written. Python has checked what users pass before, with more context.
// Torch types stop here: kernels see format.h only. On a GPU the lengths are not read, since that would synchronise
// with the host: kernels there skip tokens beyond the capacity, and attention returns NaN.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "format.h"
#include "fused.h"

namespace hf_kvquant {

using torch::stable::Tensor;

// The planes of one side as the ops receive them.
struct PlaneArgs {
  const Tensor& codes;
  const std::optional<Tensor>& scale;
  const std::optional<Tensor>& zero;
  const std::optional<Tensor>& tail;
  int64_t storage;
  double clip_ratio;
};

// The dense windows as the ops receive them, and whether the planes are a ring.
struct WindowArgs {
  int64_t sink_length, residual_length;
  bool is_ring;
};

// The transform of keys as the ops receive it.
struct TransformArgs {
  const std::optional<Tensor>& center;
  const std::optional<Tensor>& smoothing;
  bool is_rotated;
};

// The tensor itself if its channels are contiguous, else a contiguous copy. The caller keeps it alive.
Tensor with_contiguous_channels(const Tensor& x);

// All functions below throw std::invalid_argument (ValueError in Python), and the message names the argument. `where`
// is the op's name, `query` points to the queries of the same call; nullptr: there are none.
AppendParams append_params(const char* where, const Tensor& key, const Tensor& value, const PlaneArgs& key_planes,
                           const PlaneArgs& value_planes, const Tensor& lengths, const std::optional<Tensor>& starts,
                           const WindowArgs& windows, const TransformArgs& transform, const void* query);

// Leaves `out` and `lse` for the caller to allocate.
DecodeParams decode_params(const Tensor& query, const PlaneArgs& key_planes, const PlaneArgs& value_planes,
                           const Tensor& lengths, const std::optional<Tensor>& counters,
                           const std::optional<Tensor>& starts, const std::optional<Tensor>& sinks,
                           const std::optional<Tensor>& alibi_slopes, double softmax_scale, double softcap,
                           int64_t sliding_window, int64_t num_splits, const WindowArgs& windows,
                           const TransformArgs& transform);

// New keys and values of a decode: both or neither, as many tokens as the query has.
void check_new_tokens(const std::optional<Tensor>& key, const std::optional<Tensor>& value, const Tensor& query);

// These leave results for the caller to allocate. `other` is added to x; nullptr: nothing is.
RmsNormParams rms_norm_params(const char* where, const Tensor& x, const Tensor* other, const Tensor& weight,
                              const std::optional<Tensor>& mean, double eps);
RotaryParams rotary_params(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin);
SiluMulParams silu_mul_params(const Tensor& gate, const Tensor& up);
void check_prefetch(const Tensor& weight, int64_t num_bytes);

// Pointer and strides of [batch, heads, tokens, head_dim].
Dense dense_of(const Tensor& x, Dtype dtype);

// For lengths and starts in host memory: new tokens fit, nothing beyond the capacity is read, positions fit an int.
void check_lengths(const char* where, const AppendParams& params);
void check_lengths(const char* where, const DecodeParams& params);

// For factors in host memory: centers are finite, smoothing factors positive and finite. Python's KeyTransform ensures
// that, but its tensors can be modified afterwards. `count` is how many numbers each tensor has.
void check_factors(const char* where, const KeyTransform& transform, int64_t count);

// Refuses a tensor that Python gave as None.
void check_given(const char* where, const char* name, const Tensor& tensor);

}  // namespace hf_kvquant
