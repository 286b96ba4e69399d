// Attention of the newest tokens over codes, for every format, dtype and head dim up to 256: the simple kernel for what
// no row of attend_table.h serves (float32 queries, mixtures of formats). It reads keys and values once for up to eight
// queries and dequantises them in registers.
//
// A worker is the 1 to 32 lanes that together hold a row, eight channels each. Workers of a thread block take tokens in
// turn, each with its own running maximum m, sum l and weighted values, as in online softmax. They merge at the end of
// the thread block's split of the sequence; a second kernel combines several splits.
#include <algorithm>
#include <type_traits>

#include "../common/codes.cuh"
#include "../common/device.h"
#include "../common/transform.cuh"
#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kNumThreads = 128;

// What follows the softmax scale: the softcap, then ALiBi's slope times the distance.
__device__ float shape_logit(float logit, float softcap, float slope, int distance) {
  if (softcap > 0.f) logit = softcap * tanhf(logit / softcap);
  return logit + slope * static_cast<float>(distance);
}

// exp(x - maximum), but 0 instead of NaN where nothing has been seen yet (maximum = -inf).
__device__ float exp_below(float x, float maximum) { return expf(x - (maximum == -INFINITY ? 0.f : maximum)); }

// Writes one row: `sum` is the weighted sum of values, `l` the sum of weights relative to exp(m).
struct Output {
  const DecodeParams& params;
  int64_t b, head, i;

  __device__ void write(float sum, float m, float l, int c) const {
    const int64_t head_dim = params.value_side.head_dim;
    float maximum = m;
    if (params.sinks != nullptr) {
      const float sink = params.sinks[head];
      maximum = fmaxf(m, sink);
      const float weight = exp_below(m, maximum);
      sum *= weight;
      // An infinite sink takes all the weight: infinity - infinity would be NaN.
      l = l * weight + (sink == maximum && maximum != -INFINITY ? 1.f : exp_below(sink, maximum));
    }
    // As in combine.cuh.
    if (params.lengths[b] > max_length_of(params)) l = NAN;
    const int64_t row = (b * params.q_len + i) * params.num_q_heads + head;
    store_value(params.out, params.query.dtype, row * head_dim + c, l == 0.f ? 0.f : sum / l);
    if (c == 0) params.lse[(b * params.num_q_heads + head) * params.q_len + i] = maximum + logf(l);
  }
};

// The place of one row's result of one split: head_dim sums, then m and l.
__device__ float* partial_row(const DecodeParams& params, float* workspace, int64_t split, int64_t b, int64_t head,
                              int64_t i) {
  const int64_t row = ((split * params.batch + b) * params.q_len + i) * params.num_q_heads + head;
  return workspace + row * (params.value_side.head_dim + 2);
}

// What a thread block works on.
struct Place {
  int split, tile, h;
  int64_t b;

  // From the number of the thread block, in 32 bits: a 64-bit division takes longer than a token.
  __device__ static Place of(const DecodeParams& params, int num_splits, int num_tiles) {
    const unsigned cta = blockIdx.x, tile = cta / num_splits, head = tile / num_tiles;
    return {static_cast<int>(cta % num_splits), static_cast<int>(tile % num_tiles),
            static_cast<int>(head % params.num_kv_heads), head / params.num_kv_heads};
  }
};

// A worker's running softmax of each row, over its own channels of the values.
template <int kRows>
struct State {
  float m[kRows], l[kRows] = {}, sum[kRows][kChunk] = {};

  __device__ State() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) m[r] = -INFINITY;
  }

  __device__ void add(int r, float logit, const float (&value)[kChunk]) {
    const float maximum = fmaxf(m[r], logit);
    const float kept = exp_below(m[r], maximum), weight = exp_below(logit, maximum);
    m[r] = maximum;
    l[r] = l[r] * kept + weight;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) sum[r][k] = sum[r][k] * kept + weight * value[k];
  }
};

