// The checks of args.h. Each message has the form `<where>: `<argument>` must be <expected>, got <actual>. <What to
// do.>` and names the values that the check compared.
#include "args.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

// The message is built only when the check fails.
#define KVQ_CHECK(condition, ...) \
  if (!(condition)) refuse(__VA_ARGS__)

namespace hf_kvquant {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kFromThisPackage = ". Planes are made by KVFormat.allocate.";
constexpr const char* kForAnotherBatch =
    ". Was this cache filled for another batch? Use batch_select_indices, batch_repeat_interleave or reset.";

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) text << (axis ? ", " : "") << tensor.size(axis);
  text << ']';
  return text.str();
}

bool is_shaped_like(const Tensor& tensor, const Tensor& like) {
  bool is_same = tensor.dim() == like.dim();
  for (int64_t axis = 0; is_same && axis < tensor.dim(); ++axis) is_same = tensor.size(axis) == like.size(axis);
  return is_same;
}

const char* name_of(Storage storage) {
  switch (storage) {
    case Storage::none: return "none";
    case Storage::int8: return "int8";
    case Storage::int4: return "int4";
    case Storage::fp8: return "fp8";
  }
  return "unknown";
}

int to_int(const char* where, const char* name, int64_t value) {
  KVQ_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), where, ": `", name,
            "` must be between 0 and 2147483647, got ", value, ".");
  return static_cast<int>(value);
}

bool is_on(const Tensor& tensor, const Tensor& other) {
  return tensor.is_cuda() == other.is_cuda() && tensor.get_device_index() == other.get_device_index();
}

void check_device(const char* where, const std::string& name, const Tensor& tensor, const Tensor& like) {
  KVQ_CHECK(is_on(tensor, like), where, ": `", name, "` must be on the device of the cache, got another device. ",
            "Move the inputs, or build the cache where the model is.");
}

Dtype dense_dtype(const char* where, const std::string& name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::fp32;
    case ScalarType::Half: return Dtype::fp16;
    case ScalarType::BFloat16: return Dtype::bf16;
    default:
      refuse(where, ": `", name, "` must be float32, float16 or bfloat16, got ",
             torch::headeronly::toString(tensor.scalar_type()), ". Load the model in one of these dtypes.");
  }
}

// A pointer to a tensor's first element. Refuses misaligned memory, such as torch.frombuffer can return: kernels must
// not read numbers from it.
template <class T>
T* memory_of(const char* where, const std::string& name, const Tensor& tensor) {
  T* memory;
  if constexpr (std::is_const_v<T>) {
    memory = static_cast<T*>(tensor.const_data_ptr());
  } else {
    memory = static_cast<T*>(tensor.data_ptr());
  }
  KVQ_CHECK(reinterpret_cast<uintptr_t>(memory) % tensor.element_size() == 0, where, ": `", name,
            "` must start at a multiple of ", tensor.element_size(), " bytes, got a view that does not. Call .clone().");
  return memory;
}

Dense dense(const char* where, const char* name, const Tensor& x, const Tensor& like) {
  KVQ_CHECK(x.dim() == 4, where, ": `", name, "` must be [batch, heads, tokens, head_dim], got ", shape_of(x), ".");
  check_device(where, name, x, like);
  const Dtype dtype = dense_dtype(where, name, x);
  KVQ_CHECK(x.stride(3) == 1 || x.numel() == 0, where, ": `", name, "` must have contiguous channels, got stride ",
            x.stride(3), ". Call .contiguous().");
  return Dense{memory_of<const void>(where, name, x), dtype, x.stride(0), x.stride(1), x.stride(2)};
}

// The stride of an axis, 0 where it has size 1: all indices then share that one element.
int64_t shared_stride(const Tensor& plane, int64_t axis) { return plane.size(axis) == 1 ? 0 : plane.stride(axis); }

void check_scale_plane(const char* where, const std::string& name, const Tensor& plane, const Tensor& codes,
                       int head_dim) {
  check_device(where, name, plane, codes);
  KVQ_CHECK(plane.scalar_type() == ScalarType::Half, where, ": `", name, "` must be float16, got ",
            torch::headeronly::toString(plane.scalar_type()), kFromThisPackage);
  KVQ_CHECK(plane.dim() == 4, where, ": `", name, "` must be [batch, heads, groups, tokens], got ", shape_of(plane),
            kFromThisPackage);
  const int64_t batch = codes.size(0), heads = codes.size(1), capacity = codes.size(2);
  const int64_t groups = plane.size(2);
  const bool is_frozen = plane.size(3) == 1;
  const bool is_shared = plane.size(1) == 1 && heads > 1;
  const bool fits = plane.size(0) == batch && (plane.size(1) == heads || is_shared) &&
                    (plane.size(3) == capacity || is_frozen) && !(is_frozen && heads > 1 && !is_shared);
  KVQ_CHECK(fits, where, ": `", name, "` must be [", batch, ", ", heads, " or 1, groups, ", capacity, "] or [", batch,
            ", 1, 1, 1] like the codes, got ", shape_of(plane), kFromThisPackage);
  KVQ_CHECK(groups >= 1 && head_dim % groups == 0 && head_dim / groups % 8 == 0, where, ": `", name,
            "` must have a number of groups that cuts head_dim ", head_dim, " into multiples of 8, got ", groups,
            kFromThisPackage);
  KVQ_CHECK(groups == 1 || (!is_shared && !is_frozen), where, ": `", name, "` must have groups only where every head ",
            "and token has scales of its own, got ", shape_of(plane), kFromThisPackage);
}

