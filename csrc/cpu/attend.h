// Attention of a block of query rows to a range of tokens, in tiles of 64 tokens: scores, softmax with a running
// maximum, values. Serves every format, mask and option of reference.decode_attention. attend_table.h chooses the
// kernels of the two products; cpu.cpp divides rows and tokens into tasks.
//
// Masking. A masked score is set to -inf before the maximum is taken, so neither its size nor a NaN in it has any
// effect. Values are summed as p · value over the tile, so a value that is not finite would also reach rows with p = 0.
// Such elements are replaced by 0 in the tile, and the sums of the rows that see their token are set to NaN (`poison`).
#pragma once

#include <optional>
#include <utility>

#include "attend_table.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int kMaxInt = INT32_MAX;

// --- query rows ------------------------------------------------------------------------------------------------------

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
  return row;
}

// Loads and transforms row r of the query, and what goes with it.
void load_query(const Work& work, const Row& row, int r) {
  const DecodeParams& params = work.params;
  const Side& side = params.key_side;
  const int i = (work.task.first_row + r) / (params.num_q_heads / params.num_kv_heads), size = work.key_stride;
  const Dense& query = params.query;
  float *result = work.query + r * size, *dense = work.dense_query + r * size;
  load_row(query, work.task.b * query.stride_b + row.head * query.stride_h + i * query.stride_t, side.head_dim, result);
  if (dense != result) std::memcpy(dense, result, sizeof(float) * size);
  work.constants[r] = params.softmax_scale *
                      transform_query_row(params.key_transform, work.task.kv_head, side.head_dim, result);
  // Codes are multiplied before their scale makes them small, and they add up to as much as 2^16: for a query near the
  // end of the float32 range the sum would overflow, though the logit would not. So such a query is divided first. An
  // infinity stays one.
  constexpr float kHuge = 0x1p96f, kDivisor = 0x1p64f;
  Float sizes = zeros();
  for (int c = 0; c < size; c += kWidth) sizes = max_of(abs_of(load(result + c)), sizes);
  const bool is_huge = largest_of(sizes) > kHuge;
  work.factors[r] = is_huge ? params.softmax_scale * kDivisor : params.softmax_scale;
  if (is_huge) {
    for (int c = 0; c < size; ++c) result[c] /= kDivisor;
    for (int c = 0; c < size && dense != result; ++c) dense[c] /= kDivisor;
  }
  const int group_size = side.head_dim / side.num_groups;
  for (int g = 0; g < side.num_groups; ++g) {
    float sum = 0.0f;
    for (int c = g * group_size; c < (g + 1) * group_size; ++c) sum += result[c];
    work.query_sums[r * side.num_groups + g] = sum;
  }
}

// For granularity channel, prepares the query rows for one block: query · (scale · code + zero) = (query · scale) ·
// (code - center) + query · (zero + center · scale).
void scale_queries(const Work& work, int block) {
  const Side& side = work.params.key_side;
  const int slot = work.slot, head = work.task.kv_head;
  float *scale = work.tile, *zero = work.tile + work.key_stride;  // padded with zeros, like the query
  load_row({scales_of(side, slot, head).at(block, 0), Dtype::fp16, 0, 0, 0}, 0, side.head_dim, scale);
  load_row({zeros_of(side, slot, head).at(block, 0), Dtype::fp16, 0, 0, 0}, 0, side.head_dim, zero);
  const Float center = broadcast(center_of(side.storage));
  for (int c = 0; c < work.key_stride; c += kWidth) store(zero + c, fma(center, load(scale + c), load(zero + c)));
  for_row_blocks(work.task.num_rows, [&](auto size, int first) {
    Float sums[size] = {};
    for (int c = 0; c < work.key_stride; c += kWidth) {
      for (int r = 0; r < size; ++r) {
        const int at = (first + r) * work.key_stride + c;
        const Float query = load(work.query + at);
        store(work.scaled_query + at, query * load(scale + c));
        sums[r] = fma(query, load(zero + c), sums[r]);
      }
    }
    for (int r = 0; r < size; ++r) {
      work.block_constants[first + r] = work.constants[first + r] + work.factors[first + r] * sum_of(sums[r]);
    }
  });
}

