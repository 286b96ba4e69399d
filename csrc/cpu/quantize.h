// Quantises new tokens into codes, scales and zeros, bit for bit as reference.append does. Each scale takes two passes
// over the values that share it: one finds their range, one divides. Nothing is contracted or multiplied by a
// reciprocal: x - zero, the division and the rounding are each one float32 operation, as in the reference.
//
// Minimum and maximum drop a NaN. So the first pass also collects x - x, which is 0 for every finite x and NaN
// otherwise: if one value is not finite, the scale is NaN.
#pragma once

#include "kernels.h"
#include "transform.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr half_bits kHalfNan = 0x7E00;
constexpr half_bits kMinScale = 1;  // 2^-24

inline bool is_finite_half(half_bits bits) { return (bits & 0x7C00) != 0x7C00; }

inline float levels_of(const Side& side) {
  if (side.storage == Storage::fp8) return 448.0f;
  if (side.storage == Storage::int8) return side.is_symmetric ? 127.0f : 255.0f;
  return side.is_symmetric ? 7.0f : 15.0f;
}

// Calls `use` for channels `begin` ... `end` - 1 of a row, a vector at a time. A last vector that is not full repeats
// its first channel, which changes no minimum, maximum or check.
template <Dtype kDtype, class Use>
inline void for_channels(const void* row, int begin, int end, Use use) {
  int c = begin;
  for (; c + kWidth <= end; c += kWidth) use(load_dense<kDtype>(row, c), c, kWidth);
  if (c < end) {
    float values[kWidth];
    convert_dense(row, kDtype, c, end - c, values);
    for (int i = end - c; i < kWidth; ++i) values[i] = values[0];
    use(load(values), c, end - c);
  }
}

struct Range {
  Float high, low, flaws;

  template <Dtype kDtype>
  void include(const void* row, int begin, int end) {
    for_channels<kDtype>(row, begin, end, [this](Float x, int, int) {
      high = max_of(high, x);
      low = min_of(low, x);
      flaws = or_bits(flaws, sub(x, x));
    });
  }
};

inline Range empty_range() { return {broadcast(-kInfinity), broadcast(kInfinity), zeros()}; }

// Scale and zero as stored: both NaN if a value is not finite or one of them is too large for float16.
inline void scale_of(const Side& side, const Range& range, half_bits& scale, half_bits& zero) {
  const float high = largest_of(range.high), low = smallest_of(range.low);
  const float span =
      side.is_symmetric ? (std::fabs(high) > std::fabs(low) ? std::fabs(high) : std::fabs(low)) : high - low;
  const float clipped = span * side.clip_ratio;
  scale = float_to_half(clipped / levels_of(side));
  zero = side.is_symmetric ? half_bits{0} : float_to_half(low + (span - clipped) * 0.5f);
  if (sum_of(range.flaws) != 0.0f || !is_finite_half(scale) || !is_finite_half(zero)) {
    scale = zero = kHalfNan;
  } else if (scale == 0) {
    scale = kMinScale;
  }
}

template <Storage kStorage>
inline void store_codes(uint8_t* row, int c, int count, Float codes) {
  constexpr int kPerByte = kStorage == Storage::int4 ? 2 : 1;
  uint8_t bytes[kWidth];
  uint8_t* target = count == kWidth ? row + c / kPerByte : bytes;
  if constexpr (kStorage == Storage::int4) store_u4(target, codes);
  if constexpr (kStorage == Storage::int8) store_u8(target, codes);
  if constexpr (kStorage == Storage::fp8) store_fp8(target, codes);
  if (count < kWidth) std::memcpy(row + c / kPerByte, bytes, count / kPerByte);
}

// Writes the codes of the channels that share a scale: 0 where that is NaN.
template <Storage kStorage, Dtype kDtype>
void write_codes(const Side& side, const void* source, int begin, int end, half_bits scale, half_bits zero,
                 uint8_t* row) {
  constexpr int kPerByte = kStorage == Storage::int4 ? 2 : 1;
  const float divisor = half_to_float(scale);
  if (divisor != divisor) {
    std::memset(row + begin / kPerByte, 0, (end - begin) / kPerByte);
    return;
  }
  const Float divisors = broadcast(divisor), zero_of_all = broadcast(half_to_float(zero));
  const Float upper = broadcast(levels_of(side));
  if constexpr (kStorage == Storage::fp8) {
    const Float lower = sub(zeros(), upper);
    for_channels<kDtype>(source, begin, end, [&](Float x, int c, int count) {
      store_codes<kStorage>(row, c, count, min_of(max_of(div(x, divisors), lower), upper));
    });
  } else if (side.is_symmetric) {
    const Float lower = sub(zeros(), upper), offset = add(upper, broadcast(1.0f));
    for_channels<kDtype>(source, begin, end, [&](Float x, int c, int count) {
      const Float code = round_even(min_of(max_of(div(x, divisors), lower), upper));
      store_codes<kStorage>(row, c, count, add(code, offset));
    });
  } else {
    for_channels<kDtype>(source, begin, end, [&](Float x, int c, int count) {
      const Float code = div(sub(x, zero_of_all), divisors);
      store_codes<kStorage>(row, c, count, round_even(min_of(max_of(code, zeros()), upper)));
    });
  }
}

