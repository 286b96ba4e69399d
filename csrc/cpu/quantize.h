// Quantises new tokens into codes, scales and zeros, bit for bit as reference.append does; cpu.cpp copies those that stay
// dense. Keys with a transform are first transformed in scratch memory. Each scale then takes two passes over the values
// that share it: one finds their range, one divides. Nothing is contracted or multiplied by a reciprocal: x - zero, the
// division and the rounding are each one float32 operation, as in the reference.
//
// Minimum and maximum drop a NaN. So the first pass also checks that all values are finite: if one is not, the scale is
// NaN.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "transform.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int16_t kHalfNan = 0x7E00;
constexpr int16_t kMinScale = 1;  // 2^-24

// Quotients are clamped to low ... high; integers are stored plus `offset`.
struct Levels {
  float low, high;
  int offset;
};

constexpr Levels levels_of(Storage storage, bool is_symmetric) {
  const float high = max_code(storage, is_symmetric);
  return {is_symmetric ? -high : 0.0f, high, static_cast<int>(code_offset(storage, is_symmetric))};
}

// The smallest and largest of some values, lane by lane, and whether all are finite.
struct Range {
  Float high = broadcast(-kInfinity), low = broadcast(kInfinity), flaws = zeros();

  void include(Float x) {
    high = max_of(high, x);
    low = min_of(low, x);
    check_finite(x, flaws);
  }
};

// As stored: float16 bits of one scale, or of a vector of them.
template <class Bits>
struct Scales {
  Bits scale, zero;
};

// Of a range, or of several in a vector. Both are NaN if a value is not finite, which makes `flaws` NaN, or if one of
// them is too large for float16.
template <Storage kStorage, bool kIsSymmetric, class Number>
inline auto find_scales(Number high, Number low, Number flaws, float clip_ratio) {
  using Bits = decltype(to_halves(high));
  constexpr float kHigh = levels_of(kStorage, kIsSymmetric).high;
  const Number span = kIsSymmetric ? max_of(abs_of(high), abs_of(low)) : high - low, clipped = span * clip_ratio;
  const Bits scale = to_halves(clipped / kHigh - flaws);
  const Bits zero = kIsSymmetric ? Bits{} : to_halves(low + (span - clipped) * 0.5f);
  const auto is_flawed = ((scale & 0x7C00) == 0x7C00) | ((zero & 0x7C00) == 0x7C00);
  const Bits nan = Bits{} + kHalfNan, smallest = Bits{} + kMinScale;
  return Scales<Bits>{is_flawed ? nan : scale == 0 ? smallest : scale, is_flawed ? nan : zero};
}

// Writes the codes of `kCount` channels from channel c on.
template <Storage kStorage, bool kIsSymmetric, int kCount>
inline void store_codes(Float x, Float divisor, Float zero, uint8_t* row, int c) {
  constexpr Levels kLevels = levels_of(kStorage, kIsSymmetric);
  const Float quotients = (kIsSymmetric ? x : x - zero) / divisor;
  const Float clamped = min_of(max_of(quotients, broadcast(kLevels.low)), broadcast(kLevels.high));
  Codes<kStorage>::template store_at<kCount>(row, c, clamped, kLevels.offset);
}

// The end of the heads that are quantised together from `head` on, because they share a scale.
inline int end_of_heads(const QuantizeTask& task, int head) {
  return task.side->storage != Storage::none && task.side->is_shared_by_heads ? task.cache->num_kv_heads : head + 1;
}

// Where the row of new token `i` starts in the source, in elements.
inline int64_t source_offset(const Dense& source, int b, int head, int i) {
  return b * source.stride_b + head * source.stride_h + i * source.stride_t;
}

// Where new token `i` is written to.
inline Place place_of_new(const QuantizeTask& task, int b, int i) {
  return place_of(*task.cache, b, task.cache->lengths[b] - task.cache->q_len + i);
}

// New token `i`, transformed, in float32: the rows of heads `head` ... `head_end` - 1, one after the other.
void load_token(const QuantizeTask& task, int b, int head, int head_end, int i, float* rows) {
  const int head_dim = task.side->head_dim;
  for (int h = head; h < head_end; ++h, rows += padded_row(head_dim)) {
    load_row(*task.source, source_offset(*task.source, b, h, i), head_dim, rows);
    if (task.transform != nullptr) transform_key_row(*task.transform, h, head_dim, rows);
  }
}

