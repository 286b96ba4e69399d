// Sums of p · value on integer codes, with VNNI: no code is ever converted to float32. AVX-512 only; attend_table.h
// says when.
//
// Probabilities times scales become 15-bit integers relative to the largest of the tile; float32 takes a second word of
// 15 bits for the remainder. vpdpwssd adds the products of two tokens. Shifts and blends bring the codes of a token
// pair side by side, which leaves the output transposed: in a block of 16 m channels, channel m j + i is lane j of
// vector i (m = 4 for int8, 8 for int4, 16 for int2). Sums stay in that order until the end of the task.
//
//     dword of a token's codes, int8       c3 c2 c1 c0      two tokens a, b:   x = b1 b0 a1 a0   y = b3 b2 a3 a2
//     int16 pairs of channels 0 and 1      x & 00FF00FF, x >> 8 per word
//
// Symmetric codes are centred exactly: accumulators start at -center times the sum of the weights. Codes with a zero
// are not: a value equal to its zero has code 0, and then no rounding error of a weight.
#pragma once

#include "attend_work.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int kPairs = kTile / 2;
constexpr int kMaxWords = 2;
constexpr float kWeightLimit = 32767.0f;

// The m of the comment at the top: how many channels a dword of codes holds.
inline int channels_per_lane(const Side& side) { return 32 / bits_of(side.storage); }
inline int num_blocks_of(const Side& side) { return (row_bytes_of(side) + 63) / 64; }

// --- order of channels -----------------------------------------------------------------------------------------------

// Restores natural order in a transposed block: interleaves vectors of even i, then vectors of odd i, then both.
template <int kM>
inline void restore_order(const Float (&x)[kM], Float (&result)[kM]) {
  if constexpr (kM == 1) {
    result[0] = x[0];
  } else {
    Float even[kM / 2], odd[kM / 2], even_done[kM / 2], odd_done[kM / 2];
    for (int i = 0; i < kM / 2; ++i) {
      even[i] = x[2 * i];
      odd[i] = x[2 * i + 1];
    }
    restore_order<kM / 2>(even, even_done);
    restore_order<kM / 2>(odd, odd_done);
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < kM / 2; ++i) {
      result[2 * i] = _mm512_permutex2var_ps(even_done[i], low, odd_done[i]);
      result[2 * i + 1] = _mm512_permutex2var_ps(even_done[i], high, odd_done[i]);
    }
  }
}

// One row of sums in natural order.
inline void restore_integer_sums(const Side& side, const float* transposed, float* row) {
  with_constant<16, 8, 4>(channels_per_lane(side), [&](auto m) {
    for (int c = 0; c < side.head_dim; c += 16 * m) {
      Float x[m], natural[m];
      for (int i = 0; i < m; ++i) x[i] = load(transposed + c + 16 * i);
      restore_order<m>(x, natural);
      for (int i = 0; i < m; ++i) {
        const int valid = max_of(0, min_of(16, side.head_dim - c - 16 * i));
        _mm512_mask_storeu_ps(row + c + 16 * i, static_cast<__mmask16>((1u << valid) - 1), natural[i]);
      }
    }
  });
}

// --- weights ---------------------------------------------------------------------------------------------------------

// Probabilities of up to four rows and one tile in fixed point, and the factors that turn sums of products into values.
struct Weights {
  // Pairs of tokens, 16 bits each. If all channels share a scale [word][row][pair], else [word][block][row][pair][16],
  // in the lanes of the channels that they weigh.
  int32_t* pairs;
  // bias, units: [block][word][row][16], the start of each sum and what a unit is worth. zeros: [block][row][16], sums
  // of p · zero.
  int32_t* bias;
  float *units, *zeros;

  Weights(const Side& side, void* memory) : pairs(static_cast<int32_t*>(memory)) {
    const int64_t blocks = num_blocks_of(side);
    bias = pairs + kMaxWords * blocks * 4 * kPairs * 16;
    units = reinterpret_cast<float*>(bias + kMaxWords * blocks * 4 * 16);
    zeros = units + kMaxWords * blocks * 4 * 16;
  }
};