// The end of the heads that are quantised together from `head` on, because they share a scale.
inline int end_of_heads(const QuantizeTask& task, int head) {
  return task.side->storage != Storage::none && task.side->is_shared_by_heads ? task.num_heads : head + 1;
}

// Where the row of new token `i` starts in the source, in elements.
inline int64_t source_offset(const Dense& source, int b, int head, int i) {
  return b * source.stride_b + head * source.stride_h + i * source.stride_t;
}

// The row of the planes that new token `i` is written to.
inline int row_of_new(const QuantizeTask& task, int b, int i) {
  return row_of(task.lengths[b] - task.q_len + i, task.capacity, task.is_ring);
}

// New token `i`, transformed, in float32: the rows of heads `head` ... `head_end` - 1, one after the other.
const float* transform_token(const QuantizeTask& task, int b, int head, int head_end, int i, float* scratch) {
  const Dense& source = *task.source;
  const int head_dim = task.side->head_dim, size = padded_row(head_dim);
  float* row = scratch;
  for (int h = head; h < head_end; ++h, row += size) {
    convert_dense(source.data, source.dtype, source_offset(source, b, h, i), head_dim, row);
    for (int c = head_dim; c < size; ++c) row[c] = 0.0f;
    transform_key_row(*task.transform, h, head_dim, row);
  }
  return scratch;
}

// Quantises a token of one head, or of all heads that share a scale, into row `target`. `stride` of `rows` is in bytes.
template <Storage kStorage, Dtype kDtype>
void quantize_token(const QuantizeTask& task, int b, int head, int64_t target, const void* rows, int64_t stride) {
  const Side& side = *task.side;
  const int group_size = side.head_dim / side.num_groups;
  const int head_end = end_of_heads(task, head);
  const auto source_row = [&](int h) -> const void* { return static_cast<const uint8_t*>(rows) + (h - head) * stride; };
  for (int g = 0; g < side.num_groups; ++g) {
    const int begin = g * group_size, end = begin + group_size;
    half_bits* scale = side.scale + b * side.scale_stride_b + head * side.scale_stride_h + g * side.scale_stride_g +
                       target * side.scale_stride_t;
    half_bits* zero = side.is_symmetric ? nullptr
                                        : side.zero + b * side.zero_stride_b + head * side.zero_stride_h +
                                              g * side.zero_stride_g + target * side.zero_stride_t;
    half_bits new_scale, new_zero = 0;
    if (side.is_frozen) {
      new_scale = *scale;
      if (zero != nullptr) new_zero = *zero;
    } else {
      Range range = empty_range();
      for (int h = head; h < head_end; ++h) range.template include<kDtype>(source_row(h), begin, end);
      scale_of(side, range, new_scale, new_zero);
      *scale = new_scale;
      if (zero != nullptr) *zero = new_zero;
    }
    for (int h = head; h < head_end; ++h) {
      uint8_t* row = side.codes + b * side.codes_stride_b + h * side.codes_stride_h + target * side.codes_stride_t;
      write_codes<kStorage, kDtype>(side, source_row(h), begin, end, new_scale, new_zero, row);
    }
  }
}

// Quantises tokens of one sequence without a transform.
template <Storage kStorage, Dtype kDtype>
void quantize_tokens(const QuantizeTask& task, int b, int head, int first, int last) {
  const Dense& source = *task.source;
  for (int i = first; i < last; ++i) {
    const int64_t offset = source_offset(source, b, head, i) * bytes_of(kDtype);
    quantize_token<kStorage, kDtype>(task, b, head, row_of_new(task, b, i),
                                     static_cast<const uint8_t*>(source.data) + offset,
                                     source.stride_h * bytes_of(kDtype));
  }
}

// Quantises tokens of one sequence after their transform.
template <Storage kStorage>
void quantize_transformed(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  const int64_t stride = padded_row(task.side->head_dim) * static_cast<int64_t>(sizeof(float));
  for (int i = first; i < last; ++i) {
    const float* rows = transform_token(task, b, head, end_of_heads(task, head), i, scratch);
    quantize_token<kStorage, Dtype::fp32>(task, b, head, row_of_new(task, b, i), rows, stride);
  }
}