// Quantises a token of one head, or of all heads that share a scale. `stride` of `rows` is in bytes.
template <Storage kStorage, Dtype kDtype, bool kIsSymmetric>
void quantize_token(const QuantizeTask& task, Place place, int head, const uint8_t* rows, int64_t stride) {
  const Side& side = *task.side;
  const int group_size = side.head_dim / side.num_groups, head_end = end_of_heads(task, head);
  for (int g = 0; g < side.num_groups; ++g) {
    const int begin = g * group_size, end = begin + group_size;
    half_bits* scale = scales_of(side, place.slot, head).at(g, place.row);
    half_bits* zero = kIsSymmetric ? nullptr : zeros_of(side, place.slot, head).at(g, place.row);
    Scales<int16_t> found;
    if (side.is_frozen) {
      found = {static_cast<int16_t>(*scale), kIsSymmetric ? int16_t{0} : static_cast<int16_t>(*zero)};
    } else {
      Range range;
      for (int h = head; h < head_end; ++h) {
        for_vectors(begin, end, [&](int c, auto size) {
          const Float x = load_dense<kDtype, size>(rows + (h - head) * stride, c);
          // Half a vector is repeated, which changes no minimum, maximum or check.
          range.include(size == kWidth ? x : blend_lanes<size % kWidth>(x, swap_lanes<size % kWidth>(x)));
        });
      }
      found = find_scales<kStorage, kIsSymmetric>(largest_of(range.high), smallest_of(range.low), sum_of(range.flaws),
                                                  side.clip_ratio);
      *scale = static_cast<half_bits>(found.scale);
      if (!kIsSymmetric) *zero = static_cast<half_bits>(found.zero);
    }
    const float divisor = half_to_float(found.scale), offset = kIsSymmetric ? 0.0f : half_to_float(found.zero);
    for (int h = head; h < head_end; ++h) {
      uint8_t* row = codes_of(side, place.slot, h, place.row);
      if (divisor != divisor) {  // codes are 0 where there is no scale
        using Kind = Codes<kStorage>;
        std::memset(row + Kind::bytes_of_channels(begin), 0, Kind::bytes_of_channels(group_size));
        continue;
      }
      for_vectors(begin, end, [&](int c, auto size) {
        const Float x = load_dense<kDtype, size>(rows + (h - head) * stride, c);
        store_codes<kStorage, kIsSymmetric, size>(x, broadcast(divisor), broadcast(offset), row, c);
      });
    }
  }
}

template <Storage kStorage, Dtype kDtype, bool kIsSymmetric>
void quantize_tokens(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  const Dense& source = *task.source;
  const int size = bytes_of(source.dtype);
  for (int i = first; i < last; ++i) {
    const auto* rows = static_cast<const uint8_t*>(source.data) + source_offset(source, b, head, i) * size;
    int64_t stride = source.stride_h * size;
    if (task.transform != nullptr) {
      load_token(task, b, head, end_of_heads(task, head), i, scratch);
      rows = reinterpret_cast<const uint8_t*>(scratch);
      stride = padded_row(task.side->head_dim) * static_cast<int64_t>(sizeof(float));
    }
    quantize_token<kStorage, kDtype, kIsSymmetric>(task, place_of_new(task, b, i), head, rows, stride);
  }
}

// Storage type none: copies a token, rounded if the planes have another dtype.
void copy_token(const QuantizeTask& task, int b, int head, int i, uint8_t* row, float* scratch) {
  const Side& side = *task.side;
  const Dense& source = *task.source;
  if (task.transform == nullptr && source.dtype == side.dense_dtype) {
    const int size = bytes_of(source.dtype);
    std::memcpy(row, static_cast<const uint8_t*>(source.data) + source_offset(source, b, head, i) * size,
                static_cast<size_t>(side.head_dim) * size);
    return;
  }
  load_token(task, b, head, head + 1, i, scratch);
  round_dense(scratch, side.head_dim, side.dense_dtype, row, 0);
}

void quantize(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  const Side& side = *task.side;
  for (int i = first; side.storage == Storage::none && i < last; ++i) {
    const Place place = place_of_new(task, b, i);
    copy_token(task, b, head, i, codes_of(side, place.slot, head, place.row), scratch);
  }
  with_storage(side.storage, [&](auto storage) {
    with_dtype(task.transform == nullptr ? task.source->dtype : Dtype::fp32, [&](auto dtype) {
      with_constant<true, false>(side.is_symmetric, [&](auto is_symmetric) {
        quantize_tokens<storage, dtype, is_symmetric>(task, b, head, first, last, scratch);
      });
    });
  });
}