// Scales or zeros of granularity channel; see Side::has_channel_scales.
void check_block_plane(const char* where, const std::string& name, const Tensor& plane, const Tensor& codes,
                       int head_dim) {
  check_device(where, name, plane, codes);
  KVQ_CHECK(plane.scalar_type() == ScalarType::Half, where, ": `", name, "` must be float16, got ",
            torch::headeronly::toString(plane.scalar_type()), kFromThisPackage);
  const int64_t blocks = codes.size(2) / kBlockSize;
  const bool fits = plane.dim() == 4 && plane.size(0) == codes.size(0) && plane.size(1) == codes.size(1) &&
                    plane.size(2) == blocks && plane.size(3) == head_dim;
  KVQ_CHECK(fits, where, ": `", name, "` must be [", codes.size(0), ", ", codes.size(1), ", ", blocks, ", ", head_dim,
            "] where every channel has a scale, got ", shape_of(plane), kFromThisPackage);
  KVQ_CHECK(plane.stride(3) == 1, where, ": `", name, "` must have contiguous channels, got stride ", plane.stride(3),
            kFromThisPackage);
}

// Checks for rings only. In a ring, positions keep growing while rows are reused.
void check_ring(const char* where, const WindowArgs& windows, const Tensor& codes) {
  if (!windows.is_ring) return;
  KVQ_CHECK(codes.size(2) > 0 && codes.size(2) % kBlockSize == 0, where, ": `key_codes` must have a capacity that is ",
            "a positive multiple of ", kBlockSize, " where `is_ring`, got ", codes.size(2), kFromThisPackage);
  KVQ_CHECK(windows.sink_length == 0, where, ": `sink_length` must be 0 where `is_ring`, got ", windows.sink_length,
            ". The first tokens slide out of a ring.");
}

// In a ring, the newest token must not have overwritten a token that the oldest query of the call still attends to.
void check_window(const WindowArgs& windows, int64_t sliding_window, const DecodeParams& params) {
  if (!windows.is_ring) return;
  const int64_t largest = int64_t{params.capacity} + 1 - params.q_len;
  KVQ_CHECK(sliding_window >= 1 && sliding_window <= largest, "decode: `sliding_window` must be between 1 and ",
            largest, " where `is_ring` with a capacity of ", params.capacity, " and ", params.q_len,
            " query tokens, got ", sliding_window, ". Attend to fewer tokens at a time, or make a larger ring.");
}

// A tail with more rows than both windows need belongs to granularity channel.
void add_tail(const char* where, const std::string& name, const PlaneArgs& planes, const WindowArgs& windows,
              Side& side) {
  const Tensor& codes = planes.codes;
  const int64_t sinks = to_int(where, "sink_length", windows.sink_length);
  const int64_t window = to_int(where, "residual_length", windows.residual_length);
  const bool is_wanted = side.storage != Storage::none && sinks + window > 0;
  KVQ_CHECK(planes.tail.has_value() || !is_wanted, where, ": `", name, "_tail` must be given for a `sink_length` of ",
            sinks, " and a `residual_length` of ", window, ", got None", kFromThisPackage);
  if (!planes.tail.has_value()) return;
  const Tensor& tail = *planes.tail;
  check_device(where, name + "_tail", tail, codes);
  side.tail_dtype = dense_dtype(where, name + "_tail", tail);
  side.has_channel_scales = name == "key" && side.storage == Storage::int4 && !side.is_symmetric && tail.dim() == 4 &&
                            tail.size(2) > sinks + window;
  KVQ_CHECK(is_wanted || side.has_channel_scales, where, ": `", name, "_tail` must be None ",
            side.storage == Storage::none ? "for storage 'none'"
                                          : "without dense windows, but for keys that are int4 with scale and zero",
            ", got a tensor", kFromThisPackage);
  const int64_t ring = side.has_channel_scales ? ((window + kBlockSize - 1) / kBlockSize + 1) * kBlockSize : window;
  const bool fits = tail.dim() == 4 && tail.size(0) == codes.size(0) && tail.size(1) == codes.size(1) &&
                    tail.size(2) == sinks + ring && tail.size(3) == side.head_dim;
  KVQ_CHECK(fits, where, ": `", name, "_tail` must be [", codes.size(0), ", ", codes.size(1), ", ", sinks + ring, ", ",
            side.head_dim, "] like the codes, got ", shape_of(tail), kFromThisPackage);
  KVQ_CHECK(tail.stride(3) == 1, where, ": `", name, "_tail` must have contiguous rows, got stride ", tail.stride(3),
            kFromThisPackage);
  to_int(where, "sink_length", sinks + ring);  // rows are counted by ints
  side.ring = static_cast<int>(ring);
  side.tail = memory_of<void>(where, name + "_tail", tail);
  side.tail_stride_b = tail.stride(0);
  side.tail_stride_h = tail.stride(1);
  side.tail_stride_t = tail.stride(2);
}

