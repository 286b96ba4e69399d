// The checks of args.h. Each message has the form `<where>: `<argument>` must be <expected>, got <actual>. <What to
// do.>` and names the values that the check compared.
#include "args.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

// The message is built only when the check fails.
#define KVQ_CHECK(condition, ...) \
  if (!(condition)) refuse(__VA_ARGS__)

namespace hf_kvquant {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int64_t kAny = -1;  // as a size: any
constexpr int64_t kMaxPlanned = 65535;  // entries of a split plan: an axis of a grid
constexpr int64_t kMaxSlots = 32767;    // shares of a sequence in a split plan
constexpr int64_t kMaxSequences = 65535;  // numbers of `begins`: an axis of a grid
constexpr int64_t kMaxChunkTokens = 1 << 20;  // of all sequences in a row
constexpr const char* kMade = " Planes are made by KVLayout.allocate.";
constexpr const char* kPlanned = " Make it with ops.split_plan.";
constexpr const char* kOfAnother = " Was this cache filled by another model?";

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// An argument in a message. `part` is a plane; empty: none.
struct Subject {
  const char *where, *name, *part = "";
};

std::string spell(const Subject& subject) {
  return *subject.part ? std::string(subject.name) + '.' + subject.part : subject.name;
}

std::ostream& operator<<(std::ostream& out, const Subject& subject) {
  return out << subject.where << ": `" << spell(subject) << "` must ";
}

template <class Sizes>
std::string spell(const Sizes& sizes) {
  std::ostringstream text;
  const char* comma = "[";
  for (const int64_t size : sizes) {
    text << std::exchange(comma, ", ");
    if (size == kAny) {
      text << "any";
    } else {
      text << size;
    }
  }
  return (*comma == '[' ? "[" : text.str()) + "]";
}

std::string shape_of(const Tensor& tensor) { return spell(tensor.sizes()); }

bool is_shaped_like(const Tensor& tensor, const Tensor& like) {
  const auto sizes = tensor.sizes(), others = like.sizes();
  return std::equal(sizes.begin(), sizes.end(), others.begin(), others.end());
}

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return torch::headeronly::toString(type);
  }
}

int to_int(const char* where, const char* name, int64_t value) {
  KVQ_CHECK(value >= 0 && value <= kMaxInt, Subject{where, name}, "be between 0 and ", kMaxInt, ", got ", value, ".");
  return static_cast<int>(value);
}

bool is_on(const Tensor& tensor, const Tensor& other) {
  return tensor.is_cuda() == other.is_cuda() && tensor.get_device_index() == other.get_device_index();
}

Dtype dense_dtype(const Subject& subject, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::fp32;
    case ScalarType::Half: return Dtype::fp16;
    case ScalarType::BFloat16: return Dtype::bf16;
    default:
      refuse(subject, "be float32, float16 or bfloat16, got ", name_of(tensor.scalar_type()),
             ". Load the model in one of these dtypes.");
  }
}

// The check that all tensors share: given, on the device of the cache, of these sizes, of this dtype (nullopt: one of
// the model's), and at an address that numbers of this dtype have. torch.frombuffer can return others.
void check(const Subject& subject, const Tensor& tensor, const Tensor& like, std::optional<ScalarType> dtype,
           std::initializer_list<int64_t> expected, const char* remedy) {
  KVQ_CHECK(tensor.defined(), subject, "be a tensor, got None.");
  KVQ_CHECK(is_on(tensor, like), subject, "be on the device of the cache, got another device. Move the inputs, or ",
            "build the cache where the model is.");
  const auto sizes = tensor.sizes();
  const bool fits = std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end(),
                               [](int64_t size, int64_t wanted) { return wanted == kAny || size == wanted; });
  KVQ_CHECK(fits && (!dtype.has_value() || tensor.scalar_type() == *dtype), subject, "be ", spell(expected), " ",
            dtype.has_value() ? name_of(*dtype) : "of the model's dtype", ", got ", spell(sizes), " ",
            name_of(tensor.scalar_type()), ".", remedy);
  if (!dtype.has_value()) dense_dtype(subject, tensor);
  KVQ_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() == 0, subject,
            "start at a multiple of ", tensor.element_size(), " bytes, got a view that does not. Call .clone().");
}

// Rows along the last axis are contiguous.
void check_rows(const Subject& subject, const Tensor& tensor) {
  const int64_t stride = tensor.stride(tensor.dim() - 1);
  KVQ_CHECK(stride == 1 || tensor.numel() == 0, subject, "have contiguous rows, got stride ", stride,
            ". Call .contiguous().");
}

void check_dense(const Subject& subject, const Tensor& tensor) {
  KVQ_CHECK(tensor.is_contiguous(), subject, "be contiguous, got strides that are not. Call .contiguous().");
}

// Numbers that are read one after the other; nullptr where the tensor is absent.
template <class T>
T* array(const Subject& subject, const std::optional<Tensor>& tensor, const Tensor& like,
         std::initializer_list<int64_t> sizes, const char* remedy) {
  if (!tensor.has_value()) return nullptr;
  constexpr bool is_int = std::is_same_v<std::remove_const_t<T>, int32_t>;
  check(subject, *tensor, like, is_int ? ScalarType::Int : ScalarType::Float, sizes, remedy);
  KVQ_CHECK(tensor->is_contiguous(), subject, "be contiguous, got strides that are not. Call .contiguous().");
  return static_cast<T*>(const_cast<void*>(tensor->const_data_ptr()));
}

Dense dense(const Subject& subject, const Tensor& x, const Tensor& like, std::initializer_list<int64_t> sizes) {
  const int64_t batch = *sizes.begin();
  KVQ_CHECK(!x.defined() || x.dim() != 4 || x.size(0) == batch, subject, "have batch ", batch, " like the cache, got ",
            x.size(0), ". Was this cache filled for another batch? Use batch_select_indices, ",
            "batch_repeat_interleave or reset.");
  check(subject, x, like, std::nullopt, sizes, kOfAnother);
  check_rows(subject, x);
  return dense_of(x, dense_dtype(subject, x));
}

// --- the layout and the planes that follow from it

bool is_sound(const FormatFields& format, bool is_key) {
  const auto is_within = [](int64_t number, int64_t last) { return number >= 0 && number <= last; };
  const bool is_known = is_within(format.storage, kNumStorages - 1) && is_within(format.granularity, 4);
  if (!is_known || !is_within(format.is_symmetric, 1)) return false;
  const auto storage = static_cast<Storage>(format.storage);
  const auto granularity = static_cast<Granularity>(format.granularity);
  const bool has_blocks = granularity == Granularity::channel;
  return (is_integer(storage) || (format.is_symmetric == 1 && format.clip_ratio == kClipOne)) &&
         format.clip_ratio > 0 && format.clip_ratio <= kClipOne && (storage != Storage::none || granularity == Granularity::head) &&
         (granularity == Granularity::group ? format.group_size >= 8 && format.group_size % 8 == 0
                                            : format.group_size == 0) &&
         (!has_blocks || (is_key && storage == Storage::int4 && format.is_symmetric == 0));
}