bool is_finite(const QuantizeTask& task, int b, int head, int first, int last, float* scratch) {
  Float flaws = zeros();
  for (int i = first; i < last; ++i) {
    load_token(task, b, head, head + 1, i, scratch);
    for (int c = 0; c < padded_row(task.side->head_dim); c += kWidth) check_finite(load(scratch + c), flaws);
  }
  return is_finite(flaws);
}

// --- a scale for every channel ----------------------------------------------------------------------------------------

// Quantises kCount channels of a block of tokens: finds their scales and zeros, then their codes. `rows` are float32,
// `stride` numbers apart. Tokens below `first` are padding or sinks and get codes of 0.
template <int kCount>
void quantize_channels(const Side& side, const float* rows, int stride, int first, half_bits* scale, half_bits* zero,
                       uint8_t* codes) {
  Range range;
  for (int t = first; t < kBlockSize; ++t) range.include(load(rows + t * stride));
  if (first == kBlockSize) range.include(zeros());
  const auto found = find_scales<Storage::int4, false>(range.high, range.low, range.flaws, side.clip_ratio);
  store_part<kCount>(scale, found.scale);
  store_part<kCount>(zero, found.zero);
  const Float divisor = of_halves(found.scale), offset = of_halves(found.zero);
  for (int t = 0; t < kBlockSize; ++t) {
    // Where there is no scale, the quotient is NaN, which becomes code 0.
    const Float x = t < first ? offset : load(rows + t * stride);
    store_codes<Storage::int4, false, kCount>(x, divisor, offset, codes + t * side.codes_stride_t, 0);
  }
}

// For granularity channel: quantises the blocks of one head that leave the residual window. Their older tokens are in
// the tail, which the new tokens have not been written to yet.
void quantize_blocks(const QuantizeTask& task, int b, int head, float* scratch) {
  const Side& side = *task.side;
  const CacheParams& cache = *task.cache;
  const Dense tail = {side.tail, side.tail_dtype, side.tail_stride_b, side.tail_stride_h, side.tail_stride_t};
  const int first_new = cache.lengths[b] - cache.q_len, stride = padded_row(side.head_dim);
  // In 64 bits: `starts` may be as large as an int can be, so adding sink_length could overflow it.
  const int64_t first_counted = (cache.starts == nullptr ? int64_t{0} : cache.starts[b]) + cache.sink_length;
  const int tail_from = tail_from_of(cache, b);
  const int end = tail_begin(side, cache.lengths[b], cache.residual_length, tail_from);
  int begin = tail_begin(side, first_new, cache.residual_length, tail_from);
  if (cache.is_ring) begin = max_of(begin, end - cache.capacity);  // older blocks would be overwritten
  for (; begin < end; begin += kBlockSize) {
    for (int t = 0; t < kBlockSize; ++t) {
      const int token = begin + t;
      const Dense& source = token < first_new ? tail : *task.source;
      const int row = token < first_new ? cache.sink_length + token % side.ring : token - first_new;
      const int slot = token < first_new ? tail_slot_of(cache, b) : b;
      load_row(source, source_offset(source, slot, head, row), side.head_dim, scratch + t * stride);
      if (task.transform != nullptr) transform_key_row(*task.transform, head, side.head_dim, scratch + t * stride);
    }
    const Place place = place_of(cache, b, begin);
    const int block = place.row / kBlockSize;
    const int64_t left_out = first_counted - begin;
    const int first = left_out < 0 ? 0 : left_out < kBlockSize ? static_cast<int>(left_out) : kBlockSize;
    half_bits* scale = scales_of(side, place.slot, head).at(block, 0);
    half_bits* zero = zeros_of(side, place.slot, head).at(block, 0);
    for_vectors(0, side.head_dim, [&](int c, auto size) {
      quantize_channels<size>(side, scratch + c, stride, first, scale + c, zero + c,
                              codes_of(side, place.slot, head, place.row) + c / 2);
    });
  }
}

// Room for one token of all heads that share a scale, or for a block of tokens.
int64_t quantize_scratch(const QuantizeTask& task) {
  const int64_t num_rows = task.side->has_channel_scales ? kBlockSize : end_of_heads(task, 0);
  return num_rows * padded_row(task.side->head_dim);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