// Merges the workers of a thread block. Writes its partial result to `workspace`, or the final result if that is
// nullptr.
template <int kRows>
__device__ void merge_workers(const DecodeParams& params, const State<kRows>& state, const Place& place,
                              int num_workers, int worker, int c, bool has_value, int num_rows, float* workspace) {
  extern __shared__ float shared[];  // [num_workers][kRows][head_dim sums, m, l]
  const int head_dim = params.value_side.head_dim, stride = head_dim + 2;
  const int num_q_per_kv = params.num_q_heads / params.num_kv_heads;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float* mine = shared + (worker * kRows + r) * stride;
    if (has_value) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) mine[c + k] = state.sum[r][k];
    }
    if (c == 0) mine[head_dim] = state.m[r], mine[head_dim + 1] = state.l[r];
  }
  __syncthreads();
  // Finds the maximum of each row, and replaces each worker's maximum by the weight of its sums.
  __shared__ float maxima[kRows];
  if (threadIdx.x < num_rows) {
    float* const first = shared + threadIdx.x * stride + head_dim;
    float maximum = -INFINITY;
    for (int w = 0; w < num_workers; ++w) maximum = fmaxf(maximum, first[w * kRows * stride]);
    for (int w = 0; w < num_workers; ++w) first[w * kRows * stride] = exp_below(first[w * kRows * stride], maximum);
    maxima[threadIdx.x] = maximum;
  }
  __syncthreads();
  for (int r = 0; r < num_rows; ++r) {
    const int row = place.tile * kRows + r, i = row % params.q_len;
    const int head = place.h * num_q_per_kv + row / params.q_len;
    for (int channel = threadIdx.x; channel < head_dim; channel += kNumThreads) {
      float total = 0.f, weights = 0.f;
      for (int w = 0; w < num_workers; ++w) {
        const float* theirs = shared + (w * kRows + r) * stride;
        total += theirs[channel] * theirs[head_dim];
        weights += theirs[head_dim + 1] * theirs[head_dim];
      }
      if (workspace == nullptr) {
        Output{params, place.b, head, i}.write(total, maxima[r], weights, channel);
      } else {
        float* partial = partial_row(params, workspace, place.split, place.b, head, i);
        partial[channel] = total;
        if (channel == 0) partial[head_dim] = maxima[r], partial[head_dim + 1] = weights;
      }
    }
  }
}

// The first of the newest tokens that a query reads from the tail of a side; INT_MAX if that has none. `num_seen` tokens
// of `length` are up to the query.
__device__ int window_of(const DecodeParams& params, const Laps& laps, const Side& side, int b, int num_seen,
                         int length) {
  if (side.tail == nullptr) return INT32_MAX;
  return window_begin(side, max(num_seen, 0), length, params.residual_length, laps.tail_from(b, length));
}