LayoutFields layout_of(const CacheArgs& args) {
  LayoutFields layout{};
  bool fits = args.layout.size() * sizeof(int64_t) == sizeof layout;
  if (fits) {
    std::memcpy(&layout, args.layout.data(), sizeof layout);
    const bool is_ring = layout.rows == static_cast<int64_t>(Rows::ring);
    fits = is_sound(layout.key, true) && is_sound(layout.value, false) && layout.sink_length >= 0 &&
           layout.residual_length >= 0 && layout.sink_length <= kMaxInt - 2 * kBlockSize &&
           layout.residual_length <= kMaxInt - 2 * kBlockSize - layout.sink_length &&
           (is_ring || layout.rows == static_cast<int64_t>(Rows::linear)) && (!is_ring || layout.sink_length == 0);
  }
  KVQ_CHECK(fits, Subject{args.where, "layout"}, "be what KVLayout.packed gives, got ", spell(args.layout), ".");
  return layout;
}

// Whether a side keeps dense tokens besides its codes.
bool has_tail(const FormatFields& format, const CacheParams& params) {
  return format.storage != static_cast<int64_t>(Storage::none) &&
         (format.granularity == static_cast<int64_t>(Granularity::channel) ||
          params.sink_length + params.residual_length > 0);
}

// The name of a side's plane number `i`: codes, then a scale, a zero and a tail where there are such.
const char* part_of(const Side& side, size_t i) {
  return i == 0 ? "codes" : i == 1 ? "scale" : i == 2 && !side.is_symmetric ? "zero" : "tail";
}

// `name` is key_planes or value_planes; `params` has batch, heads, capacity and windows already.
Side side(const CacheArgs& args, const char* name, const std::vector<Tensor>& planes, const FormatFields& format,
          const CacheParams& params) {
  const bool is_paged = params.page_table != nullptr;
  const int64_t batch = is_paged ? params.num_pages : params.batch, heads = params.num_kv_heads;
  const int64_t capacity = is_paged ? params.page_rows : params.capacity;  // of a page, where there are pages
  const auto granularity = static_cast<Granularity>(format.granularity);
  Side side{};
  side.storage = static_cast<Storage>(format.storage);
  side.is_symmetric = format.is_symmetric == 1;
  side.clip_ratio = static_cast<float>(static_cast<double>(format.clip_ratio) / static_cast<double>(kClipOne));
  side.is_frozen = granularity == Granularity::tensor;
  side.is_shared_by_heads = side.is_frozen || granularity == Granularity::token;
  side.has_channel_scales = granularity == Granularity::channel;
  const bool is_quantized = side.storage != Storage::none;
  const int sinks = params.sink_length, window = params.residual_length;
  const int alignment = side.has_channel_scales ? kTailAlignment : 1;
  side.ring = (window + alignment - 1) / alignment * alignment + (side.has_channel_scales ? kBlockSize : 0);
  const bool is_tailed = has_tail(format, params);
  const size_t count = 1 + is_quantized + !side.is_symmetric + is_tailed;
  KVQ_CHECK(planes.size() == count, Subject{args.where, name}, "be ", count, " tensors for this layout, got ",
            planes.size(), ".", kMade);
  if (is_tailed && side.ring > 0 && planes.back().defined() && planes.back().dim() == 4) {
    // A tail may have more rows for the newest tokens than attention reads.
    const int64_t ring = planes.back().size(2) - sinks;
    if (ring > side.ring && ring <= kMaxInt - sinks && ring % alignment == 0) side.ring = static_cast<int>(ring);
  }

  // Checks the next plane and returns its memory. Writes strides, which are 0 for axes of size 1.
  size_t num_read = 0;
  const auto next = [&](std::optional<ScalarType> dtype, std::initializer_list<int64_t> sizes, bool has_rows,
                        std::initializer_list<int64_t*> strides) {
    const Subject subject{args.where, name, part_of(side, num_read)};
    const Tensor& plane = planes[num_read++];
    check(subject, plane, args.key_planes[0], dtype, sizes, kMade);
    if (has_rows) check_rows(subject, plane);
    const auto found = plane.strides();
    for (size_t axis = 0; axis < strides.size(); ++axis) {
      *strides.begin()[axis] = sizes.begin()[axis] == 1 ? 0 : found[axis];
    }
    return plane.data_ptr();
  };
  const Subject codes{args.where, name, "codes"};
  KVQ_CHECK(planes[0].defined() && planes[0].dim() == 4, codes, "be [batch, num_kv_heads, capacity, row].", kMade);
  const int64_t row = planes[0].size(3);
  side.head_dim = to_int(args.where, "head_dim", is_quantized ? 8 * row / bits_of(side.storage) : row);
  const int64_t group_size = format.group_size == 0 ? std::max(side.head_dim, 1) : format.group_size;
  KVQ_CHECK(side.head_dim > 0 && side.head_dim % 8 == 0 && side.head_dim % group_size == 0, codes,
            "have a head_dim that is a multiple of 8 and of the group size, got ", side.head_dim, ".", kMade);
  side.num_groups = static_cast<int>(side.head_dim / group_size);
  side.codes = static_cast<uint8_t*>(next(is_quantized ? std::optional(ScalarType::Byte) : std::nullopt,
                                          {batch, heads, capacity, row}, true,
                                          {&side.codes_stride_b, &side.codes_stride_h, &side.codes_stride_t}));
  if (!is_quantized) {
    side.dense_dtype = dense_dtype(codes, planes[0]);
    for (int64_t* stride : {&side.codes_stride_b, &side.codes_stride_h, &side.codes_stride_t}) {
      *stride *= bytes_of(side.dense_dtype);
    }
    return side;
  }
  const auto next_scale = [&](int64_t* stride_b, int64_t* stride_h, int64_t* stride_g, int64_t* stride_t) {
    const int64_t rows = side.is_shared_by_heads ? 1 : heads, tokens = side.is_frozen ? 1 : capacity;
    return static_cast<half_bits*>(
        side.has_channel_scales ? next(ScalarType::Half, {batch, heads, capacity / kBlockSize, side.head_dim}, true,
                                       {stride_b, stride_h, stride_g})
                                : next(ScalarType::Half, {batch, rows, side.num_groups, tokens}, false,
                                       {stride_b, stride_h, stride_g, stride_t}));
  };
  side.scale =
      next_scale(&side.scale_stride_b, &side.scale_stride_h, &side.scale_stride_g, &side.scale_stride_t);
  if (!side.is_symmetric) {
    side.zero = next_scale(&side.zero_stride_b, &side.zero_stride_h, &side.zero_stride_g, &side.zero_stride_t);
  }
  if (is_tailed) {
    const int64_t tails = is_paged ? params.num_tails : batch;
    side.tail = next(std::nullopt, {tails, heads, sinks + side.ring, side.head_dim}, true,
                     {&side.tail_stride_b, &side.tail_stride_h, &side.tail_stride_t});
    side.tail_dtype = dense_dtype({args.where, name, "tail"}, planes.back());
  }
  return side;
}

// The first axis of the tail planes, those of keys if they have one; 1 if `side` will refuse that plane.
int64_t count_tails(const CacheArgs& args, const LayoutFields& layout, const CacheParams& params) {
  const std::vector<Tensor>& planes = has_tail(layout.key, params) ? args.key_planes : args.value_planes;
  const bool is_sound = !planes.empty() && planes.back().defined() && planes.back().dim() == 4;
  return is_sound ? planes.back().size(0) : 1;
}