// Scales and zeros of granularity channel.
void add_blocks(const char* where, const std::string& name, const PlaneArgs& planes, Side& side) {
  const Tensor& codes = planes.codes;
  KVQ_CHECK(codes.size(2) % kBlockSize == 0, where, ": `", name, "_codes` must have a capacity that is a multiple of ",
            kBlockSize, " where every channel has a scale, got ", codes.size(2), kFromThisPackage);
  const Tensor &scale = *planes.scale, &zero = *planes.zero;
  check_block_plane(where, name + "_scale", scale, codes, side.head_dim);
  check_block_plane(where, name + "_zero", zero, codes, side.head_dim);
  side.num_groups = 1;
  side.scale = memory_of<half_bits>(where, name + "_scale", scale);
  side.scale_stride_b = scale.stride(0);
  side.scale_stride_h = scale.stride(1);
  side.scale_stride_g = scale.stride(2);
  side.zero = memory_of<half_bits>(where, name + "_zero", zero);
  side.zero_stride_b = zero.stride(0);
  side.zero_stride_h = zero.stride(1);
  side.zero_stride_g = zero.stride(2);
}

// `name` is "key" or "value"; messages name arguments key_codes, key_scale and so on.
Side side(const char* where, const std::string& name, const PlaneArgs& planes, const WindowArgs& windows,
          const Tensor& like) {
  const Tensor& codes = planes.codes;
  Side side{};
  KVQ_CHECK(planes.storage >= 0 && planes.storage <= 3, where, ": `", name, "_storage` must be 0, 1, 2 or 3, got ",
            planes.storage, ".");
  side.storage = static_cast<Storage>(planes.storage);
  const bool is_quantized = side.storage != Storage::none;

  check_device(where, name + "_codes", codes, like);
  KVQ_CHECK(codes.dim() == 4, where, ": `", name, "_codes` must be [batch, num_kv_heads, capacity, row], got ",
            shape_of(codes), kFromThisPackage);
  if (is_quantized) {
    KVQ_CHECK(codes.scalar_type() == ScalarType::Byte, where, ": `", name, "_codes` must be uint8 for storage '",
              name_of(side.storage), "', got ", torch::headeronly::toString(codes.scalar_type()), kFromThisPackage);
  } else {
    side.dense_dtype = dense_dtype(where, name + "_codes", codes);
  }
  const int64_t channels = codes.size(3) * (side.storage == Storage::int4 ? 2 : 1);
  side.head_dim = to_int(where, "head_dim", channels);
  KVQ_CHECK(side.head_dim > 0 && side.head_dim % 8 == 0, where, ": `", name,
            "_codes` must have a head_dim that is a multiple of 8, got ", side.head_dim,
            ". Leave this model unpatched.");
  KVQ_CHECK(codes.stride(3) == 1, where, ": `", name, "_codes` must have contiguous rows, got stride ",
            codes.stride(3), kFromThisPackage);
  KVQ_CHECK(codes.size(1) > 0, where, ": `", name, "_codes` must have at least one head, got ", shape_of(codes),
            kFromThisPackage);
  KVQ_CHECK(codes.size(2) % kTokenAlignment == 0, where, ": `", name, "_codes` must have a capacity that is a ",
            "multiple of ", kTokenAlignment, ", got ", codes.size(2), kFromThisPackage);
  const int64_t bytes = is_quantized ? 1 : static_cast<int64_t>(codes.element_size());
  side.codes = memory_of<uint8_t>(where, name + "_codes", codes);
  side.codes_stride_b = codes.stride(0) * bytes;
  side.codes_stride_h = codes.stride(1) * bytes;
  side.codes_stride_t = codes.stride(2) * bytes;

  KVQ_CHECK(planes.scale.has_value() == is_quantized, where, ": `", name, "_scale` must be ",
            is_quantized ? "given" : "None", " for storage '", name_of(side.storage), "', got ",
            is_quantized ? "None" : "a tensor", kFromThisPackage);
  side.is_symmetric = !planes.zero.has_value();
  KVQ_CHECK(side.is_symmetric || side.storage == Storage::int8 || side.storage == Storage::int4, where, ": `", name,
            "_zero` must be None for storage '", name_of(side.storage), "', got a tensor", kFromThisPackage);
  const bool can_clip = side.storage == Storage::int8 || side.storage == Storage::int4;
  KVQ_CHECK(planes.clip_ratio == 1 || (can_clip && planes.clip_ratio > 0 && planes.clip_ratio < 1), where, ": `", name,
            "_clip_ratio` must be ", can_clip ? "above 0 and at most 1" : "1 where codes are no integers", ", got ",
            planes.clip_ratio, ". KVFormat.clip_ratio decides it.");
  side.clip_ratio = static_cast<float>(planes.clip_ratio);
  side.num_groups = 1;
  add_tail(where, name, planes, windows, side);
  if (side.has_channel_scales) {
    add_blocks(where, name, planes, side);
    return side;
  }
  if (is_quantized) {
    const Tensor& scale = *planes.scale;
    check_scale_plane(where, name + "_scale", scale, codes, side.head_dim);
    side.num_groups = static_cast<int>(scale.size(2));
    side.is_frozen = scale.size(3) == 1;
    side.is_shared_by_heads = scale.size(1) == 1 && (codes.size(1) > 1 || side.is_frozen);
    side.scale = memory_of<half_bits>(where, name + "_scale", scale);
    side.scale_stride_b = shared_stride(scale, 0);
    side.scale_stride_h = shared_stride(scale, 1);
    side.scale_stride_g = shared_stride(scale, 2);
    side.scale_stride_t = shared_stride(scale, 3);
  }
  if (!side.is_symmetric) {
    const Tensor& zero = *planes.zero;
    check_scale_plane(where, name + "_zero", zero, codes, side.head_dim);
    KVQ_CHECK(is_shaped_like(zero, *planes.scale), where, ": `", name, "_zero` must be ",
              shape_of(*planes.scale), " like the scale, got ", shape_of(zero), kFromThisPackage);
    side.zero = memory_of<half_bits>(where, name + "_zero", zero);
    side.zero_stride_b = shared_stride(zero, 0);
    side.zero_stride_h = shared_stride(zero, 1);
    side.zero_stride_g = shared_stride(zero, 2);
    side.zero_stride_t = shared_stride(zero, 3);
  }
  return side;
}

