// Attention of a block of query rows to a range of tokens, in tiles of 64 tokens: scores, softmax with a running
// maximum, values. Written once with simd.h and compiled for each instruction set; serves every format, mask and option
// of reference.decode_attention. Tiles are dequantised to float32 in scratch memory that stays in L1 and L2 and is
// shared by all rows. There are two faster ways to compute the same two products, for some cases: attend_direct.h
// unpacks codes in registers for few rows, attend_vnni.h multiplies integers. cpu.cpp divides rows and tokens into
// tasks.
//
// Masking. A masked score is set to -inf before the maximum is taken, so neither its size nor a NaN in it has any
// effect. Values are summed as p · value over the tile, so a value that is not finite would also reach rows with p = 0.
// Such elements are replaced by 0 in the tile, and the sums of the rows that see their token are set to NaN (`poison`).
#pragma once

#include "attend_direct.h"
#include "dequantize.h"
#include "kernels.h"
#include "transform.h"

#if KVQ_USE_AVX512
#include "attend_vnni.h"
#endif

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

// With 64 rows, dequantising a tile costs less than 3 % of their products, and their sums still fit L2.
constexpr int kMaxRows = 64;

// The scratch memory of one call of attend. Rows of channels are padded with zeros to whole vectors.
struct Workspace {
  int key_stride, value_stride;
  float *query, *key, *value, *scores, *out, *scale_row, *zero_row;

  // Scales and zeros of one tile, [num_groups, kTile]. query_sums: of the query over each group, [kMaxRows, num_groups
  // of keys]. query_constants: softmax_scale · (query · center), [kMaxRows]. query_factors: multiply scores of the
  // query as it is stored here, [kMaxRows].
  float *key_scale, *key_zero, *value_scale, *value_zero, *query_sums, *query_constants, *query_factors;
  // For four rows: scores before scales, or p · scale, [4, kTile]; p · value of one tile, [4, value_stride].
  float *raw_scores, *tile_out;
  // For granularity channel. scaled_query: query · scale of one block, [kMaxRows, key_stride]. scaled_constants: query
  // · zero of that block, the zeros those of centred codes, [kMaxRows]. block_scores: of tokens in another block than
  // the first token of the tile, [kMaxRows, kTile]. scaled_block: which block that is, -1: none, [1].
  float *scaled_query, *scaled_constants, *block_scores;
  int32_t* scaled_block;
  // For tokens in a tail: queries before the transform, [kMaxRows, key_stride], the same memory as `query` if keys are
  // not transformed; sums of p · value, [kMaxRows, dense_value_stride], apart from those of codes, which may be in
  // another order.
  float *dense_query, *dense_out;
  int dense_value_stride;
#if KVQ_USE_AVX512
  bool has_integer_keys, has_integer_values;
  QuerySet* query_sets;  // [kMaxRows / 4]
  uint8_t *query_memory, *weights;
#endif

  static int64_t size(const DecodeParams& params) {
    return reinterpret_cast<intptr_t>(Workspace(params, 1, nullptr).end) / sizeof(float);
  }

