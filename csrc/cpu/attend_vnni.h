// The two inner products of attend.h on integer codes, with VNNI: no code is ever converted to float32. Included by
// attend.h for AVX-512 only; serves int8 and int4 in every granularity whose groups fill whole chunks. attend.h decides
// when to use these products.
//
// Keys. A query row is written in fixed point, relative to its largest channel: 16 bits (two limbs of 8) when the model
// computes in 16 bits, 32 bits (four limbs) for float32. A unit is a power of two, so nearly every channel is exact.
// vpdpbusd multiplies unsigned codes by signed limbs. Lanes hold *rows*: the load broadcasts a chunk of 16 bytes of one
// token, which is multiplied by the same 16 channels of four query rows. So four heads share each load, and a sum
// crosses only four lanes.
//
// A row of a 16-bit model takes four limbs, too, if one channel is so large that others would have few bits left.
//
//     zmm of codes      | token t: bytes 0..15 | the same | the same | the same |
//     zmm of limbs      | row 0                | row 1    | row 2    | row 3    |
//
// Values. Probabilities times scales become 15-bit integers relative to the largest of the tile; float32 takes a second
// word of 15 bits for the remainder. vpdpwssd adds the products of two tokens. Shifts and blends bring the codes of a
// token pair side by side, which leaves the output transposed: in a block of 16 m channels, channel m j + i is lane j
// of vector i (m = 4 for int8, 8 for int4). Sums stay in that order until the end of the task.
//
//     dword of a token's codes, int8       c3 c2 c1 c0      two tokens a, b:   x = b1 b0 a1 a0   y = b3 b2 a3 a2
//     int16 pairs of channels 0 and 1      x & 00FF00FF, x >> 8 per word
//
// Offsets of symmetric codes are exact: accumulators start at -offset times the sum of the limbs, or of the weights.
// Keys with a zero are centred in the same way, at 128 or 8, and the zero is adjusted to match: rounding errors of a
// query are then multiplied by smaller codes, and there is less cancellation.
#pragma once

#include "dequantize.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int kPairs = kTile / 2;
constexpr int kMaxLimbs = 4;
constexpr int kMaxRowBytes = 256;  // see serves_keys
constexpr float kWeightLimit = 32767.0f;
inline int code_offset(const Side& side) { return !side.is_symmetric ? 0 : side.storage == Storage::int8 ? 128 : 8; }

// --- keys ------------------------------------------------------------------------------------------------------------

// Up to four query rows as limbs. `limbs` is [chunk][nibble][limb][64 bytes]; the 64 bytes are num_rows parts, one for
// each row's share of the chunk.
struct QuerySet {
  int num_rows;     // 1, 2 or 4; 3 rows take 4, one of them empty
  int num_limbs;    // 2 or 4
  int chunk_bytes;  // 64 / num_rows
  int num_chunks;
  const int8_t* limbs;
  const int32_t* bias;  // [group][limb][16]
  const float* steps;   // [16]: what one unit of fixed point is worth in the row of each lane
};

inline bool serves_keys(const Side& side) {
  if (side.storage != Storage::int8 && side.storage != Storage::int4) return false;
  if (side.head_dim > 256) return false;  // sums of 16-bit queries and 8-bit codes fill 31 bits at 256 channels
  const int group_bytes = side.head_dim / side.num_groups / (side.storage == Storage::int4 ? 2 : 1);
  return side.num_groups == 1 || group_bytes % 16 == 0;
}

inline int64_t query_set_bytes(const Side& side) {
  return kMaxLimbs * (static_cast<int64_t>(round_up(side.head_dim, 128)) * 4 + side.num_groups * 64) + 64;
}