// Turns planes of sequences into planes of pages, and of slots for tails.
void set_pages(const CacheArgs& args, const LayoutFields& layout, CacheParams& params) {
  const Subject subject{args.where, "page_table"};
  const auto has = [&layout](Granularity granularity) {
    return layout.key.granularity == static_cast<int64_t>(granularity) ||
           layout.value.granularity == static_cast<int64_t>(granularity);
  };
  KVQ_CHECK(!params.is_ring && !has(Granularity::tensor), subject,
            "be None for this layout, got a tensor: rings and granularity tensor have no pages.");
  params.num_pages = params.batch, params.page_rows = params.capacity;
  KVQ_CHECK(params.num_pages > 0 && params.page_rows > 0, subject, "be None for planes without rows, got a tensor.");
  const Tensor& table = *args.page_table;
  check(subject, table, args.key_planes[0], ScalarType::Int, {kAny, kAny}, "");
  check_rows(subject, table);
  const int num_columns = has_tail(layout.key, params) || has_tail(layout.value, params) ? kTailColumns : 0;
  KVQ_CHECK(table.size(1) >= num_columns, subject, "begin with ", num_columns,
            " columns of tails for this layout, got ", shape_of(table), ".");
  const auto* const pages = static_cast<const int32_t*>(table.const_data_ptr());
  params.page_table = pages + num_columns;
  params.tail_columns = num_columns > 0 ? pages : nullptr;
  if (num_columns > 0) {
    params.num_tails = to_int(args.where, "page_table", count_tails(args, layout, params));
    KVQ_CHECK(params.num_tails > 0, subject, "be None for tail planes without slots, got a tensor.");
  }
  params.page_table_stride = to_int(args.where, "page_table", table.stride(0));
  params.batch = to_int(args.where, "batch", table.size(0));
  params.capacity = to_int(args.where, "capacity", (table.size(1) - num_columns) * params.page_rows);
}

// The numbers of a plan are on the GPU, so the kernel checks them.
void set_split_plan(const CacheArgs& args, const std::optional<Tensor>& split_plan, DecodeParams& params) {
  if (!split_plan.has_value()) return;
  const Subject subject{args.where, "split_plan"};
  KVQ_CHECK(!params.is_ring, subject, "be None for a ring, got a tensor. Its sequences have equal lengths.");
  KVQ_CHECK(params.num_splits == 0, Subject{args.where, "num_splits"}, "be 0 with a split plan, got ",
            params.num_splits, ". The plan says how sequences are split.");
  params.split_plan = array<const int32_t>(subject, split_plan, args.key_planes[0], {kAny, 4}, kPlanned);
  params.num_planned = to_int(args.where, "split_plan", split_plan->size(0));
  KVQ_CHECK(params.num_planned >= params.batch && params.num_planned <= kMaxPlanned, subject, "have from ",
            params.batch, " to ", kMaxPlanned, " entries, got ", params.num_planned, ".", kPlanned);
}

KeyTransform key_transform(const CacheArgs& args, int num_kv_heads, const Side& side) {
  constexpr const char* kMadeFor = " Was it made for another model?";
  const auto factors = [&](const char* name, const std::optional<Tensor>& tensor) {
    return array<const float>({args.where, name}, tensor, args.key_planes[0], {num_kv_heads, side.head_dim}, kMadeFor);
  };
  return {factors("key_center", args.key_center), factors("key_smoothing", args.key_smoothing), args.rotates_key};
}

// --- memory that is written

// Whether two elements share memory, as in an expanded tensor. Also true for some interleaved rows that do not overlap,
// but slicing and transposing a contiguous tensor never produces those.
bool has_overlap(const Tensor& plane) {
  const auto sizes = plane.sizes(), strides = plane.strides();
  int order[4] = {0, 1, 2, 3};
  std::sort(order, order + 4, [&strides](int a, int b) { return strides[a] < strides[b]; });
  int64_t extent = 1;
  for (const int axis : order) {
    if (sizes[axis] == 0) return false;
    if (sizes[axis] == 1) continue;
    if (strides[axis] < extent) return true;
    extent += (sizes[axis] - 1) * strides[axis];
  }
  return false;
}

// Two elements of a plane must not share memory: the order of threads would decide which of two tokens survives. Nor
// may a plane share memory with anything else that a call reads or writes. There only first elements are compared, so
// overlapping views pass; this catches the likely mistake, the same tensor passed twice.
void check_memory(const CacheArgs& args, const Tensor* query, const AppendParams& params) {
  std::pair<Subject, const void*> memories[15];
  size_t count = 0;
  const auto add = [&](const char* name, const char* part, const void* memory) {
    memories[count++] = {{args.where, name, part}, memory};
  };
  const auto add_planes = [&](const char* name, const std::vector<Tensor>& planes, const Side& side) {
    // Slots of tails may come from the memory that pages come from. Bytes are in use as one or the other, but a plane
    // of all slots lies over planes of all pages.
    const bool has_tail_slots = params.tail_columns != nullptr && side.tail != nullptr;
    for (size_t i = 0; i + has_tail_slots < planes.size(); ++i) {
      add(name, part_of(side, i), planes[i].const_data_ptr());
      KVQ_CHECK(!has_overlap(planes[i]), memories[count - 1].first,
                "have memory of its own for each element, got strides that share it. Call .clone().");
    }
  };
  add_planes("key_planes", args.key_planes, params.key_side);
  add_planes("value_planes", args.value_planes, params.value_side);
  if (params.batch == 0 || params.q_len == 0 || params.capacity == 0) return;
  const size_t num_written = count;
  add("key", "", params.key.data);
  add("value", "", params.value.data);
  add("query", "", query == nullptr ? nullptr : query->const_data_ptr());
  add("lengths", "", params.lengths);
  add("starts", "", params.starts);
  add("key_center", "", params.key_transform.center);
  add("key_smoothing", "", params.key_transform.smoothing);
  for (size_t i = 0; i < num_written; ++i) {
    for (size_t j = i + 1; j < count; ++j) {
      KVQ_CHECK(memories[i].second != memories[j].second, memories[i].first, "have memory of its own, got that of `",
                spell(memories[j].first), "`. Call .clone().");
    }
  }
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

// Numbers from one row of a tensor to the next, all equally far apart: also rows that are slices of longer ones.
int64_t row_stride(const char* where, const char* name, const Tensor& x) {
  int64_t stride = 0, count = 1;  // of the axes behind, in rows
  bool is_even = x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) == 1;
  for (int64_t axis = x.dim() - 2; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (count == 1) stride = x.stride(axis);
    is_even = is_even && x.stride(axis) == stride * count;
    count *= x.size(axis);
  }
  KVQ_CHECK(is_even && stride % kFusedVector == 0, where, ": `", name, "` must have contiguous rows, equally far apart ",
            "by a multiple of ", kFusedVector, " numbers, got strides ", spell(x.strides()), ". Call .contiguous().");
  KVQ_CHECK(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kVectorBytes == 0, where, ": `", name,
            "` must start at a multiple of ", kVectorBytes, " bytes, got a view that does not. Call .clone().");
  return stride;
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

Dense angles(const char* name, const Tensor& x, const Tensor& query, int64_t rotary_dim, Dtype dtype) {
  check_like("rotary", name, x, "query", query);
  const int64_t batch = query.size(0);
  KVQ_CHECK(x.dim() == 3 && (x.size(0) == batch || x.size(0) == 1) && x.size(1) == query.size(2) &&
                x.size(2) == rotary_dim,
            "rotary: `", name, "` must be [", batch, " or 1, ", query.size(2), ", ", rotary_dim,
            "] like `query`, got ", shape_of(x), ".");
  KVQ_CHECK(x.stride(2) == 1, "rotary: `", name, "` must have contiguous channels, got stride ", x.stride(2),
            ". Call .contiguous().");
  return Dense{x.const_data_ptr(), dtype, x.size(0) == 1 ? 0 : x.stride(0), 0, x.stride(1)};
}

}  // namespace