  Workspace(const DecodeParams& params, [[maybe_unused]] int num_rows, float* memory) {
    const auto take = [&memory](int64_t count) {
      float* start = memory;
      // As integers, since `size` lays out a workspace that starts at address 0.
      memory = reinterpret_cast<float*>(reinterpret_cast<intptr_t>(memory) + round_up_bytes(count * sizeof(float)));
      return start;
    };
    const Side &key_side = params.key_side, &value_side = params.value_side;
    key_stride = round_up(key_side.head_dim, 16);
    value_stride = dense_value_stride = round_up(value_side.head_dim, 16);
#if KVQ_USE_AVX512
    // Float32 queries take twice as many integer products, and groups need separate weights for every row, so with many
    // rows it is cheaper to dequantise once (64 queries of 32 heads, int8, 4096 tokens: 50 ms instead of 64 in float32,
    // but 52 instead of 36 in bfloat16; one core, Zen 4).
    const auto pays = [&](const Side& side) {
      return num_rows <= 8 || (params.query.dtype != Dtype::fp32 && side.num_groups == 1);
    };
    // In granularity channel, queries are put into fixed point for each block, with whole vectors of scales.
    const bool has_vectors = !key_side.has_channel_scales || key_side.head_dim % 16 == 0;
    has_integer_keys = pays(key_side) && serves_keys(key_side) && has_vectors;
    has_integer_values = pays(value_side) && serves_values(value_side);
    if (has_integer_values) value_stride = num_blocks_of(value_side) * 16 * channels_per_lane(value_side);
    query_sets = reinterpret_cast<QuerySet*>(take(kMaxRows / 4 * sizeof(QuerySet) / sizeof(float)));
    query_memory = reinterpret_cast<uint8_t*>(take(kMaxRows / 4 * query_set_bytes(key_side) / 4));
    weights = reinterpret_cast<uint8_t*>(take(weights_bytes(value_side) / 4));
#endif
    key_scale = take(static_cast<int64_t>(key_side.num_groups) * kTile);
    key_zero = take(static_cast<int64_t>(key_side.num_groups) * kTile);
    value_scale = take(static_cast<int64_t>(value_side.num_groups) * kTile);
    value_zero = take(static_cast<int64_t>(value_side.num_groups) * kTile);
    query_sums = take(static_cast<int64_t>(kMaxRows) * key_side.num_groups);
    query_constants = take(kMaxRows);
    query_factors = take(kMaxRows);
    raw_scores = take(4 * kTile);
    tile_out = take(4 * static_cast<int64_t>(value_stride));
    query = take(static_cast<int64_t>(kMaxRows) * key_stride);
    key = take(static_cast<int64_t>(kTile) * key_stride);
    value = take(static_cast<int64_t>(kTile) * value_stride);
    scores = take(kMaxRows * kTile);
    scaled_query = take(key_side.has_channel_scales ? static_cast<int64_t>(kMaxRows) * key_stride : 0);
    scaled_constants = take(kMaxRows);
    scaled_block = reinterpret_cast<int32_t*>(take(1));
    block_scores = take(key_side.has_channel_scales ? kMaxRows * kTile : 0);
    const bool has_other_query = key_side.tail != nullptr && !is_identity(params.key_transform);
    dense_query = has_other_query ? take(static_cast<int64_t>(kMaxRows) * key_stride) : query;
    dense_out = take(value_side.tail == nullptr ? 0 : static_cast<int64_t>(kMaxRows) * dense_value_stride);
    out = take(static_cast<int64_t>(kMaxRows) * value_stride);
    scale_row = take(key_stride + value_stride);
    zero_row = take(key_stride + value_stride);
    end = memory;
  }

  // The same memory for tokens in a tail.
  Workspace for_tail() const {
    Workspace other = *this;
    other.query = dense_query;
    other.out = dense_out;
    other.value_stride = dense_value_stride;
#if KVQ_USE_AVX512
    other.has_integer_values = false;
#endif
    return other;
  }

 private:
  float* end;

  static int64_t round_up_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

// The tokens visible to a row, and the state of its softmax.
struct Row {
  int head;        // query head
  int position;    // in the sequence
  int begin, end;  // visible tokens
  float max, sum;
  float rescale;  // multiplies the sums so far in the current tile
  float factor;    // multiplies scores: softmax_scale, times the divisor of the stored query
  float constant;  // added to factor · score
};

// --- inner products --------------------------------------------------------------------------------------------------

// query · key of kRows rows and `count` tokens. kWidth sums are kept at a time and added across lanes together. With 4
// rows and AVX-512 these are 4 tokens, so each load of either side feeds 4 multiply-adds.
template <int kRows>
void score_rows(const float* query, const float* key, int stride, int count, float* scores) {
  constexpr int kTokens = kWidth / kRows;
  for (int t = 0; t < count; t += kTokens) {
    Float sums[kWidth];
    for (int i = 0; i < kWidth; ++i) sums[i] = zeros();
    for (int c = 0; c < stride; c += kWidth) {
      Float keys[kTokens];
      for (int n = 0; n < kTokens; ++n) keys[n] = load(key + (t + n) * stride + c);
      for (int r = 0; r < kRows; ++r) {
        const Float q = load(query + r * stride + c);
        for (int n = 0; n < kTokens; ++n) sums[r * kTokens + n] = fma(q, keys[n], sums[r * kTokens + n]);
      }
    }
    float totals[kWidth];
    store(totals, sum_each(sums));
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kTile + t, totals + r * kTokens, sizeof(float) * kTokens);
  }
}