// Tails take registers, above all for the untransformed query that multiplies their keys. The same instantiation serves
// rings and pages, so that other calls need not look up the rows of tokens. With tails, there is one pass over tokens
// for each way to read keys and values, since queries have windows of their own: a query adds a token in the pass that
// reads it as the query does.
template <int kRows, bool kHasTails>
__global__ void __launch_bounds__(kNumThreads)
    attend(const __grid_constant__ DecodeParams params, int num_splits, int num_tiles, int lanes_per_worker, Laps laps,
           int max_length, float* workspace) {
  // --- which split of which sequence, which queries
  const Place place = Place::of(params, num_splits, num_tiles);
  const int split = place.split, tile = place.tile, h = place.h;
  const int64_t b = place.b;
  const int length = min(max(params.lengths[b], 0), max_length);
  const int first_position = length - params.q_len;  // of the first query; negative when it attends to nothing
  const int start = params.starts == nullptr ? 0 : min(params.starts[b], max_length);  // sums fit an int
  int begin = max(start, 0);
  if (params.sliding_window > 0) begin = max(begin, first_position - params.sliding_window + 1);

  const int64_t num_tokens = max(length - begin, 0);
  const int64_t tokens_per_split = (num_tokens + num_splits - 1) / num_splits;
  const int64_t split_begin = begin + split * tokens_per_split;
  const int64_t split_end = min(split_begin + tokens_per_split, static_cast<int64_t>(length));

  const int num_workers = kNumThreads / lanes_per_worker;
  const int worker = threadIdx.x / lanes_per_worker, c = threadIdx.x % lanes_per_worker * kChunk;
  const bool has_key = c < params.key_side.head_dim, has_value = c < params.value_side.head_dim;
  const int num_q_per_kv = params.num_q_heads / params.num_kv_heads;
  const int num_rows = min(kRows, num_q_per_kv * params.q_len - tile * kRows);

  float query[kRows][kChunk] = {}, slope[kRows] = {}, constant[kRows] = {};
  int position[kRows], key_from[kHasTails ? kRows : 1], value_from[kHasTails ? kRows : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = tile * kRows + r, head = h * num_q_per_kv + row / params.q_len, i = row % params.q_len;
    position[r] = r < num_rows ? first_position + i : -1;
    if constexpr (kHasTails) {
      key_from[r] = window_of(params, laps, params.key_side, place.b, position[r] + 1, length);
      value_from[r] = window_of(params, laps, params.value_side, place.b, position[r] + 1, length);
    }
    if (r >= num_rows) continue;
    if (params.alibi_slopes != nullptr) slope[r] = params.alibi_slopes[head];
    if (!has_key) continue;
    const int64_t first = b * params.query.stride_b + head * params.query.stride_h + i * params.query.stride_t + c;
    load_values(params.query.data, params.query.dtype, first, query[r]);
  }
  float plain_query[kHasTails ? kRows : 1][kChunk] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kHasTails) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) plain_query[r][k] = query[r][k] * params.softmax_scale;
    }
    if (!is_identity(params.key_transform)) {
      const int head_dim = params.key_side.head_dim;
      const LaneTransform<kChunk> transform(params.key_transform, head_dim, h, c);
      constant[r] = transform_query(params.key_transform, transform, head_dim, threadIdx.x % kLanes, c / kChunk,
                                    lanes_per_worker, query[r]);
      constant[r] *= params.softmax_scale;
    }
#pragma unroll
    for (int k = 0; k < kChunk; ++k) query[r][k] *= params.softmax_scale;
  }

  // --- tokens
  State<kRows> state;
#pragma unroll 1
  for (int pass = 0; pass < (kHasTails ? 4 : 1); ++pass) {
    const bool reads_keys_of_tail = pass % 2 > 0, reads_values_of_tail = pass / 2 > 0;
    // The tokens of each row in this pass, and of any.
    int from[kHasTails ? kRows : 1], until[kHasTails ? kRows : 1];
    int64_t first_token = split_begin, end = split_end;
    if constexpr (kHasTails) {
      int least = INT32_MAX, most = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        from[r] = max(reads_keys_of_tail ? key_from[r] : 0, reads_values_of_tail ? value_from[r] : 0);
        until[r] = min(reads_keys_of_tail ? INT32_MAX : key_from[r], reads_values_of_tail ? INT32_MAX : value_from[r]);
        if (r < num_rows) least = min(least, from[r]), most = max(most, until[r]);
      }
      first_token = max(first_token, int64_t{least}), end = min(end, int64_t{most});
    }
    // All lanes of a warp take the same number of iterations, since they shuffle together.