Tensor with_contiguous_channels(const Tensor& x) {
  const bool is_row_major = !x.defined() || x.dim() != 4 || x.stride(3) == 1 || x.numel() == 0;
  return is_row_major ? x : torch::stable::contiguous(x);
}

Dense dense_of(const Tensor& x, Dtype dtype) {
  return Dense{x.const_data_ptr(), dtype, x.stride(0), x.stride(1), x.stride(2)};
}

CacheParams cache_params(const CacheArgs& args) {
  const char* where = args.where;
  const LayoutFields layout = layout_of(args);
  KVQ_CHECK(!args.key_planes.empty() && args.key_planes[0].defined() && args.key_planes[0].dim() == 4,
            Subject{where, "key_planes", "codes"}, "be [batch, num_kv_heads, capacity, row].", kMade);
  const Tensor& codes = args.key_planes[0];
  CacheParams params{};
  params.batch = to_int(where, "batch", codes.size(0));
  params.num_kv_heads = to_int(where, "num_kv_heads", codes.size(1));
  params.capacity = to_int(where, "capacity", codes.size(2));
  params.sink_length = static_cast<int>(layout.sink_length);
  params.residual_length = static_cast<int>(layout.residual_length);
  params.is_ring = layout.rows == static_cast<int64_t>(Rows::ring);
  const bool has_blocks = layout.key.granularity == static_cast<int64_t>(Granularity::channel);
  const int alignment = params.is_ring || has_blocks || args.page_table.has_value() ? kBlockSize : kTokenAlignment;
  KVQ_CHECK(params.num_kv_heads > 0 && params.capacity % alignment == 0 && (params.capacity > 0 || !params.is_ring),
            Subject{where, "key_planes", "codes"}, "have heads and a capacity that is a ",
            params.is_ring ? "positive " : "", "multiple of ", alignment, ", got ", shape_of(codes), ".", kMade);
  if (args.page_table.has_value()) set_pages(args, layout, params);
  params.key_side = side(args, "key_planes", args.key_planes, layout.key, params);
  params.value_side = side(args, "value_planes", args.value_planes, layout.value, params);
  constexpr const char* kOnePerSequence = " One number per sequence of the cache.";
  params.lengths = array<const int32_t>({where, "lengths"}, args.lengths, codes, {params.batch}, kOnePerSequence);
  params.starts = array<const int32_t>({where, "starts"}, args.starts, codes, {params.batch}, kOnePerSequence);
  params.key_transform = key_transform(args, params.num_kv_heads, params.key_side);
  return params;
}

AppendParams append_params(const CacheArgs& args, const CacheParams& cache, const Tensor& key, const Tensor& value,
                           const Tensor* query) {
  AppendParams params{cache, {}, {}};
  const Tensor& codes = args.key_planes[0];
  const int64_t batch = params.batch, heads = params.num_kv_heads;
  params.key = dense({args.where, "key"}, key, codes, {batch, heads, kAny, params.key_side.head_dim});
  params.value = dense({args.where, "value"}, value, codes, {batch, heads, key.size(2), params.value_side.head_dim});
  params.q_len = to_int(args.where, "q_len", key.size(2));
  const auto check_tail = [&args](const char* name, const Dense& x, const Side& side) {
    KVQ_CHECK(side.tail == nullptr || x.dtype == side.tail_dtype, Subject{args.where, name}, "have the dtype of the ",
              "tail, got another one. Start a new cache after casting the model.");
  };
  check_tail("key", params.key, params.key_side);
  check_tail("value", params.value, params.value_side);
  check_memory(args, query, params);
  return params;
}

DecodeParams decode_params(const CacheArgs& args, const CacheParams& cache, const Tensor& query,
                           const std::optional<Tensor>& counters, const std::optional<Tensor>& sinks,
                           const std::optional<Tensor>& alibi_slopes, double softmax_scale, double softcap,
                           int64_t sliding_window, int64_t num_splits, const std::optional<Tensor>& split_plan,
                           bool is_latent) {
  const Tensor& codes = args.key_planes[0];
  DecodeParams params{};
  static_cast<CacheParams&>(params) = cache;
  params.is_latent = is_latent;
  KVQ_CHECK(!is_latent || !cache.key_side.has_channel_scales, Subject{args.where, "layout"},
            "have no scales for channels of latents, got granularity channel. Use groups.");
  const int64_t num_channels = cache.key_side.head_dim + (is_latent ? cache.value_side.head_dim : 0);
  params.query = dense({args.where, "query"}, query, codes, {cache.batch, kAny, kAny, num_channels});
  params.num_q_heads = to_int(args.where, "num_q_heads", query.size(1));
  params.q_len = to_int(args.where, "q_len", query.size(2));
  KVQ_CHECK(params.num_q_heads > 0 && params.num_q_heads % cache.num_kv_heads == 0, Subject{args.where, "query"},
            "have a multiple of ", cache.num_kv_heads, " heads, the cache's key-value heads, got ",
            params.num_q_heads, ".", kOfAnother);
  KVQ_CHECK(params.q_len <= kMaxInt / params.num_q_heads, Subject{args.where, "query"}, "have at most ", kMaxInt,
            " rows in a sequence, got ", shape_of(query), ". Pass fewer tokens.");
  params.counters = array<int32_t>({args.where, "counters"}, counters, codes, {kNumCounters},
                                   " Make them with torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32).");
  constexpr const char* kOnePerHead = " One number per query head.";
  params.sinks = array<const float>({args.where, "sinks"}, sinks, codes, {params.num_q_heads}, kOnePerHead);
  params.alibi_slopes =
      array<const float>({args.where, "alibi_slopes"}, alibi_slopes, codes, {params.num_q_heads}, kOnePerHead);
  // Both must fit float32, which kernels compute in.
  constexpr double kLargest = std::numeric_limits<float>::max(), kSmallest = std::numeric_limits<float>::min();
  KVQ_CHECK(std::abs(softmax_scale) <= kLargest, Subject{args.where, "softmax_scale"}, "be a finite float32 number, got ",
            softmax_scale, ".");
  KVQ_CHECK(softcap == 0 || (softcap >= kSmallest && softcap <= kLargest), Subject{args.where, "softcap"},
            "be positive, or 0 for none, got ", softcap, ".");
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.softcap = static_cast<float>(softcap);
  // A window as large as the capacity hides nothing, and a position minus a larger one might not fit an int.
  params.sliding_window = std::min(to_int(args.where, "sliding_window", sliding_window), params.capacity);
  params.num_splits = to_int(args.where, "num_splits", num_splits);
  set_split_plan(args, split_plan, params);
  // In a ring, the newest token must not have overwritten a token that the oldest query of the call still attends to.
  const int64_t largest = int64_t{params.capacity} + 1 - params.q_len;
  KVQ_CHECK(!params.is_ring || (sliding_window >= 1 && sliding_window <= largest), Subject{args.where, "sliding_window"},
            "be between 1 and ", largest, " in a ring with a capacity of ", params.capacity, " and ", params.q_len,
            " query tokens, got ", sliding_window, ". Attend to fewer tokens at a time, or make a larger ring.");
  return params;
}