// Writes one row in fixed point. place(nibble, limb, byte) is where the limbs go that belong to byte `byte` of a row of
// codes and the bytes after it, 8 or 16 at a time. sums[group][limb] receives the sums over each group. Returns what a
// unit is worth; NaN for a query that is not finite, so that all of its scores are NaN.
template <class Place>
inline float fix_row(const Side& side, const float* row, int num_limbs, Place place, int32_t* sums) {
  const bool is_int4 = side.storage == Storage::int4;
  const int group_size = side.head_dim / side.num_groups;
  __m512 sizes = zeros(), flaws = zeros();
  for (int c = 0; c < side.head_dim; c += 16) {  // rows are padded to 16 with zeros
    const __m512 x = load(row + c);
    sizes = max_of(sizes, abs_of(x));
    flaws = or_bits(flaws, sub(x, x));
  }
  const bool is_finite = sum_of(flaws) == 0.0f;
  const float limit = num_limbs == 4 ? 2139062016.0f : 32639.0f;  // 127 in every limb
  const float largest = largest_of(sizes);
  const bool is_zero = !is_finite || largest < 1e-20f;
  // The smallest power of two that fits: all but the smallest channels are then whole numbers of units.
  float unit = 0.0f;
  if (!is_zero) {
    unit = bit_cast<float>(bit_cast<uint32_t>(largest / limit) & 0xFF800000);  // the power of two below
    if (largest > limit * unit) unit *= 2.0f;
  }
  const __m512 factor = broadcast(is_zero ? 0.0f : 1.0f / unit);
  for (int g = 0; g < side.num_groups; ++g) {
    __m512i totals[kMaxLimbs];
    for (int limb = 0; limb < num_limbs; ++limb) totals[limb] = _mm512_setzero_si512();
    for (int c = g * group_size; c < (g + 1) * group_size; c += 16) {
      __m512i fixed = is_zero ? _mm512_setzero_si512() : _mm512_cvtps_epi32(mul(load(row + c), factor));
      for (int limb = 0; limb < num_limbs; ++limb) {
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(fixed, 24), 24);
        fixed = _mm512_srai_epi32(_mm512_sub_epi32(fixed, low), 8);
        totals[limb] = _mm512_add_epi32(totals[limb], low);
        const __m128i bytes = _mm512_cvtepi32_epi8(low);
        if (is_int4) {  // even channels are in low nibbles, odd ones in high nibbles
          _mm_storel_epi64(reinterpret_cast<__m128i*>(place(0, limb, c / 2)), _mm_cvtepi16_epi8(bytes));
          _mm_storel_epi64(reinterpret_cast<__m128i*>(place(1, limb, c / 2)),
                           _mm_cvtepi16_epi8(_mm_srli_epi16(bytes, 8)));
        } else {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(place(0, limb, c)), bytes);
        }
      }
    }
    for (int limb = 0; limb < num_limbs; ++limb) sums[g * num_limbs + limb] = _mm512_reduce_add_epi32(totals[limb]);
  }
  return is_finite ? unit : std::numeric_limits<float>::quiet_NaN();
}

// Whether one channel of a row is so large that two limbs leave fewer than 9 bits to a quarter of the channels or more.
// Keys may be large enough in those channels to make them matter. False where the query already contains the scales of
// channels: small channels matter little there.
inline bool needs_four_limbs(const Side& side, const float* row) {
  if (side.has_channel_scales) return false;
  __m512 sizes = zeros();
  for (int c = 0; c < side.head_dim; c += 16) sizes = max_of(abs_of(load(row + c)), sizes);
  const float largest = largest_of(sizes);
  if (largest == kInfinity) return false;  // such a row becomes NaN, and must not change others in its set
  const __m512 few_bits = broadcast(largest * 0x1p-6f);
  int num_small = 0;
  for (int c = 0; c < side.head_dim; c += 16) {
    const __m512 size = abs_of(load(row + c));
    const __mmask16 is_small = _mm512_cmp_ps_mask(size, few_bits, _CMP_LT_OQ);
    num_small += __builtin_popcount(_mm512_mask_cmp_ps_mask(is_small, size, zeros(), _CMP_GT_OQ));
  }
  return 4 * num_small >= side.head_dim;
}