inline int64_t weights_bytes(const Side& side) {
  return (kMaxWords * kPairs * 16 + (2 * kMaxWords + 1) * 16) * int64_t{4} * 4 * num_blocks_of(side);
}

// Weights of one row and group before they are spread over lanes.
template <int kWords>
struct GroupWeights {
  alignas(64) int16_t words[kWords][kTile];
  int32_t bias[kWords];
  float unit, zero;

  // p, scale and zero: [kTile]; zero nullptr when symmetric.
  void fill(const float* p, const float* scale, const float* zeros_of_tokens, float center) {
    Float products[4], largest = zeros(), zero_sum = zeros();
    for (int i = 0; i < 4; ++i) {
      const Float x = load(p + 16 * i);
      products[i] = x * load(scale + 16 * i);
      largest = max_of(largest, products[i]);
      if (zeros_of_tokens != nullptr) zero_sum = fma(x, load(zeros_of_tokens + 16 * i), zero_sum);
    }
    const float top = largest_of(largest);
    const Float factor = broadcast(top > 1e-30f ? kWeightLimit / top : 0.0f);
    unit = top > 1e-30f ? top * (1.0f / kWeightLimit) : 0.0f;
    zero = zeros_of_tokens == nullptr ? 0.0f : sum_of(zero_sum);
    Int sums[kWords] = {};
    for (int i = 0; i < 4; ++i) {
      // NaN has no integer; it becomes 0, and the sum of p makes its whole row NaN.
      const __mmask16 is_number = _mm512_cmp_ps_mask(products[i], products[i], _CMP_ORD_Q);
      Float rounded = round_even(products[i] * factor), rest = fma(products[i], factor, -rounded);
      for (int w = 0; w < kWords; ++w) {
        // The product is exact inside the multiply-add, so `rest` is the rounding error, at most half a unit.
        if (w == 1) rounded = rest * 32768.0f;
        const Int word = (Int)_mm512_maskz_cvtps_epi32(is_number, rounded);
        sums[w] += word;
        store_as(words[w] + 16 * i, to_words(word));
      }
    }
    for (int w = 0; w < kWords; ++w) {
      bias[w] = center == 0.0f ? 0 : -static_cast<int>(center) * _mm512_reduce_add_epi32((__m512i)sums[w]);
    }
  }

  int32_t pair(int word, int i) const { return load_as<int32_t>(words[word] + 2 * i); }
};