DequantizeParams dequantize_params(const CacheParams& cache, int64_t begin, int64_t num_tokens, int64_t num_seen,
                                   int64_t dtype) {
  DequantizeParams params{};
  static_cast<CacheParams&>(params) = cache;
  params.begin = to_int("dequantize", "begin", begin);
  params.num_tokens = to_int("dequantize", "num_tokens", num_tokens);
  to_int("dequantize", "num_tokens", begin + num_tokens);  // positions fit an int
  params.num_seen = to_int("dequantize", "num_seen", num_seen);
  KVQ_CHECK(dtype >= 0 && dtype <= 2, Subject{"dequantize", "dtype"}, "be 0 (float32), 1 (float16) or 2 (bfloat16), ",
            "got ", dtype, ".");
  params.dtype = static_cast<Dtype>(dtype);
  return params;
}

void check_new_tokens(const char* where, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
                      const Tensor& query) {
  KVQ_CHECK(key.has_value() == value.has_value(), where, ": `value` must be ", key.has_value() ? "given" : "None",
            " like `key`, got ", value.has_value() ? "a tensor" : "None", ". Give both or neither.");
  KVQ_CHECK(!key.has_value() || key->dim() != 4 || query.size(2) == key->size(2), where, ": `key` must have ",
            query.size(2), " tokens like the query, got ", key->size(2), ". Append other tokens beforehand.");
}

void check_numbers(const char* where, const CacheParams& params) {
  const int largest = params.is_ring ? kMaxRingLength : params.capacity;
  for (int b = 0; b < params.batch; ++b) {
    const int length = params.lengths[b];
    KVQ_CHECK(length >= 0 && length <= largest, Subject{where, "lengths"}, "be between 0 and ",
              params.is_ring ? "what a ring counts, " : "the cache's capacity of ", largest, " tokens, got ", length,
              " for sequence ", b, ". Make a larger cache (max_cache_len), or crop or reset this one.");
    KVQ_CHECK(length >= params.q_len, Subject{where, "lengths"}, "count the ", params.q_len, " new tokens, got ",
              length, " for sequence ", b, ".");
    KVQ_CHECK(params.starts == nullptr || params.starts[b] >= 0, Subject{where, "starts"}, "not be negative, got ",
              params.starts[b], " for sequence ", b, ".");
    if (params.page_table == nullptr) continue;
    const int slot = tail_slot_of(params, b);
    KVQ_CHECK(params.tail_columns == nullptr || length == 0 || (slot >= 0 && slot < params.num_tails),
              Subject{where, "page_table"}, "begin with a slot from 0 to ", params.num_tails - 1, " for the tail, got ",
              slot, " for sequence ", b, ". Give every sequence a slot of the tail planes.");
    const int tail_from = tail_from_of(params, b), most = length - params.q_len;
    KVQ_CHECK(length == 0 || (tail_from >= 0 && tail_from <= most && tail_from % kBlockSize == 0),
              Subject{where, "page_table"}, "have a multiple of ", kBlockSize, " from 0 to ", most,
              " as the first token that a tail may have, got ", tail_from, " for sequence ", b, ".");
    const int32_t* pages = params.page_table + static_cast<int64_t>(b) * params.page_table_stride;
    for (int i = 0; i < length; i += params.page_rows, ++pages) {
      KVQ_CHECK(*pages >= 0 && *pages < params.num_pages, Subject{where, "page_table"}, "have a page from 0 to ",
                params.num_pages - 1, " for every token held, got ", *pages, " for token ", i, " of sequence ", b, ".");
    }
  }
  constexpr float kLargest = std::numeric_limits<float>::max();
  const int64_t count = static_cast<int64_t>(params.num_kv_heads) * params.key_side.head_dim;
  if (const float* center = params.key_transform.center) {
    const int64_t i = first_bad(center, count, [](float x) { return std::abs(x) <= kLargest; });
    KVQ_CHECK(i == count, where, ": `key_center` must be finite, got ", center[i], ". Was it taken from broken keys?");
  }
  if (const float* smoothing = params.key_transform.smoothing) {
    const int64_t i = first_bad(smoothing, count, [](float x) { return (x > 0) & (x <= kLargest); });
    KVQ_CHECK(i == count, where, ": `key_smoothing` must be positive and finite, got ", smoothing[i],
              ". Use 1 for channels that stay as they are.");
  }
}

RmsNormParams rms_norm_params(const char* where, const Tensor& x, const Tensor* other, const Tensor& weight,
                              const std::optional<Tensor>& mean, double eps, bool is_zero_centered,
                              const std::optional<Tensor>& gate) {
  RmsNormParams params{};
  params.dtype = dense_dtype({where, "x"}, x);
  KVQ_CHECK(x.dim() >= 1, where, ": `x` must have rows of channels, got a number.");
  const int64_t num_channels = x.size(x.dim() - 1);
  KVQ_CHECK(num_channels > 0 && num_channels % kFusedVector == 0 && num_channels <= kMaxNormChannels,
            where, ": `x` must have a multiple of ", kFusedVector, " channels, at most ", kMaxNormChannels, ", got ",
            num_channels, ". Use the model's own norm.");
  KVQ_CHECK(mean.has_value() || num_channels >= kMinSummedChannels, where, ": `x` must have at least ",
            kMinSummedChannels, " channels without `mean`, got ", num_channels, ". Give the mean of the squares.");
  if (other == nullptr) {
    params.row_stride = row_stride(where, "x", x);
  } else {
    check_vectors(where, "x", x);
    params.row_stride = num_channels;
  }
  const auto like_x = [&](const char* name, const Tensor& tensor) {
    check_like(where, name, tensor, "x", x);
    KVQ_CHECK(is_shaped_like(tensor, x), where, ": `", name, "` must be ", shape_of(x), " like `x`, got ",
              shape_of(tensor), ".");
    check_vectors(where, name, tensor);
    return tensor.const_data_ptr();
  };
  if (other != nullptr) params.other = like_x("other", *other);
  if (gate.has_value()) params.gate = like_x("gate", *gate);
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
  params.is_zero_centered = is_zero_centered;
  return params;
}