// Storage type none: copies values, rounded if the planes have another dtype.
void copy_tokens(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  const Side& side = *task.side;
  const Dense& source = *task.source;
  for (int i = first; i < last; ++i) {
    const int64_t target = row_of_new(task, b, i);
    const int64_t offset = source_offset(source, b, head, i);
    uint8_t* row = side.codes + b * side.codes_stride_b + head * side.codes_stride_h + target * side.codes_stride_t;
    if (task.transform != nullptr) {
      round_dense(transform_token(task, b, head, head + 1, i, scratch), side.head_dim, side.dense_dtype, row, 0);
      continue;
    }
    if (source.dtype == side.dense_dtype) {
      const int size = bytes_of(source.dtype);
      std::memcpy(row, static_cast<const uint8_t*>(source.data) + offset * size,
                  static_cast<size_t>(side.head_dim) * size);
      continue;
    }
    for (int c = 0; c < side.head_dim; c += 8) {
      float values[8];
      convert_dense(source.data, source.dtype, offset + c, 8, values);
      round_dense(values, 8, side.dense_dtype, row, c);
    }
  }
}

template <Storage kStorage>
void quantize_storage(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  if (task.transform != nullptr) return quantize_transformed<kStorage>(task, b, head, first, last, scratch);
  switch (task.source->dtype) {
    case Dtype::fp32:
      return quantize_tokens<kStorage, Dtype::fp32>(task, b, head, first, last);
    case Dtype::bf16:
      return quantize_tokens<kStorage, Dtype::bf16>(task, b, head, first, last);
    case Dtype::fp16:
      return quantize_tokens<kStorage, Dtype::fp16>(task, b, head, first, last);
  }
}

// --- a scale for every channel ----------------------------------------------------------------------------------------

// Quantises kWidth channels of a block of tokens: finds their scales and zeros, then their codes. `rows` are float32,
// `stride` numbers apart. Tokens below `first` are padding or sinks and get codes of 0.
void quantize_channels(const float* rows, int stride, int first, int channels, float clip_ratio, half_bits* scale,
                       half_bits* zero, uint8_t* codes, int64_t codes_stride) {
  Float high = broadcast(-kInfinity), low = broadcast(kInfinity), flaws = zeros();
  for (int t = first; t < kBlockSize; ++t) {
    const Float x = load(rows + t * stride);
    high = max_of(high, x);
    low = min_of(low, x);
    flaws = or_bits(flaws, sub(x, x));
  }
  if (first == kBlockSize) high = low = zeros();
  float spans[kWidth], lows[kWidth], is_flawed[kWidth], divisors[kWidth], offsets[kWidth];
  const Float span = sub(high, low), clipped = mul(span, broadcast(clip_ratio));
  store(spans, div(clipped, broadcast(15.0f)));
  store(lows, add(low, mul(sub(span, clipped), broadcast(0.5f))));
  store(is_flawed, flaws);
  for (int c = 0; c < channels; ++c) {
    half_bits s = float_to_half(spans[c]), z = float_to_half(lows[c]);
    if (is_flawed[c] != 0.0f || !is_finite_half(s) || !is_finite_half(z)) {
      s = z = kHalfNan;
    } else if (s == 0) {
      s = kMinScale;
    }
    scale[c] = s;
    zero[c] = z;
    // Codes must be 0 where there is no scale: x / infinity is, and multiplying by `has_scale` below makes sure.
    divisors[c] = s == kHalfNan ? kInfinity : half_to_float(s);
    offsets[c] = s == kHalfNan ? 0.0f : half_to_float(z);
    is_flawed[c] = s == kHalfNan ? 0.0f : 1.0f;
  }
  for (int c = channels; c < kWidth; ++c) divisors[c] = 1.0f, offsets[c] = is_flawed[c] = 0.0f;
  const Float divisor = load(divisors), offset = load(offsets), upper = broadcast(15.0f);
  const Float has_scale = load(is_flawed);
  for (int t = 0; t < kBlockSize; ++t) {
    uint8_t* row = codes + t * codes_stride;
    Float code = zeros();
    if (t >= first) {
      code = div(sub(load(rows + t * stride), offset), divisor);
      // Without a scale, `code` may be NaN here; max_of then returns 0.
      code = mul(round_even(min_of(max_of(code, zeros()), upper)), has_scale);
    }
    uint8_t bytes[kWidth];
    store_u4(channels == kWidth ? row : bytes, code);
    if (channels < kWidth) std::memcpy(row, bytes, channels / 2);
  }
}