#pragma unroll 2
    for (int64_t base = first_token; base < end; base += num_workers) {
      const int64_t t = base + worker;
      const int token = static_cast<int>(t);
      const bool is_in_range = t < end, is_first = kHasTails && is_sink(token, max(start, 0), params.sink_length);
      float key[kChunk] = {}, value[kChunk] = {};
      const auto is_dense = [&](const Side& side, bool reads_tail) {
        return kHasTails && side.tail != nullptr && (reads_tail || is_first);
      };
      const auto load = [&](const Side& side, bool reads_tail, float (&x)[kChunk]) {
        if (is_dense(side, reads_tail)) {
          const int64_t row = tail_row(side, token, max(start, 0), params.sink_length);
          const int64_t at = laps.tail_slot(b) * side.tail_stride_b + h * side.tail_stride_h + row * side.tail_stride_t;
          load_values(side.tail, side.tail_dtype, at + c, x);
        } else {
          load_channels(side, kHasTails ? laps.slot(b, token) : b, h, kHasTails ? laps.row(token) : t, c, x);
        }
      };
      if (is_in_range && has_key) load(params.key_side, reads_keys_of_tail, key);
      if (is_in_range && has_value) load(params.value_side, reads_values_of_tail, value);
      const bool is_plain_key = is_dense(params.key_side, reads_keys_of_tail);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float logit = 0.f;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          const float factor = is_plain_key ? plain_query[kHasTails ? r : 0][k] : query[r][k];
          logit += factor * key[k];
        }
        for (int distance = lanes_per_worker / 2; distance > 0; distance /= 2) {
          logit += __shfl_xor_sync(kAllLanes, logit, distance);
        }
        // Tokens that a query must not see are skipped, not multiplied by 0: they may be NaN.
        bool is_visible =
            is_in_range && t <= position[r] && (params.sliding_window == 0 || t > position[r] - params.sliding_window);
        if constexpr (kHasTails) is_visible = is_visible && t >= from[r] && t < until[r];
        if (!is_visible) continue;
        logit = shape_logit(logit + (is_plain_key ? 0.f : constant[r]), params.softcap, slope[r], token - position[r]);
        state.add(r, logit, value);
      }
    }
  }

  merge_workers<kRows>(params, state, place, num_workers, worker, c, has_value, num_rows,
                       num_splits > 1 ? workspace : nullptr);
}

// One thread block merges the splits of one row.
__global__ void combine(const __grid_constant__ DecodeParams params, int num_splits, float* workspace) {
  const int64_t i = blockIdx.x % params.q_len, head = blockIdx.x / params.q_len % params.num_q_heads;
  const int64_t b = blockIdx.x / params.q_len / params.num_q_heads;
  const int head_dim = params.value_side.head_dim;
  float maximum = -INFINITY;
  for (int split = 0; split < num_splits; ++split) {
    maximum = fmaxf(maximum, partial_row(params, workspace, split, b, head, i)[head_dim]);
  }
  for (int c = threadIdx.x; c < head_dim; c += blockDim.x) {
    float total = 0.f, weights = 0.f;
    for (int split = 0; split < num_splits; ++split) {
      const float* partial = partial_row(params, workspace, split, b, head, i);
      const float weight = exp_below(partial[head_dim], maximum);
      total += partial[c] * weight;
      weights += partial[head_dim + 1] * weight;
    }
    Output{params, b, head, i}.write(total, maximum, weights, c);
  }
}

// How many lanes hold a row: a power of two.
int lanes_for(int head_dim) {
  int lanes = 1;
  while (lanes * kChunk < head_dim) lanes *= 2;
  return lanes;
}

}  // namespace

void decode_general(const DecodeParams& params, const DecodePlan& plan, float* workspace, void* stream) {
  const int num_splits = static_cast<int>(plan.num_splits.value);
  const bool has_tails = params.key_side.tail != nullptr || params.value_side.tail != nullptr || params.is_ring ||
                         params.page_table != nullptr;
  const auto attend_with = [has_tails](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    return has_tails ? attend<kRows, true> : attend<kRows, false>;
  };
  auto kernel = attend_with(std::integral_constant<int, 8>{});
  if (plan.rows_per_tile == 1) kernel = attend_with(std::integral_constant<int, 1>{});
  if (plan.rows_per_tile == 4) kernel = attend_with(std::integral_constant<int, 4>{});
  const int lanes_per_worker = lanes_for(std::max(params.key_side.head_dim, params.value_side.head_dim));
  const int num_workers = kNumThreads / lanes_per_worker;
  const size_t shared_bytes = sizeof(float) * num_workers * plan.rows_per_tile * (params.value_side.head_dim + 2);
  const int64_t num_ctas = int64_t{num_splits} * plan.num_row_tiles * params.num_kv_heads * params.batch;
  launch("decode", kernel, num_ctas, kNumThreads, shared_bytes, stream, params, num_splits, plan.num_row_tiles,
         lanes_per_worker, laps_of(params), max_length_of(params),
         workspace);
  if (num_splits > 1) {
    const int64_t num_rows = int64_t{params.batch} * params.num_q_heads * params.q_len;
    launch("decode", combine, num_rows, kNumThreads, 0, stream, params, num_splits, workspace);
  }
}

}  // namespace hf_kvquant::cuda