// --- softmax ---------------------------------------------------------------------------------------------------------

// e^x for x <= 0 to about one unit in the last place; exactly 0 for x far below 0, NaN for NaN. x = n ln 2 + r with ln
// 2 in two parts, then a polynomial on |r| <= ln 2 / 2 (relative error 2^-28).
inline Float exp_of(Float x) {
  x = max_of(broadcast(-110.0f), x);
  const Float n = round_even(x * 1.44269504f);
  Float r = fma(n, broadcast(-0.693145752f), x);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Float poly = fma(broadcast(1.39506010e-3f), r, broadcast(8.36895406e-3f));
  poly = fma(poly, r, broadcast(4.16662060e-2f));
  poly = fma(poly, r, broadcast(1.66665182e-1f));
  poly = fma(poly, r, broadcast(0.5f));
  return scale_by_power(fma(poly, r * r, r) + 1.0f, n);
}

// tanh: an odd polynomial near 0, elsewhere 1 - 2 / (e^2|x| + 1), computed from e^-2|x|.
inline Float tanh_of(Float x) {
  const Float size = abs_of(x), square = x * x;
  Float poly = fma(broadcast(2.23105960e-3f), square, broadcast(-8.26708600e-3f));
  poly = fma(poly, square, broadcast(2.17344370e-2f));
  poly = fma(poly, square, broadcast(-5.39524741e-2f));
  poly = fma(poly, square, broadcast(1.33332476e-1f));
  poly = fma(poly, square, broadcast(-3.33333313e-1f));
  const Float small = fma(poly * square, x, x), falling = exp_of(size * -2.0f);
  const Float large = (1.0f - falling) / (1.0f + falling);
  return size < 0.6f ? small : x < 0.0f ? -large : large;
}

// Turns the scores of one row and tile into probabilities in place, 0 from `count` to the end of the tile, and updates
// the row's maximum and sum. The logits are factor · score + constant. Scores past `count` may be anything.
void softmax_row(const DecodeParams& params, Row& row, float factor, float constant, int begin, int count,
                 float* scores) {
  constexpr int kVectors = kTile / kWidth;
  Float x[kVectors];
  for (int i = 0; i < kVectors; ++i) x[i] = fma(load(scores + i * kWidth), broadcast(factor), broadcast(constant));
  if (params.softcap > 0.0f) {
    for (int i = 0; i < kVectors; ++i) x[i] = params.softcap * tanh_of(x[i] / params.softcap);
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
    row.rescale = exp_of(broadcast(row.max - base))[0];
    row.max = max;
  }
  Float sum = zeros();
  for (int i = 0; i < kVectors; ++i) {
    const Float p = exp_of(x[i] - base);
    store(scores + i * kWidth, p);
    sum += p;
  }
  row.sum = row.sum * row.rescale + sum_of(sum);
}

// Merges the softmax over other tokens, whose sums are `other_out`, into the softmax of a row.
void merge_row(const Row& other, const float* other_out, int value_dim, Row& row, float* out) {
  const float max = other.max > row.max ? other.max : row.max;
  const float base = max == -kInfinity ? 0.0f : max;
  const float weight = std::exp(row.max - base), other_weight = std::exp(other.max - base);
  for (int c = 0; c < value_dim; ++c) out[c] = weight * out[c] + other_weight * other_out[c];
  row.sum = weight * row.sum + other_weight * other.sum;
  row.max = max;
}

// --- the loop over tiles ---------------------------------------------------------------------------------------------

// Queries of a call have windows of their own, so one may read a token from the tail that another reads as codes.
// Attention goes through the newest tokens once for each way to read a token; in each pass, a row sees those that it
// reads in this way. First tokens are dense in every pass. For a single query, passes meet no token twice.
struct Pass {
  bool has_dense_keys, has_dense_values;  // of the newest tokens
};
constexpr Pass kPasses[] = {{false, false}, {true, false}, {false, true}, {true, true}};

// The first of the newest tokens that a row reads from the tail of keys, and of values.
struct RowWindow {
  int keys, values;

  // The tokens of a pass.
  std::pair<int, int> tokens(const Pass& pass) const {
    return {max_of(pass.has_dense_keys ? keys : 0, pass.has_dense_values ? values : 0),
            min_of(pass.has_dense_keys ? kMaxInt : keys, pass.has_dense_values ? kMaxInt : values)};
  }
};