// For granularity channel: quantises the blocks of one head that leave the residual window. Their older tokens are in
// the tail, which the new tokens have not been written to yet.
void quantize_blocks(const QuantizeTask& task, int b, int head, float* scratch) {
  const Side& side = *task.side;
  const Dense& source = *task.source;
  const int first_new = task.lengths[b] - task.q_len, stride = padded_row(side.head_dim);
  // In 64 bits: `starts` may be as large as an int can be, so adding sink_length could overflow it.
  const int64_t first_counted = (task.starts == nullptr ? int64_t{0} : task.starts[b]) + task.sink_length;
  const int end = tail_begin(side, task.lengths[b], task.residual_length);
  int begin = tail_begin(side, first_new, task.residual_length);
  if (task.is_ring) begin = max_of(begin, end - task.capacity);  // older blocks would be overwritten
  for (; begin < end; begin += kBlockSize) {
    for (int t = 0; t < kBlockSize; ++t) {
      float* row = scratch + t * stride;
      if (begin + t < first_new) {
        const int64_t ring_row = task.sink_length + (begin + t) % side.ring;
        convert_dense(side.tail, side.tail_dtype, b * side.tail_stride_b + head * side.tail_stride_h +
                                                      ring_row * side.tail_stride_t, side.head_dim, row);
      } else {
        convert_dense(source.data, source.dtype, source_offset(source, b, head, begin + t - first_new), side.head_dim,
                      row);
      }
      for (int c = side.head_dim; c < stride; ++c) row[c] = 0.0f;
    }
    const int target = row_of(begin, task.capacity, task.is_ring), block = target / kBlockSize;
    const int64_t left_out = first_counted - begin;
    const int first = left_out < 0 ? 0 : left_out < kBlockSize ? static_cast<int>(left_out) : kBlockSize;
    half_bits* scale = side.scale + b * side.scale_stride_b + head * side.scale_stride_h + block * side.scale_stride_g;
    half_bits* zero = side.zero + b * side.zero_stride_b + head * side.zero_stride_h + block * side.zero_stride_g;
    uint8_t* codes = side.codes + b * side.codes_stride_b + head * side.codes_stride_h + target * side.codes_stride_t;
    for (int c = 0; c < side.head_dim; c += kWidth) {
      quantize_channels(scratch + c, stride, first, min_of(kWidth, side.head_dim - c), side.clip_ratio, scale + c,
                        zero + c, codes + c / 2, side.codes_stride_t);
    }
  }
}

// Room for one transformed token of all heads that share a scale, or for a block of tokens.
int64_t quantize_scratch(const QuantizeTask& task) {
  if (task.side->has_channel_scales) return static_cast<int64_t>(kBlockSize) * padded_row(task.side->head_dim);
  return task.transform == nullptr ? 0 : static_cast<int64_t>(end_of_heads(task, 0)) * padded_row(task.side->head_dim);
}

void quantize(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  switch (task.side->storage) {
    case Storage::int8:
      return quantize_storage<Storage::int8>(task, b, head, first, last, scratch);
    case Storage::int4:
      return quantize_storage<Storage::int4>(task, b, head, first, last, scratch);
    case Storage::fp8:
      return quantize_storage<Storage::fp8>(task, b, head, first, last, scratch);
    case Storage::none:
      return copy_tokens(task, b, head, first, last, scratch);
  }
}

template <Dtype kDtype>
bool is_finite_dense(const QuantizeTask& task, int b, int head, int first, int last) {
  const Dense& source = *task.source;
  Float flaws = zeros();
  for (int i = first; i < last; ++i) {
    const void* row = static_cast<const uint8_t*>(source.data) + source_offset(source, b, head, i) * bytes_of(kDtype);
    for_channels<kDtype>(row, 0, task.side->head_dim, [&](Float x, int, int) { flaws = or_bits(flaws, sub(x, x)); });
  }
  return sum_of(flaws) == 0.0f;
}

bool is_finite(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  if (task.transform != nullptr) {
    const int size = padded_row(task.side->head_dim);
    Float flaws = zeros();
    for (int i = first; i < last; ++i) {
      const float* row = transform_token(task, b, head, head + 1, i, scratch);
      for (int c = 0; c < size; c += kWidth) flaws = or_bits(flaws, sub(load(row + c), load(row + c)));
    }
    return sum_of(flaws) == 0.0f;
  }
  switch (task.source->dtype) {
    case Dtype::fp32:
      return is_finite_dense<Dtype::fp32>(task, b, head, first, last);
    case Dtype::bf16:
      return is_finite_dense<Dtype::bf16>(task, b, head, first, last);
    case Dtype::fp16:
      break;
  }
  return is_finite_dense<Dtype::fp16>(task, b, head, first, last);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
