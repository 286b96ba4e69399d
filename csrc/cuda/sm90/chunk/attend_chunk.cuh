// Attention of many new tokens over codes, on the tensor cores of compute capability 9.0: 128 query rows of a key-value
// head share each tile of keys and values, so that codes are unpacked once for all of them.
//
// Two warpgroups fill tiles (fill.cuh), two attend to them, 64 rows each. Up to 64 rows both have the same, take tiles
// in turn, and their results are merged in the end. For long chunks a launch before fills all tiles, and one thread
// copies them (scratch.cuh). As in FlashAttention-3 (Shah et al. 2024), the products of one tile with keys and of the
// tile before with values run beside the softmax. schedule.cuh cuts units into thread blocks as for few rows; a step is
// a tile, and thread blocks take steps in turn.
//
// Softmax. Scores are in log2 units. P' = 2^(score + exponent of the values - shift), rounded to float16. A shift is
// raised only before P' exceeds 2^15, and the largest P' is 2^7 then. float16 keeps its precision down to 2^-14. Where
// thread blocks fill tiles, the maximum of every tile tells. With tiles from the scratch, P' is computed without one, in
// float32, and the sum of a lane's P' tells, which must be a float16 number; a tile that needs a mask looks for its
// maximum. There a shift is raised at 2^10, so that the sum of 32 that are allowed is allowed, too.
//
// Where the time goes, with tiles from the scratch (H200, 2026-11, 1,024 tokens behind 32k, by samples of
// instructions): 2,380 clocks a tile, in which products would need 2,048 if they were never interrupted;
// FlashAttention-3 takes 2,220. A warpgroup takes 300 until it has the next keys, 180 until its turn, 460 to issue its
// products, 320 until it has scores and its factors, 900 for exponentials, sums and rounding, and 220 to see that none
// is too large. Before the first tile and behind the last are 15,000 and 5,000 clocks. Under load both kernels run into
// the limit of 700 W, this one at a higher clock: fewer clocks then are a lower clock. With a maximum for every tile,
// 2,600 clocks. What brought 220 of them, together:
// - Exponentials go to the registers of their scores, and are rounded in a second pass, when the products with the
//   values of the tile before have ended. In one pass, additions and rounding wait for exponentials two or three
//   instructions back, and 8 clocks for the next one begin behind them: 12 an exponential.
// - The branches between four parts. The compiler does not move instructions across, so that each part fills these 8
//   clocks with the multiplications of the next and the additions of the last one. Without them it moves all
//   multiplications to the front: 2,490.
// - Descriptions of tiles that come from __shfl_sync. Without, every product waits for two moves to uniform registers.
// Tried and no faster:
// - That the warpgroups do not take turns (FlashAttention-3's "ping-pong"): up to 7 % slower, before the changes above.
//   That the turn is passed when products are issued instead of when scores are there: 2 to 3 % slower under load.
// - To issue the products with the values first, so that registers of weights are free before there are scores: as
//   long as before.
// - To round beside the exponentials, to other registers: the compiler moves all 32 in the end, which takes longer than
//   to round in a second pass (2,550). With registers for the weights of two tiles it moves them, too (not timed).
// - A quarter of the exponentials by a polynomial, beside the special function unit: 948 us instead of 875, with a
//   maximum. Instructions that read three registers take 2 to 3 clocks beside products.
// - Tiles and weights of bfloat16, which need less power than float16: 0 to 3 % faster, with three bits less.
// Not kept:
// - Products of int8 with keys. Queries rounded to int8 by row alone cost 2.1 to 5.4 times the error of PyTorch's bf16
//   attention, and twice that error is the bound.
// - To dequantise and let cuDNN attend, the prefix whole and the end causal, merged by lse. Of int8, 938 us instead of
//   1,158, and 3,357 instead of 4,411 for 4,096 tokens. But cuDNN plans for 37 ms whenever the number of queries or
//   keys is new, which all layers together do not gain back, and in slices of equal size only 3 % were left.
//
// Up to 32 query rows the attention kernel serves, with 16 rows a thread block: 8 tokens behind 32k take as long there
// as here. Of more rows it would read the codes once for each 16. Queries and outputs of 16 rows take so many registers
// that one or two warps a scheduler are left, and 64 to 76 % of clocks none of them can go on; with 32 rows a thread
// block 8 tokens took 75 us instead of 45.
//
// Few rows (H200, 2026-11, 16 tokens behind 32k, us, attention kernel and here): int8 82 and 53, int4 83 and 61; 8 x 8k
// + 16 97 and 84, 138 and 98. Of that, 17 are before the first tile and after the last; a tile takes 4,000 clocks, and
// those who attend wait for half of it. Who fills keys waits 1,600 for codes and takes 1,500 for some 330 instructions
// a warp, of which 150 unpack. Not kept, since no faster: codes brought into the L2 cache two to six tiles ahead (61
// instead of 60 then); tiles of 64 tokens, with the codes of the next in registers (79, most of them spilled) or in
// shared memory by cp.async (58 instead of 53): what is done once a tile, addresses, scales and two meetings, then is
// done twice as often, and 345 instructions a warp miss the instruction cache. Next: one warp that copies codes and
// scales in bulk, and four filling warps that need no meetings, since each finds the exponent itself; some 150
// instructions.
//
// GPUs without wgmma keep the kernels for few rows. Three versions with mma, measured here, took as long: 16 rows a
// warp 2,540 us, with four more warps that fill tiles 2,445, 32 rows a warp 2,890; those for few rows take 2,335 (int4)
// and 2,793 (int8). Two or three warps a scheduler cannot hide latencies, and used a third of its slots.
#pragma once

#include "scratch.cuh"