// out = out · rescale + p · value for kRows rows and kVectors vectors of channels.
template <int kRows, int kVectors>
inline void add_values_block(const float* p, const float* value, int stride, int count, const Row* rows, float* out) {
  Float sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    const Float rescale = broadcast(rows[r].rescale);
    for (int v = 0; v < kVectors; ++v) sums[r][v] = mul(load(out + r * stride + v * kWidth), rescale);
  }
  for (int t = 0; t < count; ++t) {
    Float values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = load(value + t * stride + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const Float weight = broadcast(p[r * kTile + t]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, values[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(out + r * stride + v * kWidth, sums[r][v]);
  }
}

template <int kRows>
void add_values(const float* p, const float* value, int stride, int count, const Row* rows, float* out) {
  int c = 0;
  for (; c + kValueVectors * kWidth <= stride; c += kValueVectors * kWidth) {
    add_values_block<kRows, kValueVectors>(p, value + c, stride, count, rows, out + c);
  }
  for (; c < stride; c += kWidth) add_values_block<kRows, 1>(p, value + c, stride, count, rows, out + c);
}

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

// --- softmax ---------------------------------------------------------------------------------------------------------

// Turns the scores of one row and tile into probabilities in place, 0 from `count` to the end of the tile, and updates
// the row's maximum and sum. Scores past `count` may be anything.
void softmax_row(const DecodeParams& params, Row& row, int begin, int count, float* scores) {
  constexpr int kVectors = kTile / kWidth;
  Float x[kVectors];
  const Float factor = broadcast(row.factor), constant = broadcast(row.constant);
  for (int i = 0; i < kVectors; ++i) x[i] = fma(load(scores + i * kWidth), factor, constant);
  if (params.softcap > 0.0f) {
    const Float softcap = broadcast(params.softcap);
    for (int i = 0; i < kVectors; ++i) x[i] = mul(softcap, tanh_of(div(x[i], softcap)));
  }
  const int first = max_of(row.begin - begin, 0), last = min_of(row.end - begin, count);
  if (params.alibi_slopes != nullptr || first > 0 || last < kTile) {
    const float slope = params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[row.head];
    for (int i = 0; i < kVectors; ++i) store(scores + i * kWidth, x[i]);
    for (int t = 0; t < kTile; ++t) {
      const bool is_visible = first <= t && t < last;
      scores[t] = is_visible ? scores[t] + slope * static_cast<float>(begin + t - row.position) : -kInfinity;
    }
    for (int i = 0; i < kVectors; ++i) x[i] = load(scores + i * kWidth);
  }
  Float largest = broadcast(row.max);
  for (int i = 0; i < kVectors; ++i) largest = max_of(x[i], largest);
  const float max = largest_of(largest);
  // Before any score above -inf, 0 stands in for the maximum: e^(-inf - 0) is 0, and NaN stays NaN.
  const float base = max == -kInfinity ? 0.0f : max;
  row.rescale = 1.0f;
  if (row.max != max) {
    float rescales[kWidth];
    store(rescales, exp_of(broadcast(row.max - base)));
    row.rescale = rescales[0];
    row.max = max;
  }
  const Float bases = broadcast(base);
  Float sum = zeros();
  for (int i = 0; i < kVectors; ++i) {
    const Float p = exp_of(sub(x[i], bases));
    store(scores + i * kWidth, p);
    sum = add(sum, p);
  }
  row.sum = row.sum * row.rescale + sum_of(sum);
}

// Replaces values that are not finite by 0 and makes the sums of the rows that see them NaN, channel by channel. The
// tile is in natural channel order; in the sums, channel c is at place(c).
template <class Place>
void poison(const Workspace& work, int head_dim, int begin, int count, const Row* rows, int num_rows, Place place) {
  for (int t = 0; t < count; ++t) {
    float* value = work.value + t * work.value_stride;
    for (int c = 0; c < head_dim; ++c) {
      if (value[c] - value[c] == 0.0f) continue;
      value[c] = 0.0f;
      for (int r = 0; r < num_rows; ++r) {
        const bool is_visible = rows[r].begin <= begin + t && begin + t < rows[r].end;
        if (is_visible) work.out[r * work.value_stride + place(c)] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

// Whether the products of a side are computed directly from its codes (attend_direct.h). This needs whole vectors, one
// scale per token, and few rows, since every four rows unpack the codes again.
inline bool is_direct(const Side& side, int num_rows) {
  return num_rows <= 8 && side.num_groups == 1 && side.head_dim % kWidth == 0;
}

// --- the loop --------------------------------------------------------------------------------------------------------

Row make_row(const DecodeParams& params, const AttendTask& task, int r) {
  const int num_q_per_kv = params.num_q_heads / params.num_kv_heads;
  const int index = task.first_row + r;
  Row row;
  row.head = task.kv_head * num_q_per_kv + index % num_q_per_kv;
  row.position = params.lengths[task.b] - params.q_len + index / num_q_per_kv;
  row.begin = params.starts == nullptr ? 0 : params.starts[task.b];
  if (params.sliding_window > 0) row.begin = max_of(row.begin, row.position - params.sliding_window + 1);
  row.begin = max_of(row.begin, 0);
  row.end = row.position + 1;
  row.max = -kInfinity;
  row.sum = 0.0f;
  row.rescale = 1.0f;
  row.factor = params.softmax_scale;
  row.constant = 0.0f;
  return row;
}

void load_query(const DecodeParams& params, const AttendTask& task, const Row& row, int r, const Workspace& work) {
  const int i = (task.first_row + r) / (params.num_q_heads / params.num_kv_heads);
  const Dense& query = params.query;
  const int64_t offset = task.b * query.stride_b + row.head * query.stride_h + i * query.stride_t;
  float* result = work.query + r * work.key_stride;
  convert_dense(query.data, query.dtype, offset, params.key_side.head_dim, result);
  for (int c = params.key_side.head_dim; c < work.key_stride; ++c) result[c] = 0.0f;
  if (work.dense_query != work.query) {
    std::memcpy(work.dense_query + r * work.key_stride, result, sizeof(float) * work.key_stride);
  }
  work.query_constants[r] = params.softmax_scale * transform_query_row(params.key_transform, task.kv_head,
                                                                       params.key_side.head_dim, result);
  // Codes are multiplied before their scale makes them small, and they add up to as much as 2^16: for a query near the
  // end of the float32 range the sum would overflow, though the logit would not. So such a query is divided first. An
  // infinity stays one.
  constexpr float kHuge = 0x1p96f, kDivisor = 0x1p64f;
  Float sizes = zeros();
  for (int c = 0; c < work.key_stride; c += kWidth) sizes = max_of(abs_of(load(result + c)), sizes);
  const bool is_huge = largest_of(sizes) > kHuge;
  work.query_factors[r] = is_huge ? params.softmax_scale * kDivisor : params.softmax_scale;
  if (is_huge) {
    for (int c = 0; c < work.key_stride; ++c) result[c] /= kDivisor;
    float* dense = work.dense_query + r * work.key_stride;
    for (int c = 0; c < work.key_stride && dense != result; ++c) dense[c] /= kDivisor;
  }
  const int group_size = params.key_side.head_dim / params.key_side.num_groups;
  for (int g = 0; g < params.key_side.num_groups; ++g) {
    float sum = 0.0f;
    for (int c = g * group_size; c < (g + 1) * group_size; ++c) sum += result[c];
    work.query_sums[r * params.key_side.num_groups + g] = sum;
  }
}

// Few rows do little work with each dequantised number, so it should still be in L1: 16 tokens at a time (8 KB at
// head_dim 128) instead of all 64. Many rows would load and store their sums too often that way.
inline int tokens_at_once(const AttendTask& task) { return task.num_rows <= 8 ? 16 : kTile; }

// Scores of all rows and some tokens, before softmax_scale: directly from the codes where is_direct, else by
// dequantising. In granularity channel by dequantising only; see score_block. Written to `scores`, rows kTile apart, up
// to the end of the tile.
void score_tokens(const Side& side, const AttendTask& task, int begin, int count, const Workspace& work,
                  float* scores) {
  if (is_direct(side, task.num_rows)) {
    load_direct_scales(side, task.b, task.kv_head, begin, count, work.key_scale, work.key_zero);
    for_row_blocks(task.num_rows, [&](auto size, int r) {
      score_directly<size>(side, codes_of(side, task.b, task.kv_head, begin), count, work.query + r * work.key_stride,
                           work.key_stride, work.query_sums + r, work.key_scale, work.key_zero,
                           scores + r * kTile);
    });
    return;
  }
  for (int t = 0; t < count; t += tokens_at_once(task)) {
    const int tokens = min_of(tokens_at_once(task), count - t);
    dequantize_tile<false>(side, task.b, task.kv_head, begin + t, tokens, work.key, work.key_stride,
                           work.scale_row, work.zero_row);
    for_row_blocks(task.num_rows, [&](auto size, int r) {
      score_rows<size>(work.query + r * work.key_stride, work.key, work.key_stride, round_up(tokens, 16),
                       scores + r * kTile + t);
    });
  }
}

#if KVQ_USE_AVX512

// Puts the rows of a task, which are `rows` in float32, into fixed point, four at a time.
void make_query_sets(const DecodeParams& params, const AttendTask& task, const float* rows, const Workspace& work) {
  const Side& side = params.key_side;
  for (int r = 0; r < task.num_rows; r += 4) {
    work.query_sets[r / 4] =
        make_query_set(side, rows + r * work.key_stride, work.key_stride, min_of(4, task.num_rows - r),
                       params.query.dtype == Dtype::fp32, work.query_memory + r / 4 * query_set_bytes(side));
  }
}

#endif

// The tail as a side of storage type none, whose tokens are the rows of the tail.
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

// Prepares the rows of a task for one block: query · (scale · code + zero) = (query · scale) · code + query · zero,
// with codes centred as in attend_direct.h.
void scale_queries(const Side& side, const AttendTask& task, int block, const Workspace& work) {
  const half_bits* scale = side.scale + task.b * side.scale_stride_b + task.kv_head * side.scale_stride_h +
                           block * side.scale_stride_g;
  const half_bits* zero =
      side.zero + task.b * side.zero_stride_b + task.kv_head * side.zero_stride_h + block * side.zero_stride_g;
  const Float center = broadcast(center_of(side));
  *work.scaled_block = block;
  for (int r = 0; r < task.num_rows; ++r) {
    Float sums = zeros();
    for (int c = 0; c < side.head_dim; c += kWidth) {
      const Float query = load(work.query + r * work.key_stride + c), scales = load_half(scale + c);
      store(work.scaled_query + r * work.key_stride + c, mul(query, scales));
      sums = fma(query, fma(center, scales, load_half(zero + c)), sums);
    }
    work.scaled_constants[r] = sum_of(sums);
  }
}

// score_tokens for the codes of one block of granularity channel.
void score_block(const DecodeParams& params, const AttendTask& task, int begin, int count, const Workspace& work,
                 float* scores) {
  const Side& side = params.key_side;
#if KVQ_USE_AVX512
  const bool has_integer_keys = work.has_integer_keys;
#else
  constexpr bool has_integer_keys = false;
#endif
  if (!has_integer_keys && !is_direct(side, task.num_rows)) {
    return score_tokens(side, task, begin, count, work, scores);
  }
  if (*work.scaled_block != begin / kBlockSize) {
    scale_queries(side, task, begin / kBlockSize, work);
#if KVQ_USE_AVX512
    if (has_integer_keys) make_query_sets(params, task, work.scaled_query, work);
#endif
  }
  for (int t = 0; t < kTile; t += kWidth) {  // for x · 1 + 1 · constant
    store(work.key_scale + t, broadcast(1.0f));
    store(work.key_zero + t, broadcast(1.0f));
  }
  const uint8_t* codes = codes_of(side, task.b, task.kv_head, begin);
#if KVQ_USE_AVX512
  if (has_integer_keys) {
    for (int r = 0; r < task.num_rows; r += 4) {
      score_set(side, work.query_sets[r / 4], min_of(4, task.num_rows - r), codes, count, work.key_scale, work.key_zero,
                work.scaled_constants + r, work.raw_scores, scores + r * kTile);
    }
    return;
  }
#endif
  for_row_blocks(task.num_rows, [&](auto size, int r) {
    score_directly<size>(side, codes, count, work.scaled_query + r * work.key_stride, work.key_stride,
                         work.scaled_constants + r, work.key_scale, work.key_zero, scores + r * kTile);
  });
}

// Scores of all rows and a tile of codes. In granularity channel this goes block by block: a tile may begin anywhere
// and cross into another block.
void score_tile(const DecodeParams& params, const AttendTask& task, int begin, int count, const Workspace& work) {
  const Side& side = params.key_side;
  if (!side.has_channel_scales) return score_tokens(side, task, begin, count, work, work.scores);
  for (int token = begin, end; token < begin + count; token = end) {
    end = min_of((token / kBlockSize + 1) * kBlockSize, begin + count);
    // Scores are written up to the end of a tile, so those of a second block go to a buffer first.
    float* scores = token == begin ? work.scores : work.block_scores;
    score_block(params, task, token, end - token, work, scores);
    if (token == begin) continue;
    for (int r = 0; r < task.num_rows; ++r) {
      std::memcpy(work.scores + r * kTile + (token - begin), scores + r * kTile, sizeof(float) * (end - token));
    }
  }
}

// add_tile directly from the codes. Returns false and changes nothing if something in the tile is not finite.
bool add_tile_directly(const Side& side, const AttendTask& task, int begin, int count, const Row* rows,
                       const Workspace& work) {
  if (!load_direct_scales(side, task.b, task.kv_head, begin, count, work.value_scale, work.value_zero)) return false;
  bool is_finite = true;
  for_row_blocks(task.num_rows, [&](auto size, int r) {
    is_finite = is_finite &&
                sum_directly<size>(side, codes_of(side, task.b, task.kv_head, begin), count, work.scores + r * kTile,
                                   work.value_scale, work.raw_scores, work.tile_out, work.value_stride);
    if (!is_finite) return;  // found for the first rows, before anything is added: all rows use the same codes
    for (int i = r; i < r + size; ++i) {
      const float* p = work.scores + i * kTile;
      Float zero_sum = zeros();
      if (!side.is_symmetric) {
        for (int t = 0; t < kTile; t += kWidth) zero_sum = fma(load(p + t), load(work.value_zero + t), zero_sum);
      }
      const Float constant = broadcast(sum_of(zero_sum)), rescale = broadcast(rows[i].rescale);
      float* out = work.out + i * work.value_stride;
      for (int c = 0; c < side.head_dim; c += kWidth) {
        const Float sum = add(load(work.tile_out + (i - r) * work.value_stride + c), constant);
        store(out + c, fma(load(out + c), rescale, sum));
      }
    }
  });
  return is_finite;
}

// Adds p · value of a tile to the sums of all rows, directly from the codes or by dequantising. Token `begin` of the
// sequence is token `first` of the side.
void add_tile(const Side& side, const AttendTask& task, int begin, int first, int count, Row* rows,
              const Workspace& work) {
#if KVQ_USE_AVX512
  const bool is_natural = !work.has_integer_values;
#else
  constexpr bool is_natural = true;
#endif
  if (is_natural && is_direct(side, task.num_rows) && add_tile_directly(side, task, first, count, rows, work)) return;
  for (int t = 0; t < count; t += tokens_at_once(task)) {
    const int tokens = min_of(tokens_at_once(task), count - t);
    const bool is_finite = dequantize_tile<true>(side, task.b, task.kv_head, first + t, tokens, work.value,
                                                 work.value_stride, work.scale_row, work.zero_row);
    const auto poison_at = [&](auto place) {
      poison(work, side.head_dim, begin + t, tokens, rows, task.num_rows, place);
    };
#if KVQ_USE_AVX512
    if (work.has_integer_values) {
      const int m = channels_per_lane(side);
      if (!is_finite) poison_at([m](int c) { return transposed_place(c, m); });
      for (int i = 0; i < tokens; ++i) {
        float* value = work.value + i * work.value_stride;
        std::memcpy(work.scale_row, value, sizeof(float) * work.value_stride);
        for (int c = 0; c < work.value_stride; ++c) value[transposed_place(c, m)] = work.scale_row[c];
      }
    } else if (!is_finite) {
      poison_at([](int c) { return c; });
    }
#else
    if (!is_finite) poison_at([](int c) { return c; });
#endif
    for_row_blocks(task.num_rows, [&](auto size, int r) {
      add_values<size>(work.scores + r * kTile + t, work.value, work.value_stride, tokens, rows + r,
                       work.out + r * work.value_stride);
    });
    for (int r = 0; r < task.num_rows; ++r) rows[r].rescale = 1.0f;
  }
}

#if KVQ_USE_AVX512

// score_tile and add_tile with integer products (attend_vnni.h).
void score_tile_of_codes(const DecodeParams& params, const AttendTask& task, int begin, int count,
                         const Workspace& work) {
  const Side& side = params.key_side;
  load_scales(side, task.b, task.kv_head, begin, count, work.key_scale, work.key_zero);
  if (!side.is_symmetric) center_zeros(side, work.key_scale, work.key_zero);
  const uint8_t* codes = codes_of(side, task.b, task.kv_head, begin);
  for (int r = 0; r < task.num_rows; r += 4) {
    score_set(side, work.query_sets[r / 4], min_of(4, task.num_rows - r), codes, count, work.key_scale,
              side.is_symmetric ? nullptr : work.key_zero, work.query_sums + r * side.num_groups, work.raw_scores,
              work.scores + r * kTile);
  }
}

// Returns false and changes nothing if a scale of the tile is not finite: add_tile handles that.
bool add_tile_of_codes(const DecodeParams& params, const AttendTask& task, int begin, int count, const Row* rows,
                       const Workspace& work) {
  const Side& side = params.value_side;
  if (!load_scales(side, task.b, task.kv_head, begin, count, work.value_scale, work.value_zero)) return false;
  const uint8_t* codes = codes_of(side, task.b, task.kv_head, begin);
  const float* zero = side.is_symmetric ? nullptr : work.value_zero;
  const Weights weights = make_weights(side, work.weights);
  const int num_words = params.query.dtype == Dtype::fp32 ? 2 : 1;
  for (int first = 0; first < task.num_rows; first += 4) {
    const int num_rows = min_of(4, task.num_rows - first);
    float rescales[4] = {};
    for (int r = 0; r < num_rows; ++r) {
      rescales[r] = rows[first + r].rescale;
      const float* p = work.scores + (first + r) * kTile;
      const auto fill = [&](auto kernel) { kernel(side, weights, r, p, work.value_scale, zero); };
      if (side.num_groups == 1) {
        num_words == 1 ? fill(fill_weights<1>) : fill(fill_weights<2>);
      } else {
        num_words == 1 ? fill(fill_group_weights<1>) : fill(fill_group_weights<2>);
      }
    }
    float* out = work.out + first * work.value_stride;
    const auto run = [&](auto kernel) {
      kernel(side, weights, num_words, codes, count, rescales, out, work.value_stride);
    };
    if (num_rows == 1) {
      run(add_codes_of<1>);
    } else if (num_rows == 2) {
      run(add_codes_of<2>);
    } else {
      run(add_codes_of<4>);
    }
  }
  return true;
}

#endif

// A run of tokens, up to `end`, that attention reads from consecutive rows of the same planes or tails.
struct Run {
  int end;
  int offset;  // token t of the sequence is in row t - offset of the codes; 0 except in a ring that has wrapped around
  bool has_dense_keys, has_dense_values;
  int key_row, value_row;  // in the tails, of the first token of the run, if dense
};

Run run_from(const DecodeParams& params, int b, int token, int end) {
  Run run = {end, 0, false, false, 0, 0};
  const int start = params.starts == nullptr ? 0 : params.starts[b];
  const auto cut = [&run, token](int64_t at) {
    if (token < at && at < run.end) run.end = static_cast<int>(at);
  };
  const auto look = [&](const Side& side, bool& is_dense, int& row) {
    if (side.tail == nullptr) return;
    const int first_of_recent = tail_begin(side, params.lengths[b], params.residual_length);
    const bool is_first = is_sink(token, start, params.sink_length);
    cut(start);
    cut(int64_t{start} + params.sink_length);
    cut(first_of_recent);
    is_dense = is_first || token >= first_of_recent;
    if (!is_dense) return;
    row = tail_row(side, token, start, params.sink_length);
    if (!is_first) cut((int64_t{token} / side.ring + 1) * side.ring);
  };
  if (params.is_ring) {
    run.offset = token - row_of(token, params.capacity, true);
    cut(int64_t{run.offset} + params.capacity);
  }
  look(params.key_side, run.has_dense_keys, run.key_row);
  look(params.value_side, run.has_dense_values, run.value_row);
  return run;
}

// Merges the softmax over the tokens of a tail into that over tokens with codes.
void merge_tail(const Row& dense, const float* dense_out, int value_dim, Row& row, float* out) {
  const float max = dense.max > row.max ? dense.max : row.max;
  const float base = max == -kInfinity ? 0.0f : max;
  const float weight = std::exp(row.max - base), dense_weight = std::exp(dense.max - base);
  for (int c = 0; c < value_dim; ++c) out[c] = weight * out[c] + dense_weight * dense_out[c];
  row.sum = weight * row.sum + dense_weight * dense.sum;
  row.max = max;
}

void attend(const DecodeParams& params, const AttendTask& task, float* scratch, const Partial& partial) {
  const Workspace work(params, task.num_rows, scratch);
  const bool has_runs = params.key_side.tail != nullptr || params.value_side.tail != nullptr || params.is_ring;
  const bool has_value_tail = params.value_side.tail != nullptr;
  const Workspace tail_work = work.for_tail();
  const Side key_tail = tail_of(params.key_side), value_tail = tail_of(params.value_side);
  Row rows[kMaxRows], dense_rows[kMaxRows];  // for tokens whose values have codes, and for those whose have none
  for (int r = 0; r < task.num_rows; ++r) {
    rows[r] = make_row(params, task, r);
    if (!task.has_queries) load_query(params, task, rows[r], r, work);
    rows[r].factor = work.query_factors[r];
    if (has_value_tail) dense_rows[r] = rows[r];
  }
  std::memset(work.out, 0, sizeof(float) * round_up(task.num_rows, 4) * work.value_stride);
  if (has_value_tail) {
    std::memset(work.dense_out, 0, sizeof(float) * round_up(task.num_rows, 4) * work.dense_value_stride);
  }
#if KVQ_USE_AVX512
  // In granularity channel, score_block makes query sets for each block instead.
  const bool has_integer_keys = work.has_integer_keys && !params.key_side.has_channel_scales;
  if (has_integer_keys && !task.has_queries) make_query_sets(params, task, work.query, work);
#endif
  *work.scaled_block = -1;

  Run run = {task.begin, 0, false, false, 0, 0};
  for (int begin = task.begin, first_of_run = begin, end; begin < task.end; begin = end) {
    if (begin == run.end) {
      run = has_runs ? run_from(params, task.b, begin, task.end) : Run{task.end, 0, false, false, 0, 0};
      first_of_run = begin;
    }
    end = min_of(begin + kTile, run.end);
    const int count = end - begin, first = begin - run.offset;
    if (run.has_dense_keys) {
      score_tokens(key_tail, task, run.key_row + (begin - first_of_run), count, tail_work, work.scores);
    } else {
#if KVQ_USE_AVX512
      if (has_integer_keys) {
        score_tile_of_codes(params, task, first, count, work);
      } else {
        score_tile(params, task, first, count, work);
      }
#else
      score_tile(params, task, first, count, work);
#endif
    }
    Row* states = run.has_dense_values ? dense_rows : rows;
    for (int r = 0; r < task.num_rows; ++r) {
      states[r].constant = run.has_dense_keys ? 0.0f : work.query_constants[r];
      softmax_row(params, states[r], begin, count, work.scores + r * kTile);
    }
    if (run.has_dense_values) {
      add_tile(value_tail, task, begin, run.value_row + (begin - first_of_run), count, dense_rows, tail_work);
      continue;
    }
#if KVQ_USE_AVX512
    if (work.has_integer_values && add_tile_of_codes(params, task, first, count, rows, work)) continue;
#endif
    add_tile(params.value_side, task, begin, first, count, rows, work);
  }

  const int value_dim = params.value_side.head_dim;
  for (int r = 0; r < task.num_rows; ++r) {
    float* result = partial.out + static_cast<int64_t>(r) * value_dim;
    const float* out = work.out + r * work.value_stride;
#if KVQ_USE_AVX512
    if (work.has_integer_values) {
      if (params.value_side.storage == Storage::int4) {
        restore_row<8>(out, value_dim, result);
      } else {
        restore_row<4>(out, value_dim, result);
      }
    } else {
      std::memcpy(result, out, sizeof(float) * value_dim);
    }
#else
    std::memcpy(result, out, sizeof(float) * value_dim);
#endif
    if (has_value_tail) {
      merge_tail(dense_rows[r], work.dense_out + r * work.dense_value_stride, value_dim, rows[r], result);
    }
    partial.max[r] = rows[r].max;
    partial.sum[r] = rows[r].sum;
  }
}

// --- combine ---------------------------------------------------------------------------------------------------------

void finish(const DecodeParams& params, const AttendTask& task, const Partial* partials, int num_partials,
            float* scratch) {
  const int value_dim = params.value_side.head_dim;
  const int num_q_per_kv = params.num_q_heads / params.num_kv_heads;
  for (int r = 0; r < task.num_rows; ++r) {
    const int head = task.kv_head * num_q_per_kv + (task.first_row + r) % num_q_per_kv;
    const int i = (task.first_row + r) / num_q_per_kv;
    const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[head];
    float max = sink;
    for (int s = 0; s < num_partials; ++s) max = partials[s].max[r] > max ? partials[s].max[r] : max;
    const float base = max == -kInfinity ? 0.0f : max;
    // An infinite sink takes all the weight: infinity - infinity would be NaN. (With infinite scores, NaN is right.)
    double sum = sink == kInfinity ? 1.0 : std::exp(sink - base);
    for (int c = 0; c < value_dim; ++c) scratch[c] = 0.0f;
    for (int s = 0; s < num_partials; ++s) {
      const float weight = std::exp(partials[s].max[r] - base);
      sum += static_cast<double>(weight) * partials[s].sum[r];
      const float* out = partials[s].out + static_cast<int64_t>(r) * value_dim;
      const Float weights = broadcast(weight);
      for (int c = 0; c + kWidth <= value_dim; c += kWidth) {
        store(scratch + c, fma(weights, load(out + c), load(scratch + c)));
      }
      for (int c = value_dim / kWidth * kWidth; c < value_dim; ++c) scratch[c] += weight * out[c];
    }
    const float factor = sum == 0.0 ? 1.0f : static_cast<float>(1.0 / sum);
    for (int c = 0; c < value_dim; ++c) scratch[c] *= factor;
    const int64_t out_row = (static_cast<int64_t>(task.b) * params.q_len + i) * params.num_q_heads + head;
    round_dense(scratch, value_dim, params.query.dtype, params.out, out_row * value_dim);
    const int64_t lse_row = (static_cast<int64_t>(task.b) * params.num_q_heads + head) * params.q_len + i;
    params.lse[lse_row] = max == kInfinity ? kInfinity : max + static_cast<float>(std::log(sum));
  }
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