// Row r of the weights. With groups, every lane gets the weights of the group of its channels, block by block.
template <int kWords, bool kIsGrouped>
void fill_weights(const Side& side, const Weights& weights, int r, const float* p, const float* scale,
                  const float* zero) {
  const int num_blocks = num_blocks_of(side);
  const int group_lanes = kIsGrouped ? side.head_dim / (side.num_groups * channels_per_lane(side)) : 16 * num_blocks;
  GroupWeights<kWords> groups[kIsGrouped ? 16 : 1];
  for (int block = 0; block < num_blocks; ++block) {
    const int first_group = kIsGrouped ? block * 16 / group_lanes : 0;
    const int count = kIsGrouped ? min_of((block * 16 + 15) / group_lanes + 1, side.num_groups) - first_group : 1;
    __mmask16 lanes[16];
    Int bias[kWords] = {};
    Float unit = zeros(), zero_sum = zeros();
    for (int i = 0; i < count; ++i) {
      const int g = first_group + i;
      if (kIsGrouped || block == 0) {
        groups[i].fill(p, scale + g * kTile, side.is_symmetric ? nullptr : zero + g * kTile,
                       side.is_symmetric ? center_of(side.storage) : 0.0f);
      }
      const int first = max_of(g * group_lanes - block * 16, 0), last = min_of((g + 1) * group_lanes - block * 16, 16);
      lanes[i] = kIsGrouped ? static_cast<__mmask16>((1u << last) - (1u << first)) : 0xFFFF;
      unit = _mm512_mask_mov_ps(unit, lanes[i], broadcast(groups[i].unit));
      zero_sum = _mm512_mask_mov_ps(zero_sum, lanes[i], broadcast(groups[i].zero));
      for (int w = 0; w < kWords; ++w) {
        bias[w] = (Int)_mm512_mask_set1_epi32((__m512i)bias[w], lanes[i], groups[i].bias[w]);
      }
    }
    store(weights.zeros + (block * 4 + r) * 16, zero_sum);
    for (int w = 0; w < kWords; ++w) {
      const int place = ((block * kWords + w) * 4 + r) * 16;
      store_as(weights.bias + place, bias[w]);
      store(weights.units + place, w == 0 ? unit : unit * 0x1p-15f);
      if constexpr (!kIsGrouped) {
        std::memcpy(weights.pairs + (w * 4 + r) * kPairs, groups[0].words[w], sizeof(groups[0].words[w]));
        continue;
      }
      int32_t* target = weights.pairs + ((w * num_blocks + block) * 4 + r) * kPairs * 16;
      for (int pair = 0; pair < kPairs; pair += 4) {  // four at a time, which share a mask and its group
        __m512i spread[4];
        for (int k = 0; k < 4; ++k) spread[k] = _mm512_set1_epi32(groups[0].pair(w, pair + k));
        for (int i = 1; i < count; ++i) {
          for (int k = 0; k < 4; ++k) {
            spread[k] = _mm512_mask_set1_epi32(spread[k], lanes[i], groups[i].pair(w, pair + k));
          }
        }
        for (int k = 0; k < 4; ++k) _mm512_storeu_si512(target + (pair + k) * 16, spread[k]);
      }
    }
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// One block of 64 bytes of codes and one word of the weights: sums[i] of a row are channels m j + i. int4 splits its
// eight vectors into two parts and int2 its sixteen into four, so that 4 rows x 4 vectors of sums fit the registers.
// bias, units and zeros: [row, 16]. Rows of 32 bytes leave half of the lanes idle; with two pairs of tokens at once, one
// for each half, attention took 10 to 20 % longer (int4 with 64 channels, Zen 4).
template <Storage kStorage, int kPart, int kRows, bool kIsGrouped>
inline void add_words(const uint8_t* codes, int64_t stride_t, uint64_t mask, int count, const int32_t* pairs,
                      const int32_t* bias, const float* units, bool is_first_word, const Row* rows,
                      const float* zero_sums, float* out, int out_stride) {
  Int sums[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 4; ++i) sums[r][i] = load_as<Int>(bias + r * 16);
  }
  constexpr int kBits = bits_of(kStorage), kParts = 8 / kBits, kFirst = 4 * kPart % (16 / kBits);
  const __m512i low_byte = _mm512_set1_epi32(0x00FF00FF), low_code = _mm512_set1_epi32(((1 << kBits) - 1) * 0x10001);
  constexpr __mmask32 kUpperWords = 0xAAAAAAAA;
  for (int t = 0; t < count; t += 2) {
    const uint8_t* row = codes + t * stride_t;
    const __m512i a = _mm512_maskz_loadu_epi8(mask, row);
    // If the last pair has only one token, the weight of the other is 0.
    const __m512i b = _mm512_maskz_loadu_epi8(mask, t + 1 < count ? row + stride_t : row);
    if (kPart == 0 && is_first_word) {
      prefetch(row + kTokensAhead * stride_t);
      prefetch(row + (kTokensAhead + 1) * stride_t);
    }
    const __m512i x = _mm512_mask_blend_epi16(kUpperWords, a, _mm512_slli_epi32(b, 16));
    const __m512i y = _mm512_mask_blend_epi16(kUpperWords, _mm512_srli_epi32(a, 16), b);
    __m512i v[4];
    if constexpr (kStorage == Storage::int8) {
      v[0] = _mm512_and_si512(x, low_byte);
      v[1] = _mm512_srli_epi16(x, 8);
      v[2] = _mm512_and_si512(y, low_byte);
      v[3] = _mm512_srli_epi16(y, 8);
    } else {
      const __m512i part = kPart < kParts / 2 ? x : y;
      for (int i = 0; i < 3; ++i) v[i] = _mm512_and_si512(_mm512_srli_epi16(part, (kFirst + i) * kBits), low_code);
      v[3] = _mm512_srli_epi16(part, (kFirst + 3) * kBits);
      if constexpr (kFirst + 4 < 16 / kBits) v[3] = _mm512_and_si512(v[3], low_code);  // others are above it
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512i weight = kIsGrouped ? _mm512_loadu_si512(pairs + (r * kPairs + t / 2) * 16)
                                        : _mm512_set1_epi32(pairs[r * kPairs + t / 2]);
      for (int i = 0; i < 4; ++i) sums[r][i] = (Int)_mm512_dpwssd_epi32((__m512i)sums[r][i], v[i], weight);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const Float unit = load(units + r * 16);
    for (int i = 0; i < 4; ++i) {
      float* target = out + r * out_stride + (4 * kPart + i) * 16;
      const Float before =
          is_first_word ? fma(load(target), broadcast(rows[r].rescale), load(zero_sums + r * 16)) : load(target);
      store(target, fma(__builtin_convertvector(sums[r][i], Float), unit, before));
    }
  }
}

// out = out · rescale + sum of p · value over the tokens of a tile, for kRows rows whose weights are filled. Inlined, it
// lacks registers.
template <Storage kStorage, int kRows, bool kIsGrouped>
[[gnu::noinline]] void add_weighted(const Side& side, const Weights& weights, int num_words, const uint8_t* codes,
                                    int count, const Row* rows, float* out, int out_stride) {
  const int num_blocks = num_blocks_of(side);
  for (int block = 0; block < num_blocks; ++block) {
    const int bytes = min_of(row_bytes_of(side) - block * 64, 64);
    const uint64_t mask = bytes == 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1;
    for (int w = 0; w < num_words; ++w) {
      const int32_t* pairs = weights.pairs + (kIsGrouped ? (w * num_blocks + block) * 4 * kPairs * 16 : w * 4 * kPairs);
      const int64_t place = (block * num_words + w) * 4 * 16;
      const auto run = [&](auto kernel) {
        kernel(codes + block * 64, side.codes_stride_t, mask, count, pairs, weights.bias + place, weights.units + place,
               w == 0, rows, weights.zeros + block * 4 * 16, out + block * 16 * channels_per_lane(side), out_stride);
      };
      run(add_words<kStorage, 0, kRows, kIsGrouped>);
      if constexpr (kStorage != Storage::int8) run(add_words<kStorage, 1, kRows, kIsGrouped>);
      if constexpr (kStorage == Storage::int2) {
        run(add_words<kStorage, 2, kRows, kIsGrouped>);
        run(add_words<kStorage, 3, kRows, kIsGrouped>);
      }
    }
  }
}

// The scales and zeros of the tile have been loaded, and are finite.
inline bool add_integers(const Work& work, const Values& values, int, int begin, int count) {
  const Side& side = values.side;
  const uint8_t* codes = codes_of(side, work.slot, work.task.kv_head, begin);
  const Weights weights(side, work.integer_weights);
  const int num_words = work.params.query.dtype == Dtype::fp32 ? 2 : 1;
  with_constant<false, true>(side.num_groups > 1, [&](auto is_grouped) {
    const auto fill = num_words == 1 ? fill_weights<1, is_grouped> : fill_weights<2, is_grouped>;
    for (int first = 0; first < work.task.num_rows; first += 4) {
      const int num_rows = min_of(4, work.task.num_rows - first);
      for (int r = 0; r < num_rows; ++r) {
        fill(side, weights, r, work.scores + (first + r) * kTile, work.value_scale, work.value_zero);
      }
      // Sums of a fourth row that is not there go to memory that is.
      with_constant<1, 2, 4>(num_rows == 3 ? 4 : num_rows, [&](auto rows) {
        with_integers(side.storage, [&](auto storage) {
          add_weighted<storage, rows, is_grouped>(side, weights, num_words, codes, count, values.rows + first,
                                                  values.out + first * values.stride, values.stride);
        });
      });
    }
  });
  return true;
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