namespace hf_kvquant::cuda {

constexpr int kConsumersMeet = 3, kTurns = 4;  // numbers of their barriers; of turns there are two
constexpr int kCombineThreads = 256;
// Thread blocks that combine the parts of a unit.
template <class Shape>
constexpr int kCombineCtas = Shape::kRows * Shape::kHeadDim / 4 / kCombineThreads;
constexpr float kMostSum = 65504.f;  // of a lane's P': the largest float16 number
constexpr float kFreshBits = 7.f;    // log2 of the largest P' after a raise

// The query rows of a thread block, as float16 numbers in the layout that products read. query ≈ factor · number, and
// the factor is a power of two. Stored factors contain the softmax scale and log2(e). `constants` are what every logit
// lacks because keys are stored without their center, in log2 units. A negative softmax scale turns the query, since
// the maximum of a row is found before factors multiply it.
template <class Shape>
__device__ __forceinline__ void prepare_query(const DecodeParams& params, const DecodePlan& plan,
                                              const Segment& segment, unsigned char* memory,
                                              ChunkTables<Shape>& tables) {
  // Those that attend do this while others bring the first tiles. One lane finds where a row is for all others.
  constexpr int kWarps = kConsumers * kWarpgroup / kLanes;
  constexpr int kPerLane = Shape::kHeadDim / kLanes;
  constexpr int kSlots = (Shape::kRows + kWarps - 1) / kWarps, kAtOnce = 4;
  static_assert(kSlots <= kLanes && kSlots % kAtOnce == 0);
  using Word = std::conditional_t<kPerLane == 2, uint32_t, std::conditional_t<kPerLane == 4, uint2, uint4>>;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, c = lane * kPerLane;
  const Side& keys = params.key_side;
  const bool is_half = params.query.dtype == Dtype::fp16, is_transformed = !is_identity(params.key_transform);
  const bool is_split = is_interleaved(keys.storage);
  LaneTransform<kPerLane> transform;
  if (is_transformed) transform = {params.key_transform, keys.head_dim, segment.h, c};
  const float scale = params.softmax_scale * kLog2E, sign = scale < 0 ? -1.f : 1.f;
  const auto* const query = static_cast<const uint16_t*>(params.query.data);
  const uint64_t strides = plan.query_stride_b | plan.query_stride_h | plan.query_stride_t;
  const bool is_aligned = (reinterpret_cast<uint64_t>(query) | 2 * strides) % sizeof(Word) == 0;
  const int own = segment.row_tile * Shape::kRows + min(lane, kSlots - 1) * kWarps + warp;
  const int own_token = plan.rows.token(own);
  const int own_head = segment.h * static_cast<int>(plan.rows.num_q_per_kv.value) + plan.rows.head(own, own_token);
  const uint32_t own_place =
      segment.b * plan.query_stride_b + own_head * plan.query_stride_h + own_token * plan.query_stride_t;
  union Channels {
    Word word;
    uint16_t bits[kPerLane];
  } next[kAtOnce];
  const auto load = [&](int first) {
    for_all<kAtOnce>([&](int i) {
      const int row = segment.row_tile * Shape::kRows + (first + i) * kWarps + warp;
      const uint16_t* const from = query + __shfl_sync(kAllLanes, own_place, first + i) + c;
      next[i].word = {};
      if (row >= plan.rows.num_rows || c >= keys.head_dim) return;
      if (is_aligned) {
        next[i].word = *reinterpret_cast<const Word*>(from);
      } else {
        for_all<kPerLane>([&](int k) { next[i].bits[k] = from[k]; });
      }
    });
  };
  load(0);
#pragma unroll 1
  for (int first = 0; first < kSlots; first += kAtOnce) {
    Channels loaded[kAtOnce];
    for_all<kAtOnce>([&](int i) { loaded[i] = next[i]; });
    if (first + kAtOnce < kSlots) load(first + kAtOnce);
    for_all<kAtOnce>([&](int i) {
      const int slot = (first + i) * kWarps + warp;
      const auto& bits = loaded[i].bits;
      float x[kPerLane], constant = 0.f;
      for_all<kPerLane>([&](int k) {
        x[k] = is_half ? half_to_float(bits[k]) : __uint_as_float(static_cast<uint32_t>(bits[k]) << 16);
      });
      if (is_transformed) {
        constant = transform_query(params.key_transform, transform, keys.head_dim, lane, lane, kLanes, x);
      }
      uint32_t magnitude = 0;
      for_all<kPerLane>([&](int k) { magnitude = max(magnitude, magnitude_of(x[k])); });
      magnitude = __reduce_max_sync(kAllLanes, magnitude);
      // Of smaller queries every logit is zero in float32 anyway.
      const bool is_zero = __uint_as_float(magnitude) < 1e-30f;
      const uint32_t exponent = magnitude >> 23;
      const float to_half = is_zero ? 0.f : sign * __uint_as_float((254 + kTileBits - 1 - exponent) << 23);
      half_bits* const eight = reinterpret_cast<half_bits*>(memory + unit_at(Shape::kRows, slot, c / kChunk));
      if (is_split) {
        for_all<kPerLane>([&](int k) {
          eight[place_of_channel(keys.storage, c + k) % kChunk] = float_to_half(x[k] * to_half);
        });
      } else {
        uint32_t pairs[kPerLane / 2];
        for_all<kPerLane / 2>([&](int k) { pairs[k] = pack_halves(x[2 * k] * to_half, x[2 * k + 1] * to_half); });
        Word word;
        memcpy(&word, pairs, sizeof(word));
        *reinterpret_cast<Word*>(eight + c % kChunk) = word;
      }
      if (lane > 0) return;
      const float unit = is_zero ? 0.f : __uint_as_float((exponent - (kTileBits - 1)) << 23);
      tables.factors[slot] = is_finite_bits(magnitude) ? fabsf(scale) * unit : NAN;
      tables.constants[slot] = constant * scale;
    });
  }
}

// The rows of a warpgroup over the tiles of a thread block.
template <class Shape>
class Attention {
  static constexpr int kScores = Shape::kTileTokens / 2, kSteps = Shape::kTileTokens / 16;
  // Products with values have at most 128 columns each.
  static constexpr int kParts = Shape::kHeadDim == 256 ? 2 : 1, kOutputs = Shape::kHeadDim / kParts / 2;
  static constexpr int kBlockBytes = Shape::kTileTokens * kLineBytes;
  static constexpr bool kKeepsFactors = Shape::kIsStreamed;
  static constexpr float kMostBits = Shape::kIsStreamed ? 10.f : 15.f;  // log2 of the largest P'
  static_assert(!Shape::kIsStreamed || kScores / 2 * 1024 < kMostSum, "a sum of weights that are allowed is, too");