void check_same_tokens(const char* where, const Tensor& key_codes, const Tensor& value_codes) {
  const bool is_same = key_codes.size(0) == value_codes.size(0) && key_codes.size(1) == value_codes.size(1) &&
                       key_codes.size(2) == value_codes.size(2);
  KVQ_CHECK(is_same, where, ": `value_codes` must have batch, heads and capacity of the keys, ", shape_of(key_codes),
            ", got ", shape_of(value_codes), kFromThisPackage);
}

void check_tokens(const char* where, const char* name, const Tensor& x, const Tensor& codes, int head_dim,
                  int64_t q_len) {
  KVQ_CHECK(x.size(0) == codes.size(0), where, ": `", name, "` must have batch ", codes.size(0),
            " like the cache, got ", x.size(0), kForAnotherBatch);
  KVQ_CHECK(x.size(1) == codes.size(1), where, ": `", name, "` must have ", codes.size(1),
            " heads like the cache, got ", x.size(1), ". Was this cache filled by another model?");
  KVQ_CHECK(x.size(2) == q_len, where, ": `", name, "` must have ", q_len, " tokens like the keys, got ", x.size(2),
            ".");
  KVQ_CHECK(x.size(3) == head_dim, where, ": `", name, "` must have head_dim ", head_dim, " like the cache, got ",
            x.size(3), ". Was this cache filled by another model?");
}

const int32_t* per_sequence(const char* where, const char* name, const Tensor& tensor, const Tensor& codes) {
  check_device(where, name, tensor, codes);
  KVQ_CHECK(tensor.scalar_type() == ScalarType::Int, where, ": `", name, "` must be int32, got ",
            torch::headeronly::toString(tensor.scalar_type()), ". Call .to(torch.int32).");
  KVQ_CHECK(tensor.dim() == 1 && tensor.size(0) == codes.size(0), where, ": `", name, "` must be [", codes.size(0),
            "], one number per sequence of the cache, got ", shape_of(tensor), ".");
  KVQ_CHECK(tensor.is_contiguous(), where, ": `", name, "` must be contiguous, got stride ", tensor.stride(0),
            ". Call .contiguous().");
  return memory_of<const int32_t>(where, name, tensor);
}

int32_t* counter_array(const std::optional<Tensor>& counters, const Tensor& codes) {
  if (!counters.has_value()) return nullptr;
  constexpr const char* kMake = ". Make them with torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32).";
  check_device("decode", "counters", *counters, codes);
  KVQ_CHECK(counters->scalar_type() == ScalarType::Int, "decode: `counters` must be int32, got ",
            torch::headeronly::toString(counters->scalar_type()), kMake);
  KVQ_CHECK(counters->dim() == 1 && counters->size(0) == kNumCounters, "decode: `counters` must be [", kNumCounters,
            "], got ", shape_of(*counters), kMake);
  KVQ_CHECK(counters->is_contiguous(), "decode: `counters` must be contiguous, got stride ", counters->stride(0),
            kMake);
  return memory_of<int32_t>("decode", "counters", *counters);
}

const float* per_channel(const char* where, const char* name, const std::optional<Tensor>& tensor,
                         const Tensor& codes, int head_dim) {
  if (!tensor.has_value()) return nullptr;
  check_device(where, name, *tensor, codes);
  KVQ_CHECK(tensor->scalar_type() == ScalarType::Float, where, ": `", name, "` must be float32, got ",
            torch::headeronly::toString(tensor->scalar_type()), ". Call .float().");
  KVQ_CHECK(tensor->dim() == 2 && tensor->size(0) == codes.size(1) && tensor->size(1) == head_dim, where, ": `", name,
            "` must be [", codes.size(1), ", ", head_dim, "], one number per head and channel of the keys, got ",
            shape_of(*tensor), ". Was it made for another model?");
  KVQ_CHECK(tensor->is_contiguous(), where, ": `", name, "` must be contiguous, got stride ", tensor->stride(0),
            ". Call .contiguous().");
  return memory_of<const float>(where, name, *tensor);
}

KeyTransform key_transform(const char* where, const TransformArgs& transform, const Tensor& codes, const Side& side) {
  const KeyTransform result = {per_channel(where, "key_center", transform.center, codes, side.head_dim),
                               per_channel(where, "key_smoothing", transform.smoothing, codes, side.head_dim),
                               transform.is_rotated};
  KVQ_CHECK(!side.has_channel_scales || is_identity(result), where, ": `key_center`, `key_smoothing` and `rotates_key` ",
            "must be left out where every channel of the keys has a scale, got a transform. Outlier channels do no ",
            "harm there.");
  return result;
}

const float* per_head(const char* name, const std::optional<Tensor>& tensor, const Tensor& query) {
  if (!tensor.has_value()) return nullptr;
  check_device("decode", name, *tensor, query);
  KVQ_CHECK(tensor->scalar_type() == ScalarType::Float, "decode: `", name, "` must be float32, got ",
            torch::headeronly::toString(tensor->scalar_type()), ". Call .float().");
  KVQ_CHECK(tensor->dim() == 1 && tensor->size(0) == query.size(1), "decode: `", name, "` must be [", query.size(1),
            "], one number per query head, got ", shape_of(*tensor), ".");
  KVQ_CHECK(tensor->is_contiguous(), "decode: `", name, "` must be contiguous, got stride ", tensor->stride(0),
            ". Call .contiguous().");
  return memory_of<const float>("decode", name, *tensor);
}

