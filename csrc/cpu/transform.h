// Transforms keys before they are quantised, and queries to match: subtracts the center, smooths, rotates. Works on one
// float32 row at a time, bit for bit as reference.transform_key and transform_query do. So nothing here may be
// contracted into a multiply-add; only the constant of a query is a sum whose order is free. quantize.h transforms
// keys, attend.h queries (once per task, outside the loop over tokens).
#pragma once

#include "simd.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

// Rows are padded with zeros to whole vectors; every step here keeps the padding zero.
inline int padded_row(int head_dim) { return round_up(head_dim, 16); }

// One row as float32, padded.
inline void load_row(const Dense& source, int64_t offset, int head_dim, float* row) {
  with_dtype(source.dtype, [&](auto dtype) {
    for_vectors(0, head_dim, [&](int c, auto size) {
      store_part<size>(row + c, load_dense<dtype, size>(source.data, offset + c));
    });
  });
  for (int c = head_dim; c < padded_row(head_dim); ++c) row[c] = 0.0f;
}

// row[c] = op(row[c], plane[c]) for the channels of a head; planes are not padded.
template <class Op>
inline void combine_row(float* row, const float* plane, int head_dim, Op op) {
  for_vectors(0, head_dim, [&](int c, auto size) {
    store_part<size>(row + c, op(load_part<size>(row + c), load_part<size>(plane + c)));
  });
}

// Multiplies by a normalised Hadamard matrix over blocks of rotation_block(head_dim) channels.
inline void rotate_row(float* row, int head_dim) {
  const int block = rotation_block(head_dim), size = padded_row(head_dim);
  for (int c = 0; c < size; c += kWidth) {
    Float x = butterfly<2>(butterfly<1>(load(row + c)));
    if constexpr (kWidth >= 8) x = butterfly<4>(x);
    if constexpr (kWidth >= 16) {
      if (block >= 16) x = butterfly<8>(x);
    }
    store(row + c, x);
  }
  for (int stride = kWidth; stride < block; stride *= 2) {
    for (int first = 0; first < head_dim; first += 2 * stride) {
      for (int c = first; c < first + stride; c += kWidth) {
        const Float a = load(row + c), b = load(row + c + stride);
        store(row + c, a + b);
        store(row + c + stride, a - b);
      }
    }
  }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int c = 0; c < size; c += kWidth) store(row + c, load(row + c) * factor);
}

// A key of head `head`, in place.
inline void transform_key_row(const KeyTransform& transform, int head, int head_dim, float* row) {
  const int64_t offset = static_cast<int64_t>(head) * head_dim;
  if (transform.center != nullptr) {
    combine_row(row, transform.center + offset, head_dim, [](Float x, Float center) { return x - center; });
  }
  if (transform.smoothing != nullptr) {
    combine_row(row, transform.smoothing + offset, head_dim,
                [](Float x, Float smoothing) { return x * (1.0f / smoothing); });
  }
  if (transform.is_rotated) rotate_row(row, head_dim);
}

// A query for kv head `head`, in place. Returns query · center, which its scores with centred keys lack.
inline float transform_query_row(const KeyTransform& transform, int head, int head_dim, float* row) {
  const int64_t offset = static_cast<int64_t>(head) * head_dim;
  Float constants = zeros();
  if (transform.center != nullptr) {
    for_vectors(0, head_dim, [&](int c, auto size) {
      constants = fma(load_part<size>(row + c), load_part<size>(transform.center + offset + c), constants);
    });
  }
  if (transform.smoothing != nullptr) {
    combine_row(row, transform.smoothing + offset, head_dim, [](Float x, Float smoothing) { return x * smoothing; });
  }
  if (transform.is_rotated) rotate_row(row, head_dim);
  return sum_of(constants);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