 public:
  __device__ __forceinline__ Attention(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                       const Span& span, unsigned char* memory, ChunkTables<Shape>& tables, int thread)
      : params_(params), tables_(tables), memory_(shared_address(memory)) {
    // The same in all lanes, which the compiler cannot see.
    const int warpgroup = warpgroup_ = __shfl_sync(kAllLanes, thread / kWarpgroup, 0);
    const int first_own = Shape::kSharesRows ? 0 : warpgroup * kRowsOfWarpgroup;
    query_ = describe(memory_ + first_own * kLineBytes);
    const auto position = [&](int row) {
      return span.first_position + plan.rows.token(min(row, plan.rows.num_rows - 1));
    };
    const int first_row = segment.row_tile * Shape::kRows;
    for_all<2>([&](int i) {
      const int slot = this->slot(i), row = min(first_row + row_of(slot), plan.rows.num_rows - 1);
      const int token = plan.rows.token(row);
      const float slope = params.alibi_slopes == nullptr
                              ? 0.f
                              : params.alibi_slopes[segment.h * static_cast<int>(plan.rows.num_q_per_kv.value) +
                                                    plan.rows.head(row, token)];
      if (column() == 0) tables.rows[slot] = {position(row), slope * kLog2E, 1.f, false};
      shift_[i] = kLeast;
      sum_[i] = 0.f;
      if constexpr (kKeepsFactors) factors_[i] = tables.factors[row_of(slot)];
    });
    const int first = first_row + first_own;
    const bool is_windowed = params.sliding_window > 0;
    const int from = is_windowed ? position(first + kRowsOfWarpgroup - 1) - params.sliding_window + 1 : span.begin;
    const Copies& copies = tables.copies;
    const int once = copies.count() > 0 ? min(copies.key_from, copies.value_from) : copies.num_tokens;
    const int until = Shape::kChangesScores ? -1 : min(min(position(first) + 1, span.end), once);
    if (thread % kLanes == 0) tables.whole[thread / kLanes] = {max(span.begin, from), until};
    __syncwarp();
    for_all<kParts, kOutputs>([&](int n, int j) { output_[n][j] = 0.f; });
  }

  // Products of a tile with keys and of the tile before with values are issued together. The latter end while the shift
  // is found, so exponentials go straight to the registers that these products read.
  __device__ __forceinline__ void attend(int first_step, int last_step, int stride) {
    uint32_t weights[kSteps][4];
    float scores[kScores], factor[2];
    int number = 0, step = first_step;  // of a tile among those of the thread block, and in the sequence
    if constexpr (Shape::kSharesRows) {
      number = warpgroup_, step += warpgroup_ * stride;
      if (step >= last_step) return;
    }
    int before = number;  // the stage of the values of the tile before; first tiles are as many as turns at most
    static_assert(Shape::kTurn <= Shape::kKeyStages && Shape::kTurn <= Shape::kValueStages);
    tables_.filled[0][number].wait(0);
    start_products();
    multiply_keys(scores, keys_of(number));
    commit_products();
    wait_for_products<0>();
    pin(scores);
    find_factors(number, factor);
    leave(0, number);
    if (!is_whole(step)) mask(scores, step, factor);
    tables_.filled[1][number].wait(0);
    raise_shifts(scores, number, factor);
    weigh(scores, number, factor, weights);
    number += Shape::kTurn, step += Shape::kTurn * stride;
#pragma unroll 1
    for (; step < last_step; step += Shape::kTurn * stride, number += Shape::kTurn) {
      const int key_stage = number % Shape::kKeyStages, value_stage = number % Shape::kValueStages;
      const auto await_values = [&] { tables_.filled[1][value_stage].wait(number / Shape::kValueStages); };
      tables_.filled[0][key_stage].wait(number / Shape::kKeyStages);
      pin(weights);
      start_products();
      multiply_keys(scores, keys_of(key_stage));
      commit_products();
      multiply_values(weights, values_of(before));
      commit_products();
      find_factors(key_stage, factor);
      const bool is_partial = !is_whole(step);
      wait_for_products<1>();
      pin(scores);
      leave(0, key_stage);
      if (__builtin_expect(is_partial, 0)) {
        // Rare, and short of registers: the weights' registers are free once the products are done.
        wait_for_products<0>();
        for_all<kParts>([&](int n) { pin(output_[n]); });
        pin(weights);
        mask(scores, step, factor);
        for_all<kSteps, 4>([&](int k, int i) { weights[k][i] = 0; });
      }
      await_values();
      const bool is_raised = raise_shifts(scores, value_stage, factor);
      wait_for_products<0>();
      for_all<kParts>([&](int n) { pin(output_[n]); });
      pin(weights);
      leave(1, before);
      before = value_stage;
      if (__builtin_expect(is_raised, 0)) lower_outputs();
      weigh(scores, value_stage, factor, weights);
    }
    finish(weights, before);
  }