// --- the fused ops between linear layers (fused.h)

constexpr int kVectorBytes = 16;  // the most that a kernel loads at a time

void check_like(const char* where, const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  KVQ_CHECK(is_on(tensor, like), where, ": `", name, "` must be on the device of `", like_name,
            "`, got another device. Move it there.");
  KVQ_CHECK(tensor.scalar_type() == like.scalar_type(), where, ": `", name, "` must be ",
            torch::headeronly::toString(like.scalar_type()), " like `", like_name, "`, got ",
            torch::headeronly::toString(tensor.scalar_type()), ". Cast it.");
}

void check_vectors(const char* where, const char* name, const Tensor& tensor) {
  KVQ_CHECK(tensor.is_contiguous(), where, ": `", name, "` must be contiguous, got strides that are not. ",
            "Call .contiguous().");
  KVQ_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0, where, ": `", name,
            "` must start at a multiple of ", kVectorBytes, " bytes, got a view that does not. Call .clone().");
}

Dense rotated(const char* name, const Tensor& x, const Tensor& query, Dtype dtype) {
  check_like("rotary", name, x, "query", query);
  KVQ_CHECK(x.dim() == 4 && x.size(0) == query.size(0) && x.size(2) == query.size(2) && x.size(3) == query.size(3),
            "rotary: `", name, "` must be [", query.size(0), ", heads, ", query.size(2), ", ", query.size(3),
            "] like `query`, got ", shape_of(x), ".");
  KVQ_CHECK(x.stride(3) == 1, "rotary: `", name, "` must have contiguous channels, got stride ", x.stride(3),
            ". Call .contiguous().");
  return dense_of(x, dtype);
}

Dense angles(const char* name, const Tensor& x, const Tensor& query, Dtype dtype) {
  check_like("rotary", name, x, "query", query);
  const int64_t batch = query.size(0);
  KVQ_CHECK(x.dim() == 3 && (x.size(0) == batch || x.size(0) == 1) && x.size(1) == query.size(2) &&
                x.size(2) == query.size(3),
            "rotary: `", name, "` must be [", batch, " or 1, ", query.size(2), ", ", query.size(3),
            "] like `query`, got ", shape_of(x), ".");
  KVQ_CHECK(x.stride(2) == 1, "rotary: `", name, "` must have contiguous channels, got stride ", x.stride(2),
            ". Call .contiguous().");
  return Dense{x.const_data_ptr(), dtype, x.size(0) == 1 ? 0 : x.stride(0), 0, x.stride(1)};
}

// Rows along four axes. `strides` and the length of a row, `row`, are in the same unit.
struct Layout {
  int64_t sizes[4], strides[4], row;
};

// Whether two elements share memory, as in an expanded tensor. Also true for some interleaved rows that do not overlap,
// but slicing and transposing a contiguous tensor never produces those.
bool has_overlap(const Layout& layout) {
  int order[4] = {0, 1, 2, 3};
  std::sort(order, order + 4, [&layout](int a, int b) { return layout.strides[a] < layout.strides[b]; });
  int64_t extent = layout.row;
  for (const int axis : order) {
    if (layout.sizes[axis] == 0) return false;
    if (layout.sizes[axis] == 1) continue;
    if (layout.strides[axis] < extent) return true;
    extent += (layout.sizes[axis] - 1) * layout.strides[axis];
  }
  return false;
}

// Two elements of a plane must not share memory: the order of threads would decide which of two tokens survives.
void check_apart(const char* where, const std::string& name, const Side& side, const AppendParams& params) {
  const int64_t batch = params.batch, heads = params.num_kv_heads, capacity = params.capacity;
  const auto check = [&](const char* plane, const Layout& layout) {
    KVQ_CHECK(!has_overlap(layout), where, ": `", name, plane,
              "` must have memory of its own for each element, got strides that share it. Call .clone().");
  };
  check("_codes", {{batch, heads, capacity, 1},
                   {side.codes_stride_b, side.codes_stride_h, side.codes_stride_t, 0},
                   row_bytes_of(side)});
  if (side.tail != nullptr) {
    check("_tail", {{batch, heads, params.sink_length + int64_t{side.ring}, 1},
                    {side.tail_stride_b, side.tail_stride_h, side.tail_stride_t, 0},
                    side.head_dim});
  }
  const auto check_scales = [&](const char* plane, int64_t stride_b, int64_t stride_h, int64_t stride_g,
                                int64_t stride_t) {
    if (side.has_channel_scales) {
      check(plane, {{batch, heads, capacity / kBlockSize, 1}, {stride_b, stride_h, stride_g, 0}, side.head_dim});
      return;
    }
    const int64_t rows = side.is_shared_by_heads ? 1 : heads, tokens = side.is_frozen ? 1 : capacity;
    check(plane, {{batch, rows, side.num_groups, tokens}, {stride_b, stride_h, stride_g, stride_t}, 1});
  };
  if (side.scale != nullptr) {
    check_scales("_scale", side.scale_stride_b, side.scale_stride_h, side.scale_stride_g, side.scale_stride_t);
  }
  if (side.zero != nullptr) {
    check_scales("_zero", side.zero_stride_b, side.zero_stride_h, side.zero_stride_g, side.zero_stride_t);
  }
}

