// Transforms keys before they are quantised, and queries to match: one float32 row at a time, bit for bit as
// reference.transform_key and transform_query do it. So nothing here may be contracted into a multiply-add; only the
// constant of a query is a sum whose order is free. quantize.h transforms keys, attend.h queries (once per task,
// outside the loop over tokens).
#pragma once

#include "simd.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

// Rows are padded with zeros to whole vectors; every step here keeps the padding zero.
inline int padded_row(int head_dim) { return round_up(head_dim, 16); }

// row[c] = op(row[c], plane[c]) for the channels of a head; planes are not padded.
template <class Op>
inline void combine_row(float* row, const float* plane, int head_dim, Op op) {
  int c = 0;
  for (; c + kWidth <= head_dim; c += kWidth) store(row + c, op(load(row + c), load(plane + c)));
  if (c < head_dim) {
    float rest[kWidth], values[kWidth];
    store(rest, broadcast(1.0f));
    std::memcpy(rest, plane + c, sizeof(float) * (head_dim - c));
    store(values, op(load(row + c), load(rest)));
    std::memcpy(row + c, values, sizeof(float) * (head_dim - c));
  }
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
        store(row + c, add(a, b));
        store(row + c + stride, sub(a, b));
      }
    }
  }
  const Float factor = broadcast(static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))));
  for (int c = 0; c < size; c += kWidth) store(row + c, mul(load(row + c), factor));
}

// A key of head `head`, in place.
inline void transform_key_row(const KeyTransform& transform, int head, int head_dim, float* row) {
  const int64_t offset = static_cast<int64_t>(head) * head_dim;
  if (transform.center != nullptr) {
    combine_row(row, transform.center + offset, head_dim, [](Float x, Float center) { return sub(x, center); });
  }
  if (transform.smoothing != nullptr) {
    const Float one = broadcast(1.0f);
    combine_row(row, transform.smoothing + offset, head_dim,
                [one](Float x, Float smoothing) { return mul(x, div(one, smoothing)); });
  }
  if (transform.is_rotated) rotate_row(row, head_dim);
}

// A query for kv head `head`, in place. Returns query · center, which its scores with centred keys lack.
inline float transform_query_row(const KeyTransform& transform, int head, int head_dim, float* row) {
  const int64_t offset = static_cast<int64_t>(head) * head_dim;
  float constant = 0.0f;
  if (transform.center != nullptr) {
    const float* center = transform.center + offset;
    Float sums = zeros();
    int c = 0;
    for (; c + kWidth <= head_dim; c += kWidth) sums = fma(load(row + c), load(center + c), sums);
    constant = sum_of(sums);
    for (; c < head_dim; ++c) constant += row[c] * center[c];
  }
  if (transform.smoothing != nullptr) {
    combine_row(row, transform.smoothing + offset, head_dim, [](Float x, Float smoothing) { return mul(x, smoothing); });
  }
  if (transform.is_rotated) rotate_row(row, head_dim);
  return constant;
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