  // The same with tiles from the scratch. Whole tiles do not look for a maximum: exponentials go to where the scores
  // are, and their sums, in float32, tell whether a weight is too large. Then the scores are found again.
  __device__ __forceinline__ void attend_streamed(int first_step, int last_step, int stride) {
    uint32_t weights[kSteps][4];
    float scores[kScores], factor[2];
    if (warpgroup_ == 1) pass_turn();
    tables_.filled[0][0].wait(0);
    start_products();
    multiply_keys(scores, keys_of(0));
    commit_products();
    wait_for_products<0>();
    pin(scores);
    find_factors(0, factor);
    leave(0, 0);
    if (!is_whole(first_step)) mask(scores, first_step, factor);
    tables_.filled[1][0].wait(0);
    raise_shifts(scores, 0, factor);
    weigh(scores, 0, factor, weights);
    int number = 1;
#pragma unroll 1
    for (int step = first_step + stride; step < last_step; step += stride, ++number) {
      const int key_stage = number % Shape::kKeyStages, value_stage = number % Shape::kValueStages;
      const int before = (number - 1) % Shape::kValueStages;
      const uint32_t keys = keys_of(key_stage), values = values_of(before);
      tables_.filled[0][key_stage].wait(number / Shape::kKeyStages);
      await_turn();
      pin(weights);
      start_products();
      multiply_keys(scores, keys);
      commit_products();
      multiply_values(weights, values);
      commit_products();
      find_factors(key_stage, factor);
      tables_.filled[1][value_stage].wait(number / Shape::kValueStages);
      const TileNotes& notes = tables_.notes[1][value_stage];
      const bool is_partial = !is_whole(step);
      const float exponent = notes.exponent, whole = exp2_approx(-exponent);
      float lift[2] = {exponent - shift_[0], exponent - shift_[1]}, sum[4] = {};
      pin(factor), pin(lift);
      // Four parts, each of which hides the additions of the part before and the multiplications of the next one behind
      // its exponentials. The branches keep the compiler from another order.
      const auto scale = [&](int part) {
        for_all<kScores / 4>([&](int n) {
          const int j = part * (kScores / 4) + n;
          scores[j] = fmaf(scores[j], factor[j / 2 % 2], lift[j / 2 % 2]);
        });
      };
      const auto exponentiate = [&](int part) {
        for_all<kScores / 4>([&](int n) {
          const int j = part * (kScores / 4) + n;
          scores[j] = exp2_approx(scores[j]);
        });
      };
      const auto sum_up = [&](int part) {
        for_all<kScores / 4>([&](int n) { sum[n % 4] += scores[part * (kScores / 4) + n]; });
      };
      uint32_t is_fast = !(is_partial || notes.has_bad);
      const auto goes_on = [&] {
        keep(is_fast);
        return !Shape::kChangesScores && is_fast != 0;
      };
      bool is_raised = false;
      wait_for_products<1>();
      pin(scores);
      pass_turn();
      leave(0, key_stage);
      if (!goes_on()) {
        if (is_partial) mask(scores, step, factor);
        is_raised = raise_shifts(scores, value_stage, factor);
      }
      if (goes_on()) scale(0), exponentiate(0), scale(1);
      if (goes_on()) exponentiate(1), scale(2), sum_up(0);
      if (goes_on()) exponentiate(2), scale(3), sum_up(1);
      wait_for_products<0>();
      for_all<kParts>([&](int n) { pin(output_[n]); });
      pin(weights);
      leave(1, before);
      if (goes_on()) exponentiate(3), sum_up(2), pack<0, 3>(scores, weights);
      if (goes_on()) {
        sum_up(3), pack<3, 4>(scores, weights);
        const float2 sums = {sum[0] + sum[1], sum[2] + sum[3]};
        if (__builtin_expect(are_below(kMostSum, sums), 1)) {
          add(sums, whole);
          continue;
        }
        find_scores_again(scores, step, factor, exponent, are_below(INFINITY, sums));
        is_raised = raise_shifts(scores, value_stage, factor);
      }
      if (is_raised) lower_outputs();
      weigh(scores, value_stage, factor, weights);
    }
    finish(weights, (number - 1) % Shape::kValueStages);
    if (warpgroup_ == 0) await_turn();  // the last turn, which nobody takes
  }

  // Writes maximum, sum and output to shared memory, rows of Shape::kOutputStride.
  __device__ __forceinline__ void share(float* outputs) {
    const Storage storage = params_.value_side.storage;
    __syncwarp();
    for_all<2>([&](int i) {
      sum_[i] += __shfl_xor_sync(kAllLanes, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(kAllLanes, sum_[i], 2);
      const int slot = this->slot(i);
      if (column() == 0) tables_.sums[slot] = make_float2(sum_[i] == 0.f ? -INFINITY : shift_[i], sum_[i]);
      const bool is_bad = tables_.rows[slot].is_bad;
      float* const row = outputs + slot * Shape::kOutputStride;
      for_all<kParts, kOutputs / 4, 2>([&](int n, int j, int k) {
        const int place = n * 128 + 8 * j + column() + k;
        row[channel_at(storage, place)] = is_bad ? NAN : output_[n][4 * j + 2 * i + k];
      });
    });
  }

 private:
  static constexpr float kLeast = -1e30f;  // of shifts: below all scores, and not so far that differences are NaN

  // The rows of this lane in the thread block, and the first of its columns in every eight.
  static __device__ __forceinline__ int slot(int i) {
    return threadIdx.x / kLanes * 16 + threadIdx.x % kLanes / 4 + 8 * i;
  }
  static __device__ __forceinline__ int column() { return threadIdx.x % 4 * 2; }

  // The row of a slot among those of the thread block.
  static __device__ __forceinline__ int row_of(int slot) { return slot % Shape::kRows; }

  // Turns of the two warpgroups. The first takes the first one, which the second passes to it.
  __device__ __forceinline__ void await_turn() const { meet<kConsumers * kWarpgroup>(kTurns + warpgroup_); }
  __device__ __forceinline__ void pass_turn() const { pass<kConsumers * kWarpgroup>(kTurns + 1 - warpgroup_); }

  // This warp no longer reads a stage.
  __device__ __forceinline__ void leave(int side, int stage) {
    if (threadIdx.x % kLanes == 0) tables_.emptied[side][stage].arrive();
  }

  // Tiles as products read them. The same in all lanes, which the compiler does not see otherwise; products then take
  // it from uniform registers without a move for each.
  __device__ __forceinline__ uint32_t keys_of(int stage) const {
    return __shfl_sync(kAllLanes, describe(memory_ + Shape::kKeysAt + stage * Shape::kTileBytes), 0);
  }
  __device__ __forceinline__ uint32_t values_of(int stage) const {
    const uint32_t at = memory_ + Shape::kValuesAt + stage * Shape::kTileBytes;
    return __shfl_sync(kAllLanes, describe_transposed(at, kBlockBytes), 0);
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[kScores], uint32_t keys) const {
    // Not kept from step to step where there are no registers for all of these.
    uint32_t query = query_;
    if constexpr (!Shape::kIsStreamed) keep(query);
    for_all<Shape::kHeadDim / 16>([&](int k) {
      const int line = k / 4, part = k % 4 * 32;
      multiply(scores, query + (line * Shape::kRows * kLineBytes + part) / 16,
               keys + (line * Shape::kTileTokens * kLineBytes + part) / 16, k > 0);
    });
  }

  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[kSteps][4], uint32_t values) {
    for_all<kSteps, kParts>([&](int k, int n) {
      multiply(output_[n], weights[k], values + (k * 16 * kLineBytes + n * 2 * kBlockBytes) / 16);
    });
  }