// Nor may a plane share memory with anything else that a call reads or writes. Only first elements are compared, so
// overlapping views pass; this catches the likely mistake, the same tensor passed twice.
void check_distinct(const char* where, const AppendParams& params, const void* query) {
  const Side &key = params.key_side, &value = params.value_side;
  const std::pair<const char*, const void*> memories[] = {
      {"key_codes", key.codes},     {"key_scale", key.scale},     {"key_zero", key.zero},     {"key_tail", key.tail},
      {"value_codes", value.codes}, {"value_scale", value.scale}, {"value_zero", value.zero}, {"value_tail", value.tail},
      {"key", params.key.data},     {"value", params.value.data}, {"query", query},
      {"lengths", params.lengths},  {"starts", params.starts},
      {"key_center", params.key_transform.center},                {"key_smoothing", params.key_transform.smoothing}};
  constexpr int kNumWritten = 8, kNumMemories = sizeof(memories) / sizeof(memories[0]);
  for (int i = 0; i < kNumWritten; ++i) {
    for (int j = i + 1; j < kNumMemories && memories[i].second != nullptr; ++j) {
      KVQ_CHECK(memories[i].second != memories[j].second, where, ": `", memories[i].first,
                "` must have memory of its own, got that of `", memories[j].first, "`. Call .clone().");
    }
  }
}

void check_ring_length(const char* where, bool is_ring, int length, int b) {
  KVQ_CHECK(!is_ring || length <= kMaxRingLength, where, ": `lengths` must be at most ", kMaxRingLength,
            " tokens where `is_ring`, got ", length, " for sequence ", b, ". Start a new cache.");
}

void check_start(const char* where, const int32_t* starts, int b) {
  KVQ_CHECK(starts == nullptr || starts[b] >= 0, where, ": `starts` must not be negative, got ", starts[b],
            " for sequence ", b, ".");
}

// The index of the first number that is not good, or `count` if all are. A first pass without branches only counts, so
// that it vectorises (0.27 rather than 1.25 us for two tensors of 8 heads of 128 channels); only a call that will be
// refused searches for the index.
template <class IsGood>
int64_t first_bad(const float* numbers, int64_t count, const IsGood& is_good) {
  unsigned num_bad = 0;
  for (int64_t i = 0; i < count; ++i) num_bad += !is_good(numbers[i]);
  if (num_bad == 0) return count;
  return std::find_if_not(numbers, numbers + count, is_good) - numbers;
}

}  // namespace

void check_given(const char* where, const char* name, const Tensor& tensor) {
  KVQ_CHECK(tensor.defined(), where, ": `", name, "` must be a tensor, got None.");
}

Tensor with_contiguous_channels(const Tensor& x) {
  const bool is_row_major = x.dim() != 4 || x.stride(3) == 1 || x.numel() == 0;
  return is_row_major ? x : torch::stable::contiguous(x);
}

Dense dense_of(const Tensor& x, Dtype dtype) {
  return Dense{x.const_data_ptr(), dtype, x.stride(0), x.stride(1), x.stride(2)};
}

AppendParams append_params(const char* where, const Tensor& key, const Tensor& value, const PlaneArgs& key_planes,
                           const PlaneArgs& value_planes, const Tensor& lengths, const std::optional<Tensor>& starts,
                           const WindowArgs& windows, const TransformArgs& transform, const void* query) {
  AppendParams params{};
  params.key_side = side(where, "key", key_planes, windows, key_planes.codes);
  params.value_side = side(where, "value", value_planes, windows, key_planes.codes);
  check_same_tokens(where, key_planes.codes, value_planes.codes);
  check_ring(where, windows, key_planes.codes);
  params.key = dense(where, "key", key, key_planes.codes);
  params.value = dense(where, "value", value, key_planes.codes);
  const Tensor& codes = key_planes.codes;
  check_tokens(where, "key", key, codes, params.key_side.head_dim, key.size(2));
  check_tokens(where, "value", value, codes, params.value_side.head_dim, key.size(2));
  params.batch = to_int(where, "batch", codes.size(0));
  params.num_kv_heads = to_int(where, "num_kv_heads", codes.size(1));
  params.capacity = to_int(where, "capacity", codes.size(2));
  params.q_len = to_int(where, "q_len", key.size(2));
  params.lengths = per_sequence(where, "lengths", lengths, codes);
  params.starts = starts.has_value() ? per_sequence(where, "starts", *starts, codes) : nullptr;
  params.sink_length = to_int(where, "sink_length", windows.sink_length);
  params.residual_length = to_int(where, "residual_length", windows.residual_length);
  params.is_ring = windows.is_ring;
  const auto check_tail = [where](const char* name, const Dense& x, const Side& side) {
    KVQ_CHECK(side.tail == nullptr || x.dtype == side.tail_dtype, where, ": `", name, "` must have the dtype of `",
              name, "_tail`, got another one. Start a new cache after casting the model.");
  };
  check_tail("key", params.key, params.key_side);
  check_tail("value", params.value, params.value_side);
  params.key_transform = key_transform(where, transform, codes, params.key_side);
  check_apart(where, "key", params.key_side, params);
  check_apart(where, "value", params.value_side, params);
  if (params.batch > 0 && params.q_len > 0 && params.capacity > 0) check_distinct(where, params, query);
  return params;
}