RowWindow window_of(const DecodeParams& params, int b, int position) {
  const auto begin = [&](const Side& side) {
    return side.tail == nullptr ? kMaxInt
                                : window_begin(side, max_of(position + 1, 0), params.lengths[b],
                                               params.residual_length, tail_from_of(params, b));
  };
  return {begin(params.key_side), begin(values_of(params))};
}

// A run of tokens, up to `end`, that attention reads from consecutive rows of the same planes or tails, and that is
// within one block of granularity channel.
struct Run {
  int end;
  int slot, offset;  // token t of the sequence is in row t - offset of the codes, at this first index
  bool has_dense_keys, has_dense_values, has_dense_rope;
  int key_row, value_row, rope_row;  // in the tails, of the first token of the run, if dense
};

Run run_from(const DecodeParams& params, const Pass& pass, int b, int token, int end) {
  const Place place = place_of(params, b, token);
  Run run = {end, place.slot, token - place.row, false, false, false, 0, 0, 0};
  const int start = params.starts == nullptr ? 0 : params.starts[b];
  const auto cut = [&run, token](int64_t at) {
    if (token < at && at < run.end) run.end = static_cast<int>(at);
  };
  const auto look = [&](const Side& side, bool is_recent, bool& is_dense, int& row) {
    if (side.tail == nullptr) return;
    const bool is_first = is_sink(token, start, params.sink_length);
    cut(start);
    cut(int64_t{start} + params.sink_length);
    is_dense = is_first || is_recent;
    if (!is_dense) return;
    row = tail_row(side, token, start, params.sink_length);
    if (!is_first) cut((int64_t{token} / side.ring + 1) * side.ring);
  };
  const bool is_paged = params.page_table != nullptr;
  if (params.is_ring || is_paged) cut(int64_t{run.offset} + (is_paged ? params.page_rows : params.capacity));
  look(params.key_side, pass.has_dense_keys, run.has_dense_keys, run.key_row);
  if (params.is_latent) {
    run.has_dense_values = run.has_dense_keys;
    run.value_row = run.key_row;
    look(params.value_side, pass.has_dense_keys, run.has_dense_rope, run.rope_row);
  } else {
    look(params.value_side, pass.has_dense_values, run.has_dense_values, run.value_row);
  }
  if (params.key_side.has_channel_scales) cut((int64_t{token} / kBlockSize + 1) * kBlockSize);
  return run;
}

// The memory of a task. Only AVX-512 has integer kernels.
Work make_work(const DecodeParams& params, const AttendTask& task, float* memory) {
#if KVQ_WIDTH == 16
  return Work(params, task, memory,
              {kMaxRows / 4 * static_cast<int64_t>(sizeof(QuerySet)), kMaxRows / 4 * query_set_bytes(params.key_side),
               weights_bytes(values_of(params))});
#else
  return Work(params, task, memory, {0, 0, 0});
#endif
}

// --- latents ---------------------------------------------------------------------------------------------------------

// The products of queries with rope parts: those with the keys of a cache that has rope parts for keys.
DecodeParams rope_params(const DecodeParams& params) {
  DecodeParams rope = params;
  rope.is_latent = false;
  rope.key_side = params.value_side;
  rope.key_transform = {};
  const int64_t num_bytes = static_cast<int64_t>(params.key_side.head_dim) * bytes_of(params.query.dtype);
  rope.query.data = static_cast<const uint8_t*>(params.query.data) + num_bytes;
  return rope;
}

// Rope parts of a task: multiplied by their part of the query rows, in scratch memory of their own.
struct Rope {
  const DecodeParams params;
  Work work;
  const Side tail;
  const Keys keys, dense_keys;

  Rope(const DecodeParams& of_latents, const AttendTask& task, float* memory)
      : params(rope_params(of_latents)),
        work(make_work(params, task, memory)),
        tail(tail_of(params.key_side)),
        keys{params.key_side, find_kernel(kKeyKernels, params.key_side, task.num_rows, params.query.dtype), work.query},
        dense_keys{tail, find_kernel(kKeyKernels, tail, task.num_rows, params.query.dtype), work.dense_query} {}

