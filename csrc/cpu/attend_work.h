// What a task of attention works with: its query rows, the sides that it reads, and its scratch memory. attend.h runs
// the task; the kernels that attend_table.h chooses read and write the memory laid out here.
#pragma once

#include "codes.h"
#include "kernels.h"
#include "transform.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

// With 64 rows, dequantising a tile costs less than 3 % of their products, and their sums still fit L2.
constexpr int kMaxRows = 64;

// The tokens visible to a query row, and the state of its softmax.
struct Row {
  int head;        // query head
  int position;    // in the sequence
  int begin, end;  // visible tokens
  float max, sum;
  float rescale;  // multiplies the sums so far in the current tile
};

struct Work;
struct KeyKernel;
struct ValueKernel;

// Keys to multiply with the query rows: codes, or the dense rows of a tail.
struct Keys {
  const Side& side;
  const KeyKernel* kernel;
  float* query;  // [kMaxRows, key_stride], rows padded with zeros
};

// Values to add up, and their sums so far.
struct Values {
  const Side& side;
  const ValueKernel* kernel;
  Row* rows;
  float* out;  // [kMaxRows, stride]
  int stride;
};

// A tail as a side of storage type none, whose tokens are the rows of the tail.
inline Side tail_of(const Side& side) {
  const int size = bytes_of(side.tail_dtype);
  Side tail{};
  tail.storage = Storage::none;
  tail.dense_dtype = side.tail_dtype;
  tail.head_dim = side.head_dim;
  tail.num_groups = 1;
  tail.is_symmetric = true;
  tail.codes = static_cast<uint8_t*>(side.tail);
  tail.codes_stride_b = side.tail_stride_b * size;
  tail.codes_stride_h = side.tail_stride_h * size;
  tail.codes_stride_t = side.tail_stride_t * size;
  return tail;
}

// The codes of granularity channel. Scales and zeros of a block go into the query (scale_queries), which leaves
// symmetric codes without scales.
inline Side codes_of_blocks(const Side& side) {
  Side codes = side;
  codes.scale = codes.zero = nullptr;
  codes.is_symmetric = true;
  return codes;
}

// Sums of codes may be in another order, in whole blocks of this many channels; see attend_integer_values.h.
inline int sums_stride(const Side& side) {
  return round_up(side.head_dim, KVQ_WIDTH == 16 ? side.storage == Storage::int2 ? 256 : 128 : 16);
}

// Calls `use` with a storage type that integer kernels serve as a constant.
template <class Use>
inline void with_integers(Storage storage, Use use) {
  with_constant<Storage::int8, Storage::int4, Storage::int2>(storage, use);
}

// Scratch memory of one task. It depends on the call only, so that consecutive tasks find the queries of the last one.
struct Work {
  const DecodeParams& params;
  const AttendTask& task;
  int slot;  // the first index of the planes, of the tokens at hand
  int key_stride, value_stride;  // of rows of the query and of a tile: head_dim padded to whole vectors

  // Of the query rows, [kMaxRows, ...]: after the transform; as they came, for keys in a tail; times the scales of a
  // block of granularity channel. The first two share memory without a transform.
  float *query, *dense_query, *scaled_query;
  float* query_sums;  // [kMaxRows, num_groups], of `query` over each group
  // [kMaxRows]: logit = factor · (query · key) + constant. The constant comes from centred keys: softmax_scale · (query
  // · center); in block_constants also query · zero of a block.
  float *factors, *constants, *block_constants;
  float *key_scale, *key_zero, *value_scale, *value_zero;  // of one tile, [num_groups, kTile]
  float* scores;                                           // [kMaxRows, kTile], then probabilities
  float* tile;                                             // dequantised, [kTile, key_stride or value_stride]
  float* row_weights;                                      // [4, kTile], see attend_float.h
  float* saved_out;                                        // [4, value_stride], likewise
  float *out, *dense_out;  // sums of p · value of codes and of dense values, [kMaxRows, sums_stride or value_stride]
  void *query_sets, *query_memory, *integer_weights;  // see attend_integer_*.h

  // `integer_bytes`: memory for the last three.
  Work(const DecodeParams& params, const AttendTask& task, float* memory, const int64_t (&integer_bytes)[3])
      : params(params), task(task), slot(task.b) {
    const auto take = [&memory](int64_t count) {
      float* start = memory;
      // As integers, since `size` lays out memory that starts at address 0.
      const int64_t bytes = (count * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
      memory = reinterpret_cast<float*>(reinterpret_cast<intptr_t>(memory) + bytes);
      return start;
    };
    const Side &key = params.key_side, &value = values_of(params);
    key_stride = padded_row(key.head_dim);
    value_stride = padded_row(value.head_dim);
    const int64_t rows = kMaxRows, query_size = rows * key_stride;
    query = take(query_size);
    const bool has_other_query = key.tail != nullptr && !is_identity(params.key_transform);
    dense_query = has_other_query ? take(query_size) : query;
    scaled_query = take(key.has_channel_scales ? query_size : 0);
    query_sums = take(rows * key.num_groups);
    factors = take(rows);
    constants = take(rows);
    block_constants = take(rows);
    for (float** plane : {&key_scale, &key_zero}) *plane = take(static_cast<int64_t>(key.num_groups) * kTile);
    for (float** plane : {&value_scale, &value_zero}) *plane = take(static_cast<int64_t>(value.num_groups) * kTile);
    query_sets = take(integer_bytes[0] / 4);
    query_memory = take(integer_bytes[1] / 4);
    integer_weights = take(integer_bytes[2] / 4);
    scores = take(rows * kTile);
    tile = take(static_cast<int64_t>(kTile) * max_of(key_stride, value_stride));
    row_weights = take(4 * kTile);
    saved_out = take(static_cast<int64_t>(4) * value_stride);
    out = take(rows * sums_stride(value));
    dense_out = take(rows * value_stride);
    size = reinterpret_cast<intptr_t>(memory) / static_cast<int64_t>(sizeof(float));
  }

  int64_t size;  // floats, if the memory starts at address 0
};

// Covers all rows by calls of kernel<4>, kernel<2> and kernel<1>.
template <class Kernel>
inline void for_row_blocks(int num_rows, Kernel kernel) {
  int r = 0;
  for (; r + 4 <= num_rows; r += 4) kernel(std::integral_constant<int, 4>(), r);
  if (r + 2 <= num_rows) {
    kernel(std::integral_constant<int, 2>(), r);
    r += 2;
  }
  if (r < num_rows) kernel(std::integral_constant<int, 1>(), r);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