RotaryParams rotary_params(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin) {
  RotaryParams params{};
  const Dtype dtype = dense_dtype({"rotary", "query"}, query);
  KVQ_CHECK(query.dim() == 4, "rotary: `query` must be [batch, heads, tokens, head_dim], got ", shape_of(query), ".");
  KVQ_CHECK(query.size(3) > 0 && query.size(3) % 2 == 0 && query.size(3) <= kMaxRotaryHeadDim,
            "rotary: `query` must have an even head_dim of at most ", kMaxRotaryHeadDim, ", got ", query.size(3),
            ". Use the model's own function.");
  params.query = rotated("query", query, query, dtype);
  params.key = rotated("key", key, query, dtype);
  const int64_t rotary_dim = cos.dim() == 0 ? 0 : cos.size(cos.dim() - 1);
  KVQ_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= query.size(3),
            "rotary: `cos` must have an even number of channels, at most ", query.size(3), ", got ", shape_of(cos),
            ". Use the model's own function.");
  params.rotary_dim = static_cast<int>(rotary_dim);
  params.cos = angles("cos", cos, query, rotary_dim, dtype);
  params.sin = angles("sin", sin, query, rotary_dim, dtype);
  params.batch = to_int("rotary", "batch", query.size(0));
  params.num_q_heads = to_int("rotary", "num_q_heads", query.size(1));
  params.num_kv_heads = to_int("rotary", "num_kv_heads", key.size(1));
  params.q_len = to_int("rotary", "q_len", query.size(2));
  params.head_dim = static_cast<int>(query.size(3));
  return params;
}