  // Adds to the scores of latents, which are multiplied by `factors` later.
  void add_scores(const Run& run, int slot, int begin, int from_run, int count, const float* factors, float* scores) {
    work.slot = slot;
    const Keys& chosen = run.has_dense_rope ? dense_keys : keys;
    chosen.kernel->score(work, chosen, run.has_dense_rope ? run.rope_row + from_run : begin, count);
    for (int r = 0; r < work.task.num_rows; ++r) {
      const float ratio = factors[r] == work.factors[r] ? 1.0f : work.factors[r] / factors[r];
      for (int t = 0; t < kTile; t += kWidth) {
        const int at = r * kTile + t;
        store(scores + at, fma(load(work.scores + at), broadcast(ratio), load(scores + at)));
      }
    }
  }
};

int64_t attend_scratch(const DecodeParams& params) {
  const int64_t size = make_work(params, AttendTask(), nullptr).size;
  return params.is_latent ? size + make_work(rope_params(params), AttendTask(), nullptr).size : size;
}

void attend(const DecodeParams& params, const AttendTask& task, float* scratch, const Partial& partial) {
  Work work = make_work(params, task, scratch);
  const bool has_blocks = params.key_side.has_channel_scales;
  Row seen[kMaxRows], rows[kMaxRows], dense_rows[kMaxRows];  // the first with all tokens that a row sees
  RowWindow windows[kMaxRows];
  const Side key_codes = has_blocks ? codes_of_blocks(params.key_side) : params.key_side;
  const Side& value_side = values_of(params);
  const Side key_tail = tail_of(params.key_side), value_tail = tail_of(value_side);
  const auto keys_of = [&](const Side& side, float* query) {
    return Keys{side, find_kernel(kKeyKernels, side, task.num_rows, params.query.dtype), query};
  };
  const Keys keys = keys_of(key_codes, has_blocks ? work.scaled_query : work.query);
  const Keys dense_keys = keys_of(key_tail, work.dense_query);
  // Sums of rotated latents are rotated back before sums of dense latents join them. So they need an order that knows
  // no flawed codes, whose sums are kept with the sums of dense values.
  const auto* value_kernel = find_kernel(kValueKernels, value_side, task.num_rows, params.query.dtype);
  if (params.is_latent && value_kernel->restore != nullptr) value_kernel = &kTileValues;
  const auto* tail_kernel = find_kernel(kValueKernels, value_tail, task.num_rows, params.query.dtype);
  const auto restore = value_kernel->restore;
  const Values values = {value_side, value_kernel, rows, work.out,
                         restore == nullptr ? work.value_stride : sums_stride(value_side)};
  const Values dense_values = {value_tail, tail_kernel, dense_rows, work.dense_out, work.value_stride};
  // Codes whose sums cannot be in the order of the others, because a scale is not finite.
  const Values flawed_values = {value_side, value_kernel, dense_rows, work.dense_out, work.value_stride};
  std::optional<Rope> rope;
  if (params.is_latent) rope.emplace(params, task, scratch + make_work(params, task, nullptr).size);

  for (int r = 0; r < round_up(task.num_rows, 4); ++r) {  // kernels may compute rows that are not there
    rows[r] = dense_rows[r] = seen[r] = r < task.num_rows ? make_row(params, task, r) : seen[r - 1];
    windows[r] = r < task.num_rows ? window_of(params, task.b, seen[r].position) : windows[r - 1];
    if (!task.has_queries && r < task.num_rows) load_query(work, rows[r], r);
    if (rope.has_value() && !task.has_queries && r < task.num_rows) load_query(rope->work, rows[r], r);
  }
  if (!has_blocks && !task.has_queries && keys.kernel->prepare != nullptr) keys.kernel->prepare(work, keys);
  if (rope.has_value() && !task.has_queries && rope->keys.kernel->prepare != nullptr) {
    rope->keys.kernel->prepare(rope->work, rope->keys);
  }
  std::memset(work.out, 0, sizeof(float) * round_up(task.num_rows, 4) * values.stride);
  bool has_dense_sums = false;
  const int tail_slot = tail_slot_of(params, task.b);

  const auto attend_to = [&](const Pass& pass, int first_token, int last_token) {
    Run run = {first_token, 0, 0, false, false, false, 0, 0, 0};
    for (int begin = first_token, first_of_run = begin, scaled_block = -1, end; begin < last_token; begin = end) {
      if (begin == run.end) {
        run = run_from(params, pass, task.b, begin, last_token);
        first_of_run = begin;
        scaled_block = -1;  // blocks of other pages have the same number
      }
      end = min_of(begin + kTile, run.end);
      const int count = end - begin, first = begin - run.offset, from_run = begin - first_of_run;
      work.slot = run.has_dense_keys ? tail_slot : run.slot;
      if (run.has_dense_keys) {
        dense_keys.kernel->score(work, dense_keys, run.key_row + from_run, count);
      } else {
        if (has_blocks && scaled_block != first / kBlockSize) {
          scaled_block = first / kBlockSize;
          scale_queries(work, scaled_block);
          if (keys.kernel->prepare != nullptr) keys.kernel->prepare(work, keys);
        }
        keys.kernel->score(work, keys, first, count);
      }
      if (rope.has_value()) {
        rope->add_scores(run, run.has_dense_rope ? tail_slot : run.slot, first, from_run, count, work.factors,
                         work.scores);
      }
      work.slot = run.has_dense_values ? tail_slot : run.slot;
      const bool is_flawed = !run.has_dense_values && restore != nullptr &&
                             !load_scales(values.side, work.slot, task.kv_head, first, count, work.value_scale,
                                          work.value_zero, /*is_centered=*/false);
      const Values& target = run.has_dense_values ? dense_values : is_flawed ? flawed_values : values;
      if (target.rows == dense_rows && !has_dense_sums) {
        has_dense_sums = true;
        std::memset(work.dense_out, 0, sizeof(float) * round_up(task.num_rows, 4) * work.value_stride);
      }
      const float* constants = has_blocks ? work.block_constants : work.constants;
      for (int r = 0; r < task.num_rows; ++r) {
        softmax_row(params, target.rows[r], work.factors[r], run.has_dense_keys ? 0.0f : constants[r], begin, count,
                    work.scores + r * kTile);
      }
      const int row = run.has_dense_values ? run.value_row + from_run : first;
      if (is_flawed || !target.kernel->add(work, target, begin, row, count)) add_tile(work, target, begin, row, count);
    }
  };
  for (const Pass& pass : kPasses) {
    int first_token = kMaxInt, last_token = 0;
    for (int r = 0; r < round_up(task.num_rows, 4); ++r) {
      const auto [from, until] = windows[r].tokens(pass);
      rows[r].begin = dense_rows[r].begin = max_of(seen[r].begin, from);
      rows[r].end = dense_rows[r].end = min_of(seen[r].end, until);
      first_token = min_of(first_token, from), last_token = max_of(last_token, until);
    }
    attend_to(pass, max_of(first_token, task.begin), min_of(last_token, task.end));
  }

  const int value_dim = value_side.head_dim;
  for (int r = 0; r < task.num_rows; ++r) {
    float* result = partial.out + static_cast<int64_t>(r) * value_dim;
    const float* out = work.out + r * values.stride;
    if (restore != nullptr) {
      restore(values.side, out, result);
    } else {
      std::memcpy(result, out, sizeof(float) * value_dim);
    }
    if (params.is_latent && params.key_transform.is_rotated) {
      load_row({result, Dtype::fp32, 0, 0, 0}, 0, value_dim, work.tile);
      rotate_row(work.tile, value_dim);
      std::memcpy(result, work.tile, sizeof(float) * value_dim);
    }
    if (has_dense_sums) merge_row(dense_rows[r], work.dense_out + r * work.value_stride, value_dim, rows[r], result);
    partial.max[r] = rows[r].max;
    partial.sum[r] = rows[r].sum;
  }
}

// --- combine ---------------------------------------------------------------------------------------------------------

void finish(const DecodeParams& params, const AttendTask& task, const Partial* partials, int num_partials,
            float* scratch) {
  const int value_dim = values_of(params).head_dim;
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
      for (int c = 0; c < value_dim; ++c) scratch[c] += weight * out[c];
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