DecodeParams decode_params(const Tensor& query, const PlaneArgs& key_planes, const PlaneArgs& value_planes,
                           const Tensor& lengths, const std::optional<Tensor>& counters,
                           const std::optional<Tensor>& starts, const std::optional<Tensor>& sinks,
                           const std::optional<Tensor>& alibi_slopes, double softmax_scale, double softcap,
                           int64_t sliding_window, int64_t num_splits, const WindowArgs& windows,
                           const TransformArgs& transform) {
  const Tensor& codes = key_planes.codes;
  DecodeParams params{};
  params.key_side = side("decode", "key", key_planes, windows, codes);
  params.value_side = side("decode", "value", value_planes, windows, codes);
  check_same_tokens("decode", codes, value_planes.codes);
  check_ring("decode", windows, codes);
  params.query = dense("decode", "query", query, codes);
  KVQ_CHECK(query.size(0) == codes.size(0), "decode: `query` must have batch ", codes.size(0),
            " like the cache, got ", query.size(0), kForAnotherBatch);
  KVQ_CHECK(query.size(1) > 0 && query.size(1) % codes.size(1) == 0, "decode: `query` must have a multiple of ",
            codes.size(1), " heads, the cache's key-value heads, got ", query.size(1),
            ". Was this cache filled by another model?");
  KVQ_CHECK(query.size(3) == params.key_side.head_dim, "decode: `query` must have head_dim ",
            params.key_side.head_dim, " like the cache, got ", query.size(3),
            ". Was this cache filled by another model?");
  params.batch = to_int("decode", "batch", codes.size(0));
  params.num_q_heads = to_int("decode", "num_q_heads", query.size(1));
  params.num_kv_heads = to_int("decode", "num_kv_heads", codes.size(1));
  params.q_len = to_int("decode", "q_len", query.size(2));
  KVQ_CHECK(query.size(2) <= std::numeric_limits<int>::max() / query.size(1), "decode: `query` must have at most ",
            std::numeric_limits<int>::max(), " rows in a sequence, got ", shape_of(query), ". Pass fewer tokens.");
  params.capacity = to_int("decode", "capacity", codes.size(2));
  params.lengths = per_sequence("decode", "lengths", lengths, codes);
  params.starts = starts.has_value() ? per_sequence("decode", "starts", *starts, codes) : nullptr;
  params.counters = counter_array(counters, codes);
  params.sinks = per_head("sinks", sinks, query);
  params.alibi_slopes = per_head("alibi_slopes", alibi_slopes, query);
  // Both must fit float32, which kernels compute in.
  constexpr double kLargest = std::numeric_limits<float>::max(), kSmallest = std::numeric_limits<float>::min();
  KVQ_CHECK(std::abs(softmax_scale) <= kLargest, "decode: `softmax_scale` must be a finite float32 number, got ",
            softmax_scale, ".");
  KVQ_CHECK(softcap == 0 || (softcap >= kSmallest && softcap <= kLargest),
            "decode: `softcap` must be positive, or 0 for none, got ", softcap, ".");
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.softcap = static_cast<float>(softcap);
  // A window as large as the capacity hides nothing, and a position minus a larger one might not fit an int.
  params.sliding_window = std::min(to_int("decode", "sliding_window", sliding_window), params.capacity);
  params.num_splits = to_int("decode", "num_splits", num_splits);
  check_window(windows, sliding_window, params);
  params.sink_length = to_int("decode", "sink_length", windows.sink_length);
  params.residual_length = to_int("decode", "residual_length", windows.residual_length);
  params.is_ring = windows.is_ring;
  params.key_transform = key_transform("decode", transform, codes, params.key_side);
  return params;
}

void check_new_tokens(const std::optional<Tensor>& key, const std::optional<Tensor>& value, const Tensor& query) {
  KVQ_CHECK(key.has_value() == value.has_value(), "decode: `value` must be ", key.has_value() ? "given" : "None",
            " like `key`, got ", value.has_value() ? "a tensor" : "None", ". Give both or neither.");
  KVQ_CHECK(!key.has_value() || key->dim() != 4 || query.size(2) == key->size(2), "decode: `key` must have ",
            query.size(2), " tokens like the query, got ", key->size(2), ". Append other tokens beforehand.");
}

RmsNormParams rms_norm_params(const char* where, const Tensor& x, const Tensor* other, const Tensor& weight,
                              const std::optional<Tensor>& mean, double eps) {
  RmsNormParams params{};
  params.dtype = dense_dtype(where, "x", x);
  KVQ_CHECK(x.dim() >= 1, where, ": `x` must have rows of channels, got a number.");
  const int64_t num_channels = x.size(x.dim() - 1);
  KVQ_CHECK(num_channels > 0 && num_channels % kFusedVector == 0 && num_channels <= kMaxNormChannels,
            where, ": `x` must have a multiple of ", kFusedVector, " channels, at most ", kMaxNormChannels, ", got ",
            num_channels, ". Use the model's own norm.");
  KVQ_CHECK(mean.has_value() || num_channels >= kMinSummedChannels, where, ": `x` must have at least ",
            kMinSummedChannels, " channels without `mean`, got ", num_channels, ". Give the mean of the squares.");
  check_vectors(where, "x", x);
  if (other != nullptr) {
    check_like(where, "other", *other, "x", x);
    KVQ_CHECK(is_shaped_like(*other, x), where, ": `other` must be ", shape_of(x), " like `x`, got ",
              shape_of(*other), ".");
    check_vectors(where, "other", *other);
    params.other = other->const_data_ptr();
  }
  check_like(where, "weight", weight, "x", x);
  KVQ_CHECK(weight.dim() == 1 && weight.size(0) == num_channels, where, ": `weight` must be [", num_channels,
            "] like the channels of `x`, got ", shape_of(weight), ".");
  check_vectors(where, "weight", weight);
  params.num_channels = static_cast<int>(num_channels);
  params.num_rows = x.numel() / num_channels;
  if (mean.has_value()) {
    KVQ_CHECK(is_on(*mean, x) && mean->scalar_type() == ScalarType::Float && mean->numel() == params.num_rows &&
                  mean->is_contiguous(),
              where, ": `mean` must be ", params.num_rows, " contiguous float32 numbers on the device of `x`, one for ",
              "each row, got ", torch::headeronly::toString(mean->scalar_type()), " ", shape_of(*mean), ".");
    params.mean = static_cast<const float*>(mean->const_data_ptr());
  }
  params.x = x.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.eps = static_cast<float>(eps);
  return params;
}