// Writes 1 to 4 float32 rows in fixed point to `memory`.
inline QuerySet make_query_set(const Side& side, const float* rows, int stride, int count, bool is_float32,
                               uint8_t* memory) {
  QuerySet set;
  set.num_rows = count == 1 && side.num_groups == 1 ? 1 : count == 2 && side.num_groups == 1 ? 2 : 4;
  bool has_many_limbs = is_float32;
  for (int r = 0; r < count && !has_many_limbs; ++r) has_many_limbs = needs_four_limbs(side, rows + r * stride);
  set.num_limbs = has_many_limbs ? 4 : 2;
  set.chunk_bytes = 64 / set.num_rows;
  const int num_nibbles = side.storage == Storage::int4 ? 2 : 1;
  const int row_bytes = side.head_dim / num_nibbles;
  set.num_chunks = (row_bytes + set.chunk_bytes - 1) / set.chunk_bytes;
  const int64_t limb_bytes = static_cast<int64_t>(set.num_chunks) * num_nibbles * set.num_limbs * 64;
  const int64_t bias_bytes = static_cast<int64_t>(side.num_groups) * set.num_limbs * 64;
  int8_t* limbs = reinterpret_cast<int8_t*>(memory);
  int32_t* bias = reinterpret_cast<int32_t*>(memory + limb_bytes);
  float* steps = reinterpret_cast<float*>(memory + limb_bytes + bias_bytes);
  std::memset(memory, 0, limb_bytes + bias_bytes + 64);
  const int lanes = 16 / set.num_rows;
  const int chunk_shift = set.num_rows == 4 ? 4 : set.num_rows == 2 ? 5 : 6;
  for (int r = 0; r < count; ++r) {
    int32_t sums[256 / 16 * kMaxLimbs];
    const auto place = [&](int nibble, int limb, int byte) {
      const int chunk = byte >> chunk_shift;
      return limbs + ((chunk * num_nibbles + nibble) * set.num_limbs + limb) * 64 + r * set.chunk_bytes +
             (byte & (set.chunk_bytes - 1));
    };
    const float step = fix_row(side, rows + r * stride, set.num_limbs, place, sums);
    for (int i = 0; i < lanes; ++i) steps[r * lanes + i] = step;
    for (int i = 0; i < side.num_groups * set.num_limbs; ++i)
      bias[i * 16 + r * lanes] = -static_cast<int>(center_of(side)) * sums[i];
  }
  set.limbs = limbs;
  set.bias = bias;
  set.steps = steps;
  return set;
}

// A chunk of one token, repeated for every row.
template <int kRows>
inline __m512i load_chunk(const uint8_t* p) {
  if constexpr (kRows == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (kRows == 2) return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  if constexpr (kRows == 1) return _mm512_loadu_si512(p);
}

// The last, shorter chunk of a row. Reads nothing past the row.
template <int kRows>
inline __m512i load_part(const uint8_t* p, int bytes) {
  const __m512i part = _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p);
  if constexpr (kRows == 4) return _mm512_broadcast_i32x4(_mm512_castsi512_si128(part));
  if constexpr (kRows == 2) return _mm512_broadcast_i64x4(_mm512_castsi512_si256(part));
  if constexpr (kRows == 1) return part;
}

// Sums over each 128 bits: lane t of quarter l is the sum of quarter l of x[t].
inline __m512i sum_quarters(__m512i x0, __m512i x1, __m512i x2, __m512i x3) {
  const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(x0, x1), _mm512_unpackhi_epi32(x0, x1));
  const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(x2, x3), _mm512_unpackhi_epi32(x2, x3));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}

// The same for rows that take two or four quarters: every quarter of a row gets the sum over all of them.
template <int kRows>
inline __m512i sum_tokens(__m512i x0, __m512i x1, __m512i x2, __m512i x3) {
  __m512i sums = sum_quarters(x0, x1, x2, x3);
  if constexpr (kRows <= 2) sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xB1));
  if constexpr (kRows == 1) sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0x4E));
  return sums;
}