  // The products with the last tile's values.
  __device__ __forceinline__ void finish(uint32_t (&weights)[kSteps][4], int stage) {
    const uint32_t values = values_of(stage);
    pin(weights);
    for_all<kParts>([&](int n) { pin(output_[n]); });
    start_products();
    multiply_values(weights, values);
    commit_products();
    wait_for_products<0>();
    for_all<kParts>([&](int n) { pin(output_[n]); });
  }

  // The scores that were turned into exponentials: their logarithms, as far as they are finite. Others are multiplied
  // once more, which takes as long as some tiles.
  __device__ __forceinline__ void find_scores_again(float (&scores)[kScores], int step, float (&factor)[2],
                                                    float exponent, bool are_finite) const {
    if (!are_finite) {
      multiply_keys_again(scores, step);
      return;
    }
    for_all<kScores>([&](int j) { scores[j] = log2_approx(scores[j]) + (shift_[j / 2 % 2] - exponent); });
    factor[0] = factor[1] = 1.f;
  }

  // A warp's part of multiply_keys, from the scratch: in shared memory the next tile may be there already.
  __device__ __forceinline__ void multiply_keys_again(float (&scores)[kScores], int step) const {
    const unsigned char* const keys = tables_.keys + int64_t{step} * Shape::kTileBytes + 2 * column();
    const int lane = threadIdx.x % kLanes, row = lane / 4, query_row = slot(0) - row + lane % 16;
    for_all<kScores>([&](int j) { scores[j] = 0.f; });
#pragma unroll 1
    for (int unit = 0; unit < Shape::kHeadDim / kChunk; unit += 2) {
      uint32_t query[4];
      load_matrices<false>(memory_ + unit_at(Shape::kRows, query_row, unit + lane / 16), query);
      for_all<2, kScores / 4>([&](int half, int j) {
        const uint32_t key =
            *reinterpret_cast<const uint32_t*>(keys + unit_at(Shape::kTileTokens, 8 * j + row, unit + half));
        multiply_halves(reinterpret_cast<float(&)[4]>(scores[4 * j]), query[2 * half], query[2 * half + 1], key);
      });
    }
  }

  // Whether all rows of the warpgroup attend to all tokens of a tile.
  __device__ __forceinline__ bool is_whole(int step) const {
    const int first = step * Shape::kTileTokens;
    const auto whole = tables_.whole[threadIdx.x / kLanes];
    return first >= whole.from && first + Shape::kTileTokens <= whole.until;
  }

  __device__ __forceinline__ void find_factors(int stage, float (&factor)[2]) const {
    const float unit = tables_.notes[0][stage].unit;
    for_all<2>([&](int i) { factor[i] = (kKeepsFactors ? factors_[i] : tables_.factors[row_of(slot(i))]) * unit; });
  }

  // Raises the shifts that are too small for the scores of a tile. Returns whether there were such; rows then say how
  // much is kept of the sums so far.
  __device__ __forceinline__ bool raise_shifts(const float (&scores)[kScores], int stage, const float (&factor)[2]) {
    const TileNotes& notes = tables_.notes[1][stage];
    const float exponent = notes.exponent;
    if (__builtin_expect(notes.has_bad, 0)) note_bad(scores, notes);
    // Two chains of maxima for each row, since one would wait for itself.
    float maxima[4], wanted[2];
    for_all<4>([&](int j) { maxima[j] = scores[j]; });
    for_all<kScores / 4 - 1, 4>([&](int k, int j) { maxima[j] = fmaxf(maxima[j], scores[4 * (k + 1) + j]); });
    for_all<2>([&](int i) { wanted[i] = fmaxf(maxima[2 * i], maxima[2 * i + 1]); });
    for_all<2, 2>([&](int k, int i) { wanted[i] = fmaxf(wanted[i], __shfl_xor_sync(kAllLanes, wanted[i], 1 + k)); });
    bool is_beyond = false;
    for_all<2>([&](int i) {
      wanted[i] = wanted[i] * factor[i] + exponent;
      is_beyond |= wanted[i] > shift_[i] + kMostBits;
    });
    const bool is_raised = __any_sync(kAllLanes, is_beyond);
    if (__builtin_expect(is_raised, 0)) {
      for_all<2>([&](int i) {
        const float shift = wanted[i] > shift_[i] + kMostBits ? wanted[i] - kFreshBits : shift_[i];
        const float kept = exp2_approx(shift_[i] - shift);
        if (column() == 0) tables_.rows[slot(i)].kept = kept;
        sum_[i] *= kept;
        shift_[i] = shift;
      });
    }
    return is_raised;
  }