SiluMulParams silu_mul_params(const Tensor& gate, const Tensor& up) {
  SiluMulParams params{};
  params.dtype = dense_dtype({"silu_mul", "gate"}, gate);
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

PackedLinearParams packed_linear_params(const Tensor& x, const Tensor& codes, const Tensor& scale_and_zero,
                                        int64_t group_size) {
  const auto check_operand = [&](const char* name, const Tensor& tensor, ScalarType dtype, const std::string& sizes,
                                 bool fits) {
    KVQ_CHECK(is_on(tensor, x), "packed_linear: `", name, "` must be on the device of `x`, got another device. ",
              "Move it there.");
    KVQ_CHECK(tensor.scalar_type() == dtype && fits, "packed_linear: `", name, "` must be ", sizes, " ", name_of(dtype),
              ", got ", shape_of(tensor), " ", name_of(tensor.scalar_type()), ".");
    check_vectors("packed_linear", name, tensor);
  };
  const int64_t inputs = x.dim() == 2 ? x.size(1) : 0;
  check_operand("x", x, ScalarType::BFloat16, "[rows, inputs], a multiple of 128 inputs,",
                inputs > 0 && inputs % kPackedInputs == 0 && inputs <= kMaxInt);
  const int64_t tiles = codes.dim() == 4 ? codes.size(0) : 0, outputs = tiles * kPackedOutputs;
  check_operand("codes", codes, ScalarType::Int,
                spell(std::array<int64_t, 4>{kAny, inputs / kPackedInputs, 32, 4}) + ", an even number of tiles,",
                tiles > 0 && tiles % 2 == 0 && codes.numel() <= kMaxInt && codes.size(1) == inputs / kPackedInputs &&
                    codes.size(2) == 32 && codes.size(3) == 4);
  int group_log2 = 5;
  while (group_log2 < 8 && int64_t{1} << group_log2 < group_size) ++group_log2;
  KVQ_CHECK(int64_t{1} << group_log2 == group_size && inputs % group_size == 0, "packed_linear: `group_size` must be ",
            "32, 64, 128 or 256 and divide the ", inputs, " inputs, got ", group_size, ".");
  check_operand("scale_and_zero", scale_and_zero, ScalarType::BFloat16,
                spell(std::array<int64_t, 3>{inputs / group_size, outputs, 2}),
                scale_and_zero.dim() == 3 && scale_and_zero.size(0) == inputs / group_size &&
                    scale_and_zero.size(1) == outputs && scale_and_zero.size(2) == 2);
  PackedLinearParams params{};
  params.x = x.const_data_ptr();
  params.codes = codes.const_data_ptr();
  params.scale_and_zero = scale_and_zero.const_data_ptr();
  params.num_rows = x.size(0);
  params.num_inputs = static_cast<int>(inputs);
  params.num_outputs = static_cast<int>(outputs);
  params.group_log2 = group_log2;
  return params;
}

// Numbers of slots, one for each sequence.
const int64_t* slot_numbers(const Subject& subject, const Tensor& tensor, const Tensor& like, int64_t batch) {
  check(subject, tensor, like, ScalarType::Long, {batch}, " One slot for each sequence.");
  check_dense(subject, tensor);
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

// The slots of a batch's states, which begin at the slots of `state`, [slots, ...].
StepSlots step_slots(const char* where, const Tensor& state, int64_t batch, const std::optional<Tensor>& read_slots,
                     const std::optional<Tensor>& write_slots) {
  KVQ_CHECK(read_slots.has_value() == write_slots.has_value(), Subject{where, "write_slots"}, "be ",
            read_slots.has_value() ? "given" : "None", " like `read_slots`, got ",
            read_slots.has_value() ? "None" : "a tensor", ". Give both or neither.");
  KVQ_CHECK(read_slots.has_value() || state.size(0) == batch, Subject{where, "state"}, "have ", batch,
            " sequences like the tokens without slots, got ", state.size(0), ".");
  if (!read_slots.has_value()) return {nullptr, nullptr, state.size(0)};
  return {slot_numbers({where, "read_slots"}, *read_slots, state, batch),
          slot_numbers({where, "write_slots"}, *write_slots, state, batch), state.size(0)};
}

// Sequences in a row of tokens.
Sequences sequences_of(const char* where, int64_t num_tokens, const Tensor& state, const Tensor& begins,
                       const Tensor& read_slots, const Tensor& write_slots) {
  const Subject subject{where, "begins"};
  check(subject, begins, state, ScalarType::Long, {kAny}, " The first token of each sequence, and the end of the last.");
  check_dense(subject, begins);
  KVQ_CHECK(begins.size(0) > 1 && begins.size(0) <= kMaxSequences, subject, "have from 1 to ", kMaxSequences - 1,
            " sequences and the end of the last, got ", begins.size(0), " numbers.");
  const int64_t count = begins.size(0) - 1;
  const StepSlots slots{slot_numbers({where, "read_slots"}, read_slots, state, count),
                        slot_numbers({where, "write_slots"}, write_slots, state, count), state.size(0)};
  return {static_cast<const int64_t*>(begins.const_data_ptr()), slots, num_tokens, static_cast<int>(count)};
}

// A state whose slots may lie apart.
void check_slots(const Subject& subject, const Tensor& state) {
  int64_t stride = 1;
  bool is_dense = true;
  for (int64_t axis = state.dim() - 1; axis > 0; stride *= state.size(axis--)) {
    is_dense = is_dense && (state.size(axis) == 1 || state.stride(axis) == stride);
  }
  KVQ_CHECK(is_dense, subject, "have contiguous slots, got strides ", spell(state.strides()), ". Call .contiguous().");
}

// What both convolutions take besides their tokens.
template <class Params>
void set_conv_operands(const char* where, const Tensor& x, const Tensor& state, const Tensor& weight,
                       const std::optional<Tensor>& bias, bool has_silu, Params& params) {
  const int64_t channels = x.size(1);
  check({where, "weight"}, weight, x, std::nullopt, {channels, kAny}, " One row for each channel.");
  const int64_t width = weight.size(1);
  check({where, "state"}, state, x, std::nullopt, {kAny, channels, kAny}, " One row for each channel.");
  const int64_t length = state.size(2);
  KVQ_CHECK(width > 0 && width - 1 <= length && length > 0 && length <= kMaxConvWidth, Subject{where, "state"},
            "have from ", width - 1, " to ", kMaxConvWidth, " inputs of each channel, got ", shape_of(state), ".");
  check_slots({where, "state"}, state);
  check_dense({where, "weight"}, weight);
  params.weight_dtype = dense_dtype({where, "weight"}, weight);
  if (bias.has_value()) {
    check({where, "bias"}, *bias, x, weight.scalar_type(), {channels}, " One number for each channel.");
    check_rows({where, "bias"}, *bias);
    params.bias = bias->const_data_ptr();
  }
  params.x = x.const_data_ptr();
  params.dtype = dense_dtype({where, "x"}, x);
  params.state = state.data_ptr();
  params.state_dtype = dense_dtype({where, "state"}, state);
  params.state_stride = state.stride(0);
  params.weight = weight.const_data_ptr();
  params.channels = to_int(where, "channels", channels);
  params.state_len = static_cast<int>(length), params.width = static_cast<int>(width);
  params.has_silu = has_silu;
}

ConvStepParams conv_step_params(const Tensor& x, const Tensor& state, const Tensor& weight,
                                const std::optional<Tensor>& bias, bool has_silu,
                                const std::optional<Tensor>& read_slots, const std::optional<Tensor>& write_slots) {
  constexpr const char* kWhere = "conv_step";
  ConvStepParams params{};
  check({kWhere, "x"}, x, x, std::nullopt, {kAny, kAny, 1}, " One token of each sequence.");
  params.batch = to_int(kWhere, "batch", x.size(0));
  set_conv_operands(kWhere, x, state, weight, bias, has_silu, params);
  params.stride_b = x.stride(0), params.stride_c = x.stride(1);
  params.slots = step_slots(kWhere, state, params.batch, read_slots, write_slots);
  return params;
}

ConvChunksParams conv_chunks_params(const Tensor& x, const Tensor& state, const Tensor& weight,
                                    const std::optional<Tensor>& bias, bool has_silu, const Tensor& begins,
                                    const Tensor& read_slots, const Tensor& write_slots) {
  constexpr const char* kWhere = "conv_chunks";
  ConvChunksParams params{};
  check({kWhere, "x"}, x, x, std::nullopt, {1, kAny, kAny}, " The tokens of all sequences in one row.");
  KVQ_CHECK(x.size(2) <= kMaxChunkTokens, Subject{kWhere, "x"}, "have at most ", kMaxChunkTokens, " tokens, got ",
            x.size(2), ". Feed them in smaller chunks.");
  set_conv_operands(kWhere, x, state, weight, bias, has_silu, params);
  params.stride_c = x.stride(1), params.stride_t = x.stride(2);
  params.sequences = sequences_of(kWhere, x.size(2), state, begins, read_slots, write_slots);
  return params;
}

// What both forms of the delta rule take besides their states. `tokens`: [batch, tokens] of all operands.
template <class Params>
void set_delta_operands(const char* where, std::array<int64_t, 2> tokens, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& g, const Tensor& beta, bool normalizes, Params& params) {
  const auto rows = [&](const char* name, const Tensor& x, std::initializer_list<int64_t> sizes) {
    const Subject subject{where, name};
    check(subject, x, query, std::nullopt, sizes,
          tokens[1] == 1 ? " One token of each sequence." : " The tokens of all sequences in one row.");
    if (x.dim() == 4) check_rows(subject, x);
    return Dense{x.const_data_ptr(), dense_dtype(subject, x), x.stride(0), x.stride(2), x.stride(1)};
  };
  params.query = rows("query", query, {tokens[0], tokens[1], kAny, kAny});
  const int64_t batch = query.size(0), count = query.size(1), k_heads = query.size(2), key_dim = query.size(3);
  params.key = rows("key", key, {batch, count, k_heads, key_dim});
  params.value = rows("value", value, {batch, count, kAny, kAny});
  const int64_t heads = value.size(2);
  KVQ_CHECK(k_heads > 0 && heads % k_heads == 0, Subject{where, "value"}, "have a multiple of ", k_heads,
            " heads, those of `key`, got ", heads, ".");
  params.decay = rows("g", g, {batch, count, heads});
  params.beta = rows("beta", beta, {batch, count, heads});
  params.num_k_heads = to_int(where, "heads", k_heads), params.num_heads = to_int(where, "heads", heads);
  params.key_dim = to_int(where, "key_dim", key_dim), params.value_dim = to_int(where, "value_dim", value.size(3));
  params.normalizes = normalizes;
}

// The matrices of all heads, [slots, heads, key_dim, value_dim].
template <class Params>
void* delta_states(const Subject& subject, const Tensor& x, const Tensor& query, Params& params) {
  const bool is_half = x.scalar_type() == ScalarType::Half;
  check(subject, x, query, is_half ? ScalarType::Half : ScalarType::Float,
        {kAny, params.num_heads, params.key_dim, params.value_dim}, " A matrix for each head.");
  check_slots(subject, x);
  params.state_dtype = is_half ? Dtype::fp16 : Dtype::fp32;
  return x.data_ptr();
}

DeltaStepParams delta_step_params(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                                  const Tensor& beta, const Tensor& state, const Tensor& target, bool normalizes,
                                  const std::optional<Tensor>& read_slots, const std::optional<Tensor>& write_slots) {
  constexpr const char* kWhere = "delta_step";
  DeltaStepParams params{};
  set_delta_operands(kWhere, {kAny, 1}, query, key, value, g, beta, normalizes, params);
  const int64_t key_dim = params.key_dim, largest = key_dim % 32 == 0 ? kMaxDeltaKeyDim : kMaxDeltaKeyDim / 4;
  KVQ_CHECK(key_dim > 0 && key_dim % 8 == 0 && key_dim <= largest, Subject{kWhere, "key"},
            "have a multiple of 8 channels up to ", kMaxDeltaKeyDim / 4, ", or of 32 up to ", kMaxDeltaKeyDim, ", got ",
            key_dim, ". Use the model's own function.");
  params.batch = to_int(kWhere, "batch", query.size(0));
  params.state = delta_states({kWhere, "state"}, state, query, params);
  params.target = delta_states({kWhere, "target"}, target, query, params);
  KVQ_CHECK(target.size(0) == state.size(0), Subject{kWhere, "target"}, "have ", state.size(0),
            " slots like `state`, got ", target.size(0), ".");
  KVQ_CHECK(target.scalar_type() == state.scalar_type(), Subject{kWhere, "target"}, "be ",
            name_of(state.scalar_type()), " like `state`, got ", name_of(target.scalar_type()), ".");
  params.state_stride = state.stride(0), params.target_stride = target.stride(0);
  params.slots = step_slots(kWhere, state, params.batch, read_slots, write_slots);
  return params;
}

DeltaGatesParams delta_gates_params(const Tensor& x, const Tensor& decay_weight, const Tensor& beta_weight,
                                    const Tensor& A_log, const Tensor& dt_bias, double beta_factor) {
  constexpr const char* kWhere = "delta_gates";
  DeltaGatesParams params{};
  check({kWhere, "x"}, x, x, std::nullopt, {kAny, kAny, kAny}, " All inputs of each token.");
  params.dtype = dense_dtype({kWhere, "x"}, x);
  KVQ_CHECK(params.dtype != Dtype::fp32, Subject{kWhere, "x"}, "be float16 or bfloat16, got ",
            name_of(x.scalar_type()), ". Use the model's own functions.");
  const int64_t inputs = x.size(2);
  KVQ_CHECK(inputs > 0 && inputs % kGateInputs == 0, Subject{kWhere, "x"}, "have a multiple of ", kGateInputs,
            " inputs, got ", inputs, ". Use the model's own functions.");
  const auto starts_at_vector = [](const Subject& subject, const Tensor& rows, int64_t stride) {
    constexpr int64_t kBytes = 16;
    const bool fits = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kBytes == 0 && stride * 2 % kBytes == 0;
    KVQ_CHECK(fits, subject, "have rows that begin at multiples of ", kBytes, " bytes, got strides ",
              spell(rows.strides()), ". Call .clone().");
  };
  params.x = x.const_data_ptr();
  params.row_stride = row_stride(kWhere, "x", x);
  starts_at_vector({kWhere, "x"}, x, params.row_stride);
  const int64_t heads = decay_weight.dim() == 2 ? decay_weight.size(0) : kAny;
  const auto weight = [&](const char* name, const Tensor& tensor) {
    check({kWhere, name}, tensor, x, x.scalar_type(), {heads, inputs}, " A row of weights for each head.");
    check_dense({kWhere, name}, tensor);
    starts_at_vector({kWhere, name}, tensor, inputs);
    return tensor.const_data_ptr();
  };
  params.decay_weight = weight("decay_weight", decay_weight);
  params.beta_weight = weight("beta_weight", beta_weight);
  const auto numbers = [&](const char* name, const Tensor& tensor, Dtype& dtype) {
    check({kWhere, name}, tensor, x, std::nullopt, {heads}, " A number for each head.");
    check_dense({kWhere, name}, tensor);
    dtype = dense_dtype({kWhere, name}, tensor);
    return tensor.const_data_ptr();
  };
  params.A_log = numbers("A_log", A_log, params.A_log_dtype);
  params.dt_bias = numbers("dt_bias", dt_bias, params.dt_bias_dtype);
  params.beta_factor = static_cast<float>(beta_factor);
  params.num_rows = x.size(0) * x.size(1);
  params.num_inputs = to_int(kWhere, "inputs", inputs), params.num_heads = to_int(kWhere, "heads", heads);
  return params;
}

DeltaChunksParams delta_chunks_params(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                                      const Tensor& beta, const Tensor& state, bool normalizes, const Tensor& begins,
                                      const Tensor& read_slots, const Tensor& write_slots) {
  constexpr const char* kWhere = "delta_chunks";
  DeltaChunksParams params{};
  set_delta_operands(kWhere, {1, kAny}, query, key, value, g, beta, normalizes, params);
  const int key_dim = params.key_dim;
  KVQ_CHECK(key_dim > 0 && key_dim % 8 == 0 && key_dim <= kMaxChunkKeyDim, Subject{kWhere, "key"},
            "have a multiple of 8 channels up to ", kMaxChunkKeyDim, ", got ", key_dim,
            ". Use the model's own function.");
  KVQ_CHECK(params.value_dim % 2 == 0, Subject{kWhere, "value"}, "have an even number of channels, got ",
            params.value_dim, ". Use the model's own function.");
  KVQ_CHECK(params.query.dtype != Dtype::fp32, Subject{kWhere, "query"}, "be float16 or bfloat16, got ",
            name_of(query.scalar_type()), ". Use the model's own function.");
  const auto check_vectors = [&](const char* name, const Tensor& x, const Dense& rows, int64_t bytes) {
    const Subject subject{kWhere, name};
    KVQ_CHECK(rows.dtype == params.query.dtype, subject, "be ", name_of(query.scalar_type()), " like `query`, got ",
              name_of(x.scalar_type()), ". Use the model's own function.");
    const bool fits = reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 && rows.stride_h * 2 % bytes == 0 &&
                      rows.stride_t * 2 % bytes == 0;
    KVQ_CHECK(fits, subject, "have rows that begin at multiples of ", bytes, " bytes, got strides ",
              spell(x.strides()), ". Call .contiguous().");
  };
  check_vectors("query", query, params.query, 16);
  check_vectors("key", key, params.key, 16);
  check_vectors("value", value, params.value, 4);
  params.state = delta_states({kWhere, "state"}, state, query, params);
  params.state_stride = state.stride(0);
  params.sequences = sequences_of(kWhere, query.size(1), state, begins, read_slots, write_slots);
  return params;
}

void check_split_plan(const Tensor& lengths, const std::optional<Tensor>& starts, int64_t num_slots,
                      int64_t most_slots, int64_t min_tokens, int64_t tokens_between) {
  KVQ_CHECK(lengths.dim() == 1 && lengths.scalar_type() == ScalarType::Int && lengths.is_contiguous() &&
                lengths.size(0) > 0,
            "split_plan: `lengths` must be [batch] torch.int32 and contiguous, and not empty, got ", shape_of(lengths),
            ".");
  if (starts.has_value()) {
    KVQ_CHECK(is_on(*starts, lengths), "split_plan: `starts` must be on the device of `lengths`, got another device. ",
              "Move it there.");
    KVQ_CHECK(is_shaped_like(*starts, lengths) && starts->scalar_type() == ScalarType::Int && starts->is_contiguous(),
              "split_plan: `starts` must be ", shape_of(lengths), " torch.int32 and contiguous like `lengths`, got ",
              shape_of(*starts), " ", name_of(starts->scalar_type()), ".");
  }
  KVQ_CHECK(num_slots >= 0 && num_slots <= kMaxSlots, "split_plan: `num_slots` must be between 0 and ", kMaxSlots,
            ", got ", num_slots, ".");
  const int64_t most = num_slots > 0 && num_slots <= kMaxChosenSlots ? kMaxSlots : num_slots;
  KVQ_CHECK(most_slots >= num_slots && most_slots <= most, "split_plan: `most_slots` must be between ", num_slots,
            " and ", most, " for ", num_slots, " slots, got ", most_slots, ".");
  KVQ_CHECK(min_tokens > 0 && min_tokens <= kMaxInt, "split_plan: `min_tokens` must be positive, got ", min_tokens,
            ".");
  KVQ_CHECK(tokens_between >= 0 && tokens_between <= kMaxInt, "split_plan: `tokens_between` must be at least 0, got ",
            tokens_between, ".");
  to_int("split_plan", "batch", lengths.size(0));
}

void check_prefetch(const Tensor& weight, int64_t num_bytes) {
  KVQ_CHECK(weight.is_contiguous(), "prefetch: `weight` must be contiguous, got strides that are not. Call ",
            ".contiguous().");
  const int64_t held = weight.numel() * static_cast<int64_t>(weight.element_size());
  KVQ_CHECK(num_bytes >= 0 && num_bytes <= held, "prefetch: `num_bytes` must be between 0 and the ", held,
            " bytes of `weight`, got ", num_bytes, ".");
}

}  // namespace hf_kvquant