RotaryParams rotary_params(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin) {
  RotaryParams params{};
  const Dtype dtype = dense_dtype("rotary", "query", query);
  KVQ_CHECK(query.dim() == 4, "rotary: `query` must be [batch, heads, tokens, head_dim], got ", shape_of(query), ".");
  KVQ_CHECK(query.size(3) > 0 && query.size(3) % 2 == 0 && query.size(3) <= kMaxRotaryHeadDim,
            "rotary: `query` must have an even head_dim of at most ", kMaxRotaryHeadDim, ", got ", query.size(3),
            ". Use the model's own function.");
  params.query = rotated("query", query, query, dtype);
  params.key = rotated("key", key, query, dtype);
  params.cos = angles("cos", cos, query, dtype);
  params.sin = angles("sin", sin, query, dtype);
  params.batch = to_int("rotary", "batch", query.size(0));
  params.num_q_heads = to_int("rotary", "num_q_heads", query.size(1));
  params.num_kv_heads = to_int("rotary", "num_kv_heads", key.size(1));
  params.q_len = to_int("rotary", "q_len", query.size(2));
  params.head_dim = static_cast<int>(query.size(3));
  return params;
}

SiluMulParams silu_mul_params(const Tensor& gate, const Tensor& up) {
  SiluMulParams params{};
  params.dtype = dense_dtype("silu_mul", "gate", gate);
  check_like("silu_mul", "up", up, "gate", gate);
  KVQ_CHECK(is_shaped_like(up, gate), "silu_mul: `up` must be ", shape_of(gate), " like `gate`, got ",
            shape_of(up), ".");
  KVQ_CHECK(gate.numel() % kFusedVector == 0, "silu_mul: `gate` must have a multiple of ", kFusedVector,
            " numbers, got ", gate.numel(), ". Use the model's own functions.");
  check_vectors("silu_mul", "gate", gate);
  check_vectors("silu_mul", "up", up);
  params.gate = gate.const_data_ptr();
  params.up = up.const_data_ptr();
  params.numel = gate.numel();
  return params;
}

void check_prefetch(const Tensor& weight, int64_t num_bytes) {
  KVQ_CHECK(weight.is_contiguous(), "prefetch: `weight` must be contiguous, got strides that are not. Call ",
            ".contiguous().");
  const int64_t held = weight.numel() * static_cast<int64_t>(weight.element_size());
  KVQ_CHECK(num_bytes >= 0 && num_bytes <= held, "prefetch: `num_bytes` must be between 0 and the ", held,
            " bytes of `weight`, got ", num_bytes, ".");
}

void check_lengths(const char* where, const AppendParams& params) {
  for (int b = 0; b < params.batch; ++b) {
    const int length = params.lengths[b];
    KVQ_CHECK(length >= params.q_len, where, ": `lengths` must count the ", params.q_len, " new tokens, got ", length,
              " for sequence ", b, ".");
    KVQ_CHECK(params.is_ring || length <= params.capacity, where,
              ": `lengths` must be at most the cache's capacity of ", params.capacity, " tokens, got ", length, " for sequence ", b,
              ". Make a larger cache (max_cache_len), or crop or reset this one.");
    check_ring_length(where, params.is_ring, length, b);
    check_start(where, params.starts, b);
  }
}

void check_lengths(const char* where, const DecodeParams& params) {
  for (int b = 0; b < params.batch; ++b) {
    const int length = params.lengths[b];
    KVQ_CHECK(length >= 0 && (params.is_ring || length <= params.capacity), where,
              ": `lengths` must be between 0 and the cache's capacity of ", params.capacity, " tokens, got ", length,
              " for sequence ", b, ". Make a larger cache (max_cache_len), or crop or reset this one.");
    check_ring_length(where, params.is_ring, length, b);
    check_start(where, params.starts, b);
  }
}

void check_factors(const char* where, const KeyTransform& transform, int64_t count) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (const float* center = transform.center) {
    const int64_t i = first_bad(center, count, [](float x) { return std::abs(x) <= kLargest; });
    KVQ_CHECK(i == count, where, ": `key_center` must be finite, got ", center[i], ". Was it taken from broken keys?");
  }
  if (const float* smoothing = transform.smoothing) {
    const int64_t i = first_bad(smoothing, count, [](float x) { return (x > 0) & (x <= kLargest); });
    KVQ_CHECK(i == count, where, ": `key_smoothing` must be positive and finite, got ", smoothing[i],
              ". Use 1 for channels that stay as they are.");
  }
}

}  // namespace hf_kvquant