  // Lowers outputs as `raise_shifts` found.
  __device__ __forceinline__ void lower_outputs() {
    __syncwarp();
    const float kept[2] = {tables_.rows[slot(0)].kept, tables_.rows[slot(1)].kept};
    for_all<kParts, kOutputs>([&](int n, int j) { output_[n][j] *= kept[j / 2 % 2]; });
    __syncwarp();
  }

  // Rounds exponentials to weights, of parts kBegin ... kEnd - 1 of four.
  template <int kBegin, int kEnd>
  static __device__ __forceinline__ void pack(const float (&scores)[kScores], uint32_t (&weights)[kSteps][4]) {
    for_all<(kEnd - kBegin) * kSteps / 4, 4>([&](int n, int i) {
      const int k = kBegin * kSteps / 4 + n;
      weights[k][i] = pack_halves(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    });
  }

  // Whether the sums of all rows of the warp are below a limit. NaN is not: its bits are above those of all numbers.
  static __device__ __forceinline__ bool are_below(float limit, const float2& sums) {
    const uint32_t most = __float_as_uint(limit);
    return __all_sync(kAllLanes, __float_as_uint(sums.x) < most && __float_as_uint(sums.y) < most);
  }

  // Adds the sums of a tile whose values' exponent is -log2(whole).
  __device__ __forceinline__ void add(const float2& sums, float whole) {
    sum_[0] = fmaf(sums.x, whole, sum_[0]), sum_[1] = fmaf(sums.y, whole, sum_[1]);
  }

  // Turns the scores of a tile into weights, and adds these to the sums.
  __device__ __forceinline__ void weigh(float (&scores)[kScores], int stage, const float (&factor)[2],
                                        uint32_t (&weights)[kSteps][4]) {
    const float exponent = tables_.notes[1][stage].exponent;
    float sum[4] = {};
    const float lift[2] = {exponent - shift_[0], exponent - shift_[1]};
    for_all<kSteps, 4>([&](int k, int i) {
      for_all<2>([&](int half) {
        const int j = 8 * k + 2 * i + half;
        scores[j] = exp2_approx(fmaf(scores[j], factor[i % 2], lift[i % 2]));
        sum[j % 4] += scores[j];
      });
      weights[k][i] = pack_halves(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    });
    add({sum[0] + sum[1], sum[2] + sum[3]}, exp2_approx(-exponent));
  }

  // Applies factors, which become 1, softcap and ALiBi, and sets the scores of tokens that a row does not attend to
  // to -inf.
  __device__ __forceinline__ void mask(float (&scores)[kScores], int step, float (&factor)[2]) const {
    const int first = step * Shape::kTileTokens;
    int from[2], until[2];
    for_all<2>([&](int i) {
      const int position = tables_.rows[slot(i)].position;
      from[i] = params_.sliding_window > 0 ? max(tables_.begin, position - params_.sliding_window + 1) : tables_.begin;
      until[i] = min(position + 1, tables_.end);
    });
    for_all<kScores>([&](int j) { scores[j] *= factor[j / 2 % 2]; });
    factor[0] = factor[1] = 1.f;
    if constexpr (Shape::kChangesScores) change(scores, first);
    if (__builtin_expect(tables_.copies.count() > 0, 0)) {
      for_all<2>([&](int i) { hide(scores, i, first, from[i]); });
      return;
    }
    for_all<kScores>([&](int j) {
      const int i = j / 2 % 2, token = first + j / 4 * 8 + column() + j % 2;
      scores[j] = token >= from[i] && token < until[i] ? scores[j] : -INFINITY;
    });
  }

  // The last part of `mask` for row `i` where tokens have copies.
  __device__ __forceinline__ void hide(float (&scores)[kScores], int i, int first, int from) const {
    const Copies copies = tables_.copies;
    const int position = tables_.rows[slot(i)].position;
    const int start = tables_.start;
    const CopiesOfQuery query(params_, copies, position);
    uint32_t seen = 0;  // of the row's scores in their order
#pragma unroll 1
    for (int j = 0; j < kScores / 2; ++j) {
      const int place = first + j / 2 * 8 + column() + j % 2, token = copies.token(place);
      const bool is_visible = place < copies.end() && token >= from && token <= position &&
                              query.reads(copies, place, token, is_sink(token, start, params_.sink_length));
      seen |= static_cast<uint32_t>(is_visible) << j;
    }
    for_all<kScores / 2>([&](int j) {
      float& score = scores[j / 2 * 4 + 2 * i + j % 2];
      score = (seen >> j & 1) != 0 ? score : -INFINITY;
    });
  }

  // Applies softcap and ALiBi.
  __device__ __forceinline__ void change(float (&scores)[kScores], int first) const {
    if (params_.softcap > 0.f) {
      const float cap = params_.softcap * kLog2E;
      const float constant[2] = {tables_.constants[slot(0)], tables_.constants[slot(1)]};
      for_all<kScores>([&](int j) { scores[j] = capped(scores[j] + constant[j / 2 % 2], cap); });
    }
    for_all<kScores>([&](int j) {
      const auto& row = tables_.rows[slot(j / 2 % 2)];
      const int token = tables_.copies.token(first + j / 4 * 8 + column() + j % 2);
      scores[j] = fmaf(row.slope, static_cast<float>(token - row.position), scores[j]);
    });
  }

  // A row that attends to a value that is not finite has no finite output. Other rows must not notice it.
  __device__ __forceinline__ void note_bad(const float (&scores)[kScores], const TileNotes& notes) {
    for_all<kScores>([&](int j) {
      const int i = j / 4 * 8 + column() + j % 2;
      if ((notes.bad[i / 32] >> (i % 32) & 1) != 0 && scores[j] != -INFINITY) {
        tables_.rows[slot(j / 2 % 2)].is_bad = true;
      }
    });
  }

  const DecodeParams& params_;
  ChunkTables<Shape>& tables_;
  const uint32_t memory_;
  uint32_t query_;
  int warpgroup_;
  float factors_[2];  // of the query, where they are kept
  float shift_[2], sum_[2];
  float output_[kParts][kOutputs];
};

// The number of a thread block's unit among those of its launch.
__device__ __forceinline__ int64_t unit_of_cta(const DecodePlan& plan, int row_tile) {
  return (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * plan.num_row_tiles + row_tile;
}

// The result of a part in the workspace: `Partial` of combine.cuh, and the constants of its rows.
template <class Shape>
struct ChunkPartial : Partial<Shape::kRows, Shape::kHeadDim> {
  using Base = Partial<Shape::kRows, Shape::kHeadDim>;
  static constexpr int64_t kFloats = Base::kFloats + Shape::kRows;

  static __device__ __forceinline__ float* constants(float* slot) { return slot + Base::kFloats; }
};

// Adds another part of a row to `total` and `sums`: maximum and sum.
__device__ __forceinline__ void merge(float4& total, float2& sums, const float4& other, const float2& other_sums) {
  const float maximum = fmaxf(sums.x, other_sums.x);
  const float kept = exp2_below(sums.x, maximum), weight = exp2_below(other_sums.x, maximum);
  sums = {maximum, sums.y * kept + other_sums.y * weight};
  total.x = total.x * kept + other.x * weight, total.y = total.y * kept + other.y * weight;
  total.z = total.z * kept + other.z * weight, total.w = total.w * kept + other.w * weight;
}

// Maximum and sum of a row, of both warpgroups if they share rows.
template <class Shape>
__device__ __forceinline__ float2 sums_of_result(const ChunkTables<Shape>& tables, int row) {
  float2 sums = tables.sums[row];
  if constexpr (Shape::kSharesRows) {
    float4 none = {};
    merge(none, sums, none, tables.sums[row + Shape::kRows]);
  }
  return sums;
}

// Four channels of it, from shared memory.
template <class Shape>
__device__ __forceinline__ float4 row_of_result(const float* outputs, const ChunkTables<Shape>& tables, int row,
                                                int c) {
  float4 values = *reinterpret_cast<const float4*>(outputs + row * Shape::kOutputStride + c);
  if constexpr (Shape::kSharesRows) {
    float2 sums = tables.sums[row];
    const int other = row + Shape::kRows;
    merge(values, sums, *reinterpret_cast<const float4*>(outputs + other * Shape::kOutputStride + c),
          tables.sums[other]);
  }
  return values;
}

// Writes the rows in shared memory as this thread block's part of the unit, for combine_chunk.
template <class Shape>
__device__ __forceinline__ void store_part(const DecodePlan& plan, const Segment& segment, const float* outputs,
                                           const ChunkTables<Shape>& tables, float* workspace, int thread) {
  using Slot = ChunkPartial<Shape>;
  constexpr int kThreads = kConsumers * kWarpgroup, kQuads = Shape::kHeadDim / 4;
  float* const slot = slot_of<Slot>(plan, unit_of_cta(plan, segment.row_tile), segment.part, workspace);
  const int num_rows = min(plan.rows.num_rows - segment.row_tile * Shape::kRows, Shape::kRows);
#pragma unroll 4
  for (int index = thread; index < num_rows * kQuads; index += kThreads) {
    const int row = index / kQuads, c = index % kQuads * 4;
    __stcg(Slot::values(slot, row, c), row_of_result(outputs, tables, row, c));
    if (c > 0) continue;
    __stcg(Slot::sums(slot, row), sums_of_result(tables, row));
    __stcg(Slot::constants(slot) + row, tables.constants[row]);
  }
}

// Writes them as the unit's output. Where a row goes and what it is multiplied with, one lane finds for all others. Not
// inlined: the compiler then orders the loop before it better, 1,096 us instead of 1,145 (as above).
template <class Shape>
__device__ __noinline__ void store_output(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                          const float* outputs, const ChunkTables<Shape>& tables, int thread) {
  constexpr int kQuads = Shape::kHeadDim / 4, kRowsOfWarp = Shape::kRows / (kConsumers * kWarpgroup / kLanes);
  const int lane = thread % kLanes, first = thread / kLanes * kRowsOfWarp;
  Output output;
  float factor = 0.f;
  if (lane < kRowsOfWarp) {
    output = {params, plan, segment, tables.constants, Shape::kRows, first + lane, 0};
    const float2 sums = sums_of_result(tables, first + lane);
    factor = output.finish(sums.x, sums.y);
  }
  const auto begin = reinterpret_cast<unsigned long long>(output.values);
  const bool is_half = params.query.dtype == Dtype::fp16;
#pragma unroll 4
  for (int index = lane; index < kRowsOfWarp * kQuads; index += kLanes) {
    const int row = index / kQuads, c = index % kQuads * 4;
    uint2* const values = reinterpret_cast<uint2*>(__shfl_sync(kAllLanes, begin, row));
    const float own_factor = __shfl_sync(kAllLanes, factor, row);
    if (values == nullptr || c >= params.value_side.head_dim) continue;
    const float4 total = row_of_result(outputs, tables, first + row, c);
    values[c / 4] = Output::packed(total, own_factor, is_half);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attend_chunk(const __grid_constant__ DecodeParams params, const __grid_constant__ NewTokens,
                 const __grid_constant__ DecodePlan plan, float* workspace) {
#if KVQ_HAS_WGMMA
  extern __shared__ __align__(kSwizzleBytes) unsigned char memory[];
  auto& tables = *reinterpret_cast<ChunkTables<Shape>*>(memory + Shape::kTablesAt);
  Segment segment = segment_of_cta(plan);
  // The last rows attend to the most tokens, so they begin first.
  segment.row_tile = plan.num_row_tiles - 1 - segment.row_tile;
  if constexpr (Shape::kIsStreamed) segment.b += plan.first_b, segment.h += plan.first_h;
  if (threadIdx.x == 0) {
    for_all<2, Shape::kMostStages>([&](int side, int stage) {
      tables.filled[side][stage].init(Shape::kIsStreamed ? 1 : kWarpgroup);
      tables.emptied[side][stage].init(Shape::kReaders * kWarpgroup / kLanes);
    });
  }
  // fill_dense has waited for the launches before it. Who needs its tiles, or writes to its workspace, waits for it.
  if (Shape::kIsStreamed || plan.dense[0].count() + plan.dense[1].count() == 0) wait_for_launch_before();
  const Bounds bounds(params, plan, segment.b);
  const Copies copies(params, plan, bounds, segment.b);
  const Span span = find_rounds<Shape::kTileTokens>(params, plan, bounds, segment, copies.count());
  if (!segment.has_rounds()) return;
  if (threadIdx.x == 0) {
    tables.begin = span.begin, tables.end = span.end, tables.start = max(bounds.start, 0);
    tables.copies = copies;
    if constexpr (Shape::kIsStreamed) {
      const int first = step_of<Shape::kTileTokens>(whole_span(params, plan, bounds).begin);
      tables.keys = TilePlaces<Shape>(plan, workspace, true).tiles - int64_t{first} * Shape::kTileBytes;
    }
  }
  show_to_products();  // the barriers
  __syncthreads();

  const int stride = plan.num_splits.value, first_step = segment.first_step, last_step = segment.last_step;
  const int thread = threadIdx.x % kWarpgroup, role = threadIdx.x / kWarpgroup - kConsumers;
  if (role == 0) {
    set_registers<Shape::kFillerRegisters, false>();
    if constexpr (Shape::kIsStreamed) {
      if (thread > 0) return;
      show_to_copies();
      copy_tiles<Shape>(params, plan, bounds, workspace, memory, tables, first_step, last_step, stride);
    } else {
      fill_tiles<Shape, true>(
          {params, plan, segment, span, bounds, memory + Shape::kKeysAt, tables, workspace, thread},
          {first_step, last_step, stride});
    }
  } else if (!Shape::kIsStreamed && role == 1) {
    set_registers<Shape::kFillerRegisters, false>();
    if constexpr (!Shape::kIsStreamed) {
      fill_tiles<Shape, false>(
          {params, plan, segment, span, bounds, memory + Shape::kValuesAt, tables, workspace, thread},
          {first_step, last_step, stride});
    }
  } else {
    set_registers<Shape::kConsumerRegisters, true>();
    prepare_query<Shape>(params, plan, segment, memory, tables);
    show_to_products();
    meet<kConsumersMeet, kConsumers * kWarpgroup>();
    Attention<Shape> attention(params, plan, segment, span, memory, tables, threadIdx.x);
    if constexpr (Shape::kIsStreamed) {
      attention.attend_streamed(first_step, last_step, stride);
    } else {
      attention.attend(first_step, last_step, stride);
    }
    meet<kConsumersMeet, kConsumers * kWarpgroup>();
    float* const outputs = reinterpret_cast<float*>(memory);
    attention.share(outputs);
    wait_for_launch_before();
    meet<kConsumersMeet, kConsumers * kWarpgroup>();
    if (segment.num_parts == 1) {
      store_output<Shape>(params, plan, segment, outputs, tables, threadIdx.x);
    } else {
      store_part<Shape>(plan, segment, outputs, tables, workspace + plan.tile_floats, threadIdx.x);
    }
  }
#endif
}

// Merges the parts of all units, in the order of the sequence. A launch of its own: many thread blocks start and read
// the parts in less time than one of those that attended would take (32 tokens behind 32k: 63 us instead of 88).
template <class Shape>
__global__ void __launch_bounds__(kCombineThreads)
    combine_chunk(const __grid_constant__ DecodeParams params, const __grid_constant__ NewTokens,
                  const __grid_constant__ DecodePlan plan, float* workspace) {
  using Slot = ChunkPartial<Shape>;
  constexpr int kQuads = Shape::kHeadDim / 4, kAtOnce = 8;
  wait_for_launch_before();
  Segment segment = {};
  segment.b = plan.first_b + blockIdx.z, segment.h = plan.first_h + blockIdx.y;
  segment.row_tile = blockIdx.x / kCombineCtas<Shape>;
  segment.splits = plan.num_splits;
  const Bounds bounds(params, plan, segment.b);
  find_rounds<Shape::kTileTokens>(params, plan, bounds, segment, Copies(params, plan, bounds, segment.b).count());
  if (segment.num_parts == 1) return;
  const int row = blockIdx.x % kCombineCtas<Shape> * (kCombineThreads / kQuads) + threadIdx.x / kQuads;
  const int c = threadIdx.x % kQuads * 4;
  float* const slots = slot_of<Slot>(plan, unit_of_cta(plan, segment.row_tile), 0, workspace + plan.tile_floats);
  const Output output(params, plan, segment, Slot::constants(slots), Shape::kRows, row, c);
  if (!output.exists()) return;
  float4 total = {};
  float2 all = {-INFINITY, 0.f};
#pragma unroll 1
  for (int first = 0; first < segment.num_parts; first += kAtOnce) {
    float2 sums[kAtOnce];
    float4 values[kAtOnce];
    for_all<kAtOnce>([&](int i) {
      float* const slot = slots + (first + i) * Slot::kFloats;
      const bool is_there = first + i < segment.num_parts;
      sums[i] = is_there ? __ldcg(Slot::sums(slot, row)) : make_float2(-INFINITY, 0.f);
      values[i] = is_there ? __ldcg(Slot::values(slot, row, c)) : float4{};
    });
    for_all<kAtOnce>([&](int i) { merge(total, all, values[i], sums[i]); });
  }
  output.write(total, all.x, all.y);
}

}  // namespace hf_kvquant::cuda