// Row r of the scores of four tokens goes to scores + r · kTile.
template <int kRows>
inline void store_rows(float* scores, __m512 x) {
  _mm_storeu_ps(scores, _mm512_castps512_ps128(x));
  if constexpr (kRows == 2) _mm_storeu_ps(scores + kTile, _mm512_extractf32x4_ps(x, 2));
  if constexpr (kRows == 4) {
    _mm_storeu_ps(scores + kTile, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(scores + 2 * kTile, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(scores + 3 * kTile, _mm512_extractf32x4_ps(x, 3));
  }
}

// Chunks first_chunk ... last_chunk - 1 of query · centred codes for `count` tokens, in float32. 8 tokens at a time
// with two limbs and 4 with four: 16 accumulators, as vpdpbusd takes 4 clocks.
template <Storage kStorage, int kRows, int kLimbs>
void score_codes(const Side& side, const QuerySet& set, int group, int first_chunk, int last_chunk,
                 const uint8_t* codes, int count, float* scores) {
  constexpr int kTokens = kLimbs == 2 ? 8 : 4;
  constexpr int kNibbles = kStorage == Storage::int4 ? 2 : 1;
  const int row_bytes = side.head_dim / kNibbles;
  const int part_bytes = row_bytes % set.chunk_bytes;
  const int full_chunks = last_chunk == set.num_chunks && part_bytes != 0 ? last_chunk - 1 : last_chunk;
  const __m512 steps = load(set.steps);
  const __m512i mask = _mm512_set1_epi8(15);
  const int64_t ahead = kTokensAhead * side.codes_stride_t + first_chunk * set.chunk_bytes;
  const int bytes_used = (last_chunk - first_chunk) * set.chunk_bytes;
  // Of the groups in one cache line, the first prefetches it.
  const bool is_first_of_line = first_chunk * set.chunk_bytes % 64 == 0;
  for (int t = 0; t < count; t += kTokens) {
    const uint8_t* tokens = codes + t * side.codes_stride_t;
    int64_t stride = side.codes_stride_t;
    uint8_t copy[kTokens * kMaxRowBytes];
    if (t + kTokens > count) {  // nothing may be read after the last token
      for (int n = 0; n < count - t; ++n) std::memcpy(copy + n * kMaxRowBytes, tokens + n * stride, row_bytes);
      tokens = copy;
      stride = kMaxRowBytes;
    }
    __m512i sums[kTokens][kLimbs];
    for (int limb = 0; limb < kLimbs; ++limb) {
      const __m512i bias = _mm512_loadu_si512(set.bias + (group * kLimbs + limb) * 16);
      for (int n = 0; n < kTokens; ++n) sums[n][limb] = bias;
    }
    const auto add_chunk = [&](int chunk, auto load_at) {
      const int8_t* limbs = set.limbs + chunk * kNibbles * kLimbs * 64;
      __m512i q[kNibbles][kLimbs];
      for (int i = 0; i < kNibbles * kLimbs; ++i) q[i / kLimbs][i % kLimbs] = _mm512_loadu_si512(limbs + i * 64);
      for (int n = 0; n < kTokens; ++n) {
        const __m512i bytes = load_at(tokens + n * stride + chunk * set.chunk_bytes);
        if constexpr (kStorage == Storage::int8) {
          for (int limb = 0; limb < kLimbs; ++limb)
            sums[n][limb] = _mm512_dpbusd_epi32(sums[n][limb], bytes, q[0][limb]);
        } else {
          const __m512i even = _mm512_and_si512(bytes, mask);
          const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
          for (int limb = 0; limb < kLimbs; ++limb) {
            sums[n][limb] = _mm512_dpbusd_epi32(sums[n][limb], even, q[0][limb]);
            sums[n][limb] = _mm512_dpbusd_epi32(sums[n][limb], odd, q[1][limb]);
          }
        }
      }
    };
    for (int chunk = first_chunk; chunk < full_chunks; ++chunk) {
      add_chunk(chunk, [](const uint8_t* p) { return load_chunk<kRows>(p); });
    }
    if (full_chunks < last_chunk) {
      add_chunk(full_chunks, [part_bytes](const uint8_t* p) { return load_part<kRows>(p, part_bytes); });
    }
    for (int n = 0; is_first_of_line && n < kTokens; ++n) {
      for (int i = 0; i < bytes_used; i += 64) prefetch(tokens + n * stride + ahead + i);
    }
    for (int n = 0; n < kTokens; n += 4) {
      __m512i high[4];
      for (int i = 0; i < 4; ++i) {
        high[i] = _mm512_add_epi32(_mm512_slli_epi32(sums[n + i][kLimbs - 1], 8), sums[n + i][kLimbs - 2]);
      }
      __m512 x = _mm512_cvtepi32_ps(sum_tokens<kRows>(high[0], high[1], high[2], high[3]));
      if constexpr (kLimbs == 4) {
        __m512i low[4];
        for (int i = 0; i < 4; ++i) low[i] = _mm512_add_epi32(_mm512_slli_epi32(sums[n + i][1], 8), sums[n + i][0]);
        x = fma(x, broadcast(65536.0f), _mm512_cvtepi32_ps(sum_tokens<kRows>(low[0], low[1], low[2], low[3])));
      }
      store_rows<kRows>(scores + t + n, mul(x, steps));
    }
  }
}

template <Storage kStorage>
inline void score_codes_of(const Side& side, const QuerySet& set, int group, int first_chunk, int last_chunk,
                           const uint8_t* codes, int count, float* scores) {
  const auto run = [&](auto kernel) { kernel(side, set, group, first_chunk, last_chunk, codes, count, scores); };
  if (set.num_limbs == 2) {
    if (set.num_rows == 4) return run(score_codes<kStorage, 4, 2>);
    if (set.num_rows == 2) return run(score_codes<kStorage, 2, 2>);
    return run(score_codes<kStorage, 1, 2>);
  }
  if (set.num_rows == 4) return run(score_codes<kStorage, 4, 4>);
  if (set.num_rows == 2) return run(score_codes<kStorage, 2, 4>);
  return run(score_codes<kStorage, 1, 4>);
}

// query · key for the rows of a set: integer products with codes, then one scale and zero per token and group.
//   scale, zero   [num_groups, kTile]; zero is that of centred codes, nullptr when symmetric
//   query_sums    [row, num_groups], sums of the query over the channels of a group
//   raw           [4, kTile] scratch
//   scores        [row, kTile]
inline void score_set(const Side& side, const QuerySet& set, int num_rows, const uint8_t* codes, int count,
                      const float* scale, const float* zero, const float* query_sums, float* raw, float* scores) {
  const int chunks = set.num_chunks / side.num_groups;
  for (int g = 0; g < side.num_groups; ++g) {
    const int last = side.num_groups == 1 ? set.num_chunks : (g + 1) * chunks;
    if (side.storage == Storage::int8) {
      score_codes_of<Storage::int8>(side, set, g, g * chunks, last, codes, count, raw);
    } else {
      score_codes_of<Storage::int4>(side, set, g, g * chunks, last, codes, count, raw);
    }
    for (int r = 0; r < num_rows; ++r) {
      const __m512 query_sum = broadcast(query_sums[r * side.num_groups + g]);
      for (int t = 0; t < count; t += 16) {
        __m512 x = mul(load(raw + r * kTile + t), load(scale + g * kTile + t));
        if (zero != nullptr) x = fma(load(zero + g * kTile + t), query_sum, x);
        float* target = scores + r * kTile + t;
        store(target, g == 0 ? x : add(load(target), x));
      }
    }
  }
}

// --- values ----------------------------------------------------------------------------------------------------------

inline bool serves_values(const Side& side) { return side.storage == Storage::int8 || side.storage == Storage::int4; }

// The m of the comment at the top: how many channels a dword of codes holds.
inline int channels_per_lane(const Side& side) { return side.storage == Storage::int4 ? 8 : 4; }

// Where channel c is in the transposed blocks.
inline int transposed_place(int c, int m) { return c / (16 * m) * (16 * m) + c % m * 16 + c % (16 * m) / m; }

inline void interleave(__m512 a, __m512 b, __m512& low, __m512& high) {
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  low = _mm512_permutex2var_ps(a, first, b);
  high = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
}

// Restores natural order in a transposed block: interleaves vectors of even i, then those of odd i, then both.
template <int kM>
inline void restore_order(const __m512 (&x)[kM], __m512 (&result)[kM]) {
  if constexpr (kM == 1) {
    result[0] = x[0];
  } else {
    __m512 even[kM / 2], odd[kM / 2], even_done[kM / 2], odd_done[kM / 2];
    for (int i = 0; i < kM / 2; ++i) {
      even[i] = x[2 * i];
      odd[i] = x[2 * i + 1];
    }
    restore_order<kM / 2>(even, even_done);
    restore_order<kM / 2>(odd, odd_done);
    for (int i = 0; i < kM / 2; ++i) interleave(even_done[i], odd_done[i], result[2 * i], result[2 * i + 1]);
  }
}

template <int kM>
inline void restore_row(const float* transposed, int head_dim, float* row) {
  for (int c = 0; c < head_dim; c += 16 * kM) {
    __m512 x[kM], natural[kM];
    for (int i = 0; i < kM; ++i) x[i] = load(transposed + c + 16 * i);
    restore_order<kM>(x, natural);
    for (int i = 0; i < kM; ++i) {
      const int valid = max_of(0, min_of(16, head_dim - c - 16 * i));
      _mm512_mask_storeu_ps(row + c + 16 * i, static_cast<__mmask16>((1u << valid) - 1), natural[i]);
    }
  }
}

// Probabilities of up to four rows and one tile in fixed point, and the factors that turn sums of products into values.
struct Weights {
  // Pairs of tokens, 16 bits each. If all channels share a scale [word][row][pair], else [word][block][row][pair][16],
  // in the lanes of the channels that they weigh.
  int32_t* pairs;
  // bias, units: [block][word][row][16], the start of each sum and what a unit is worth. zeros: [block][row][16], sums
  // of p · zero.
  int32_t* bias;
  float *units, *zeros;
};

constexpr int kMaxWords = 2;

inline int num_blocks_of(const Side& side) {
  const int block = 16 * channels_per_lane(side);
  return (side.head_dim + block - 1) / block;
}

inline int64_t weights_bytes(const Side& side) {
  const int64_t blocks = num_blocks_of(side);
  return (kMaxWords * blocks * 4 * kPairs * 16 + (2 * kMaxWords + 1) * blocks * 4 * 16) * 4 +
         kMaxWords * static_cast<int64_t>(side.num_groups) * kPairs * 4 + 64;
}

inline Weights make_weights(const Side& side, uint8_t* memory) {
  const int64_t blocks = num_blocks_of(side);
  Weights weights;
  weights.pairs = reinterpret_cast<int32_t*>(memory);
  weights.bias = weights.pairs + kMaxWords * blocks * 4 * kPairs * 16;
  weights.units = reinterpret_cast<float*>(weights.bias + kMaxWords * blocks * 4 * 16);
  weights.zeros = weights.units + kMaxWords * blocks * 4 * 16;
  return weights;
}

// Weights of one row and group before they are spread over lanes.
template <int kWords>
struct GroupWeights {
  alignas(64) int16_t words[kWords][kTile];
  int32_t bias[kWords];
  float unit, zero;

  // p, scale and zero: [kTile]; zero nullptr when symmetric.
  void fill(const float* p, const float* scale, const float* zeros_of_tokens, int offset) {
    __m512 products[4];
    __m512 largest = zeros(), zero_sum = zeros();
    for (int i = 0; i < 4; ++i) {
      const __m512 x = load(p + 16 * i);
      products[i] = mul(x, load(scale + 16 * i));
      largest = max_of(largest, products[i]);
      if (zeros_of_tokens != nullptr) zero_sum = fma(x, load(zeros_of_tokens + 16 * i), zero_sum);
    }
    const float top = largest_of(largest);
    const __m512 factor = broadcast(top > 1e-30f ? kWeightLimit / top : 0.0f);
    unit = top > 1e-30f ? top * (1.0f / kWeightLimit) : 0.0f;
    zero = zeros_of_tokens == nullptr ? 0.0f : sum_of(zero_sum);
    __m512i sums[kWords];
    for (int w = 0; w < kWords; ++w) sums[w] = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {
      // NaN has no integer; it becomes 0, and the sum of p makes its whole row NaN.
      const __mmask16 is_number = _mm512_cmp_ps_mask(products[i], products[i], _CMP_ORD_Q);
      const __m512 rounded = round_even(mul(products[i], factor));
      __m512i word = _mm512_maskz_cvtps_epi32(is_number, rounded);
      sums[0] = _mm512_add_epi32(sums[0], word);
      _mm256_store_si256(reinterpret_cast<__m256i*>(words[0] + 16 * i), _mm512_cvtepi32_epi16(word));
      if constexpr (kWords == 2) {
        // The product is exact inside the multiply-add, so this is the rounding error, at most half a unit.
        const __m512 rest = fma(products[i], factor, sub(zeros(), rounded));
        word = _mm512_maskz_cvtps_epi32(is_number, mul(rest, broadcast(32768.0f)));
        sums[1] = _mm512_add_epi32(sums[1], word);
        _mm256_store_si256(reinterpret_cast<__m256i*>(words[1] + 16 * i), _mm512_cvtepi32_epi16(word));
      }
    }
    for (int w = 0; w < kWords; ++w) bias[w] = offset == 0 ? 0 : -offset * _mm512_reduce_add_epi32(sums[w]);
  }

  int32_t pair(int word, int i) const {
    int32_t both;
    std::memcpy(&both, words[word] + 2 * i, sizeof(both));
    return both;
  }
};

// Row r of the weights when all channels of a token share a scale.
template <int kWords>
void fill_weights(const Side& side, const Weights& weights, int r, const float* p, const float* scale,
                  const float* zero) {
  GroupWeights<kWords> all;
  all.fill(p, scale, zero, code_offset(side));
  const int num_blocks = num_blocks_of(side);
  for (int w = 0; w < kWords; ++w) {
    std::memcpy(weights.pairs + (w * 4 + r) * kPairs, all.words[w], sizeof(all.words[w]));
    for (int block = 0; block < num_blocks; ++block) {
      const int place = ((block * kWords + w) * 4 + r) * 16;
      _mm512_storeu_si512(weights.bias + place, _mm512_set1_epi32(all.bias[w]));
      store(weights.units + place, broadcast(w == 0 ? all.unit : all.unit * 0x1p-15f));
    }
  }
  for (int block = 0; block < num_blocks; ++block) store(weights.zeros + (block * 4 + r) * 16, broadcast(all.zero));
}

// The same with groups: every lane gets the weights of the group of its channels, block by block.
template <int kWords>
void fill_group_weights(const Side& side, const Weights& weights, int r, const float* p, const float* scale,
                        const float* zero) {
  const int num_blocks = num_blocks_of(side), m = channels_per_lane(side);
  const int group_lanes = side.head_dim / side.num_groups / m;
  for (int block = 0; block < num_blocks; ++block) {
    GroupWeights<kWords> groups[16];
    __mmask16 lanes[16];
    const int first_group = block * 16 / group_lanes;
    const int count = min_of((block * 16 + 15) / group_lanes + 1, side.num_groups) - first_group;
    __m512i bias[kWords];
    for (int w = 0; w < kWords; ++w) bias[w] = _mm512_setzero_si512();
    __m512 unit = zeros(), zero_sum = zeros();
    for (int i = 0; i < count; ++i) {
      const int g = first_group + i;
      groups[i].fill(p, scale + g * kTile, zero == nullptr ? nullptr : zero + g * kTile, code_offset(side));
      const int first = max_of(g * group_lanes - block * 16, 0), last = min_of((g + 1) * group_lanes - block * 16, 16);
      lanes[i] = static_cast<__mmask16>((1u << last) - (1u << first));
      unit = _mm512_mask_mov_ps(unit, lanes[i], broadcast(groups[i].unit));
      zero_sum = _mm512_mask_mov_ps(zero_sum, lanes[i], broadcast(groups[i].zero));
      for (int w = 0; w < kWords; ++w) bias[w] = _mm512_mask_set1_epi32(bias[w], lanes[i], groups[i].bias[w]);
    }
    store(weights.zeros + (block * 4 + r) * 16, zero_sum);
    for (int w = 0; w < kWords; ++w) {
      const int place = ((block * kWords + w) * 4 + r) * 16;
      _mm512_storeu_si512(weights.bias + place, bias[w]);
      store(weights.units + place, w == 0 ? unit : mul(unit, broadcast(0x1p-15f)));
      int32_t* target = weights.pairs + ((w * num_blocks + block) * 4 + r) * kPairs * 16;
      for (int pair = 0; pair < kPairs; pair += 4) {  // four at a time, which share a mask and its group
        __m512i spread[4];
        for (int k = 0; k < 4; ++k) spread[k] = _mm512_set1_epi32(groups[0].pair(w, pair + k));
        for (int i = 1; i < count; ++i) {
          for (int k = 0; k < 4; ++k)
            spread[k] = _mm512_mask_set1_epi32(spread[k], lanes[i], groups[i].pair(w, pair + k));
        }
        for (int k = 0; k < 4; ++k) _mm512_storeu_si512(target + (pair + k) * 16, spread[k]);
      }
    }
  }
}

// One block of 64 bytes of codes and one word of the weights: sums[i] of a row are channels m j + i. int4 splits its
// eight vectors into two parts, so that 4 rows x 4 vectors of sums fit the registers.
template <Storage kStorage, int kPart, int kRows, bool kIsGrouped>
inline void add_codes_block(const uint8_t* codes, int64_t stride_t, uint64_t mask, int count, const int32_t* pairs,
                            const int32_t* bias, const float* units, bool is_first_word, const float* rescales,
                            const float* zero_sums, float* out, int out_stride) {
  __m512i sums[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    const __m512i start = _mm512_loadu_si512(bias + r * 16);
    for (int i = 0; i < 4; ++i) sums[r][i] = start;
  }
  const __m512i low_byte = _mm512_set1_epi32(0x00FF00FF), low_nibble = _mm512_set1_epi32(0x000F000F);
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
    __m512i v[4];
    if constexpr (kStorage == Storage::int8) {
      const __m512i x = _mm512_mask_blend_epi16(kUpperWords, a, _mm512_slli_epi32(b, 16));
      const __m512i y = _mm512_mask_blend_epi16(kUpperWords, _mm512_srli_epi32(a, 16), b);
      v[0] = _mm512_and_si512(x, low_byte);
      v[1] = _mm512_srli_epi16(x, 8);
      v[2] = _mm512_and_si512(y, low_byte);
      v[3] = _mm512_srli_epi16(y, 8);
    } else {
      const __m512i x = kPart == 0 ? _mm512_mask_blend_epi16(kUpperWords, a, _mm512_slli_epi32(b, 16))
                                   : _mm512_mask_blend_epi16(kUpperWords, _mm512_srli_epi32(a, 16), b);
      v[0] = _mm512_and_si512(x, low_nibble);
      v[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low_nibble);
      v[2] = _mm512_and_si512(_mm512_srli_epi16(x, 8), low_nibble);
      v[3] = _mm512_srli_epi16(x, 12);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512i weight = kIsGrouped ? _mm512_loadu_si512(pairs + (r * kPairs + t / 2) * 16)
                                        : _mm512_set1_epi32(pairs[r * kPairs + t / 2]);
      for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_dpwssd_epi32(sums[r][i], v[i], weight);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const __m512 unit = load(units + r * 16);
    for (int i = 0; i < 4; ++i) {
      float* target = out + r * out_stride + (4 * kPart + i) * 16;
      const __m512 before =
          is_first_word ? fma(load(target), broadcast(rescales[r]), load(zero_sums + r * 16)) : load(target);
      store(target, fma(_mm512_cvtepi32_ps(sums[r][i]), unit, before));
    }
  }
}

// out = out · rescale + sum of p · value over the tokens of a tile, for kRows rows whose weights are filled.
template <Storage kStorage, int kRows, bool kIsGrouped>
void add_codes(const Side& side, const Weights& weights, int num_words, const uint8_t* codes, int count,
               const float* rescales, float* out, int out_stride) {
  constexpr int kPerByte = kStorage == Storage::int4 ? 2 : 1;
  const int row_bytes = side.head_dim / kPerByte;
  const int num_blocks = num_blocks_of(side);
  for (int block = 0; block < num_blocks; ++block) {
    const int bytes = min_of(row_bytes - block * 64, 64);
    const uint64_t mask = bytes == 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1;
    for (int w = 0; w < num_words; ++w) {
      const int32_t* pairs = weights.pairs + (kIsGrouped ? (w * num_blocks + block) * 4 * kPairs * 16 : w * 4 * kPairs);
      const int64_t place = (block * num_words + w) * 4 * 16;
      const auto run = [&](auto kernel) {
        kernel(codes + block * 64, side.codes_stride_t, mask, count, pairs, weights.bias + place, weights.units + place,
               w == 0, rescales, weights.zeros + block * 4 * 16, out + block * 64 * kPerByte, out_stride);
      };
      run(add_codes_block<kStorage, 0, kRows, kIsGrouped>);
      if constexpr (kStorage == Storage::int4) run(add_codes_block<kStorage, 1, kRows, kIsGrouped>);
    }
  }
}

template <int kRows>
inline void add_codes_of(const Side& side, const Weights& weights, int num_words, const uint8_t* codes, int count,
                         const float* rescales, float* out, int out_stride) {
  const auto run = [&](auto kernel) { kernel(side, weights, num_words, codes, count, rescales, out, out_stride); };
  if (side.storage == Storage::int8) {
    return side.num_groups == 1 ? run(add_codes<Storage::int8, kRows, false>)
                                : run(add_codes<Storage::int8, kRows, true>);
  }
  return side.num_groups == 1 ? run(add_codes<Storage::int4, kRows, false>)
                              : run(add_codes<Storage::int4, kRows, true>);
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
