// query · key on integer codes, with VNNI: no code is ever converted to float32. AVX-512 only; attend_table.h says
// when.
//
// A query row is written in fixed point, relative to its largest channel: 16 bits (two limbs of 8) when the model
// computes in 16 bits, 32 bits (four limbs) for float32. A unit is a power of two, so nearly every channel is exact. A
// row of a 16-bit model takes four limbs, too, if one channel is so large that others would have few bits left.
//
// vpdpbusd multiplies unsigned codes by signed limbs. Lanes hold *rows*: the load broadcasts a chunk of 16 bytes of one
// token, which is multiplied by the same 16 channels of four query rows. So four heads share each load, and a sum
// crosses only four lanes.
//
//     zmm of codes      | token t: bytes 0..15 | the same | the same | the same |
//     zmm of limbs      | row 0                | row 1    | row 2    | row 3    |
//
// Codes are centred exactly: accumulators start at -center times the sum of the limbs. With a zero, rounding errors of
// a query are then multiplied by smaller codes, and there is less cancellation.
#pragma once

#include "attend_work.h"

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr int kMaxLimbs = 4;
constexpr int kMaxKeyChannels = 256;  // sums of 16-bit queries and 8-bit codes then fill 31 bits
constexpr int kChunkBytes = 16;       // of a token and row, with four rows

// Up to four query rows as limbs. `limbs` is [chunk][place of a code in its byte][limb][64 bytes]; the 64 bytes are
// num_rows parts, one for each row's share of the chunk.
struct QuerySet {
  int num_rows;     // 1, 2 or 4; 3 rows take 4, one of them empty
  int num_limbs;    // 2 or 4
  int chunk_bytes;  // 64 / num_rows
  int num_chunks;
  const int8_t* limbs;
  const int32_t* bias;  // [group][limb][16]
  const float* steps;   // [16]: what one unit of fixed point is worth in the row of each lane
};

inline int64_t query_set_bytes(const Side& side) {
  return kMaxLimbs * (static_cast<int64_t>(round_up(side.head_dim, 128)) * 4 + side.num_groups * 64) + 64;
}

// --- queries in fixed point ------------------------------------------------------------------------------------------

// Writes one row in fixed point. place(i, limb, byte) is where the limbs go that belong to the codes at place i of byte
// `byte` of a row and the bytes after it, 4, 8 or 16 at a time. sums[group][limb] receives the sums over each group. Returns what a
// unit is worth; NaN for a query that is not finite, so that all of its scores are NaN.
template <class Place>
inline float fix_row(const Side& side, const float* row, int num_limbs, Place place, int32_t* sums) {
  const int group_size = side.head_dim / side.num_groups;
  Float sizes = zeros(), flaws = zeros();
  for (int c = 0; c < side.head_dim; c += 16) {  // rows are padded to 16 with zeros
    const Float x = load(row + c);
    sizes = max_of(sizes, abs_of(x));
    check_finite(x, flaws);
  }
  const float limit = num_limbs == 4 ? 2139062016.0f : 32639.0f;  // 127 in every limb
  const float largest = largest_of(sizes);
  const bool is_zero = !is_finite(flaws) || largest < 1e-20f;
  // The smallest power of two that fits: all but the smallest channels are then whole numbers of units.
  float unit = 0.0f;
  if (!is_zero) {
    unit = bit_cast<float>(bit_cast<uint32_t>(largest / limit) & 0xFF800000);  // the power of two below
    if (largest > limit * unit) unit *= 2.0f;
  }
  const float factor = is_zero ? 0.0f : 1.0f / unit;
  for (int g = 0; g < side.num_groups; ++g) {
    Int totals[kMaxLimbs] = {};
    for (int c = g * group_size; c < (g + 1) * group_size; c += 16) {
      Int fixed = is_zero ? Int{} : round_to_int(load(row + c) * factor);
      for (int limb = 0; limb < num_limbs; ++limb) {
        const Int low = (fixed << 24) >> 24;
        fixed = (fixed - low) >> 8;
        totals[limb] += low;
        const __m128i bytes = to_bytes(low);
        if (side.storage == Storage::int2) {  // channel 4k + i is at place i of byte k
          const __m128i by_place = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
          int32_t fours[4];
          _mm_storeu_si128(reinterpret_cast<__m128i*>(fours), _mm_shuffle_epi8(bytes, by_place));
          for (int i = 0; i < 4; ++i) std::memcpy(place(i, limb, c / 4), fours + i, 4);
        } else if (side.storage == Storage::int4) {  // even channels are in low nibbles, odd ones in high nibbles
          _mm_storel_epi64(reinterpret_cast<__m128i*>(place(0, limb, c / 2)), _mm_cvtepi16_epi8(bytes));
          _mm_storel_epi64(reinterpret_cast<__m128i*>(place(1, limb, c / 2)),
                           _mm_cvtepi16_epi8(_mm_srli_epi16(bytes, 8)));
        } else {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(place(0, limb, c)), bytes);
        }
      }
    }
    for (int limb = 0; limb < num_limbs; ++limb) {
      sums[g * num_limbs + limb] = _mm512_reduce_add_epi32((__m512i)totals[limb]);
    }
  }
  return is_finite(flaws) ? unit : kNan;
}

// Whether one channel of a row is so large that two limbs leave fewer than 9 bits to a quarter of the channels or more.
// Keys may be large enough in those channels to make them matter. False where the query already contains the scales of
// channels: small channels matter little there.
inline bool needs_four_limbs(const Side& side, const float* row) {
  if (side.has_channel_scales) return false;
  Float sizes = zeros();
  for (int c = 0; c < side.head_dim; c += 16) sizes = max_of(abs_of(load(row + c)), sizes);
  const float largest = largest_of(sizes);
  if (largest == kInfinity) return false;  // such a row becomes NaN, and must not change others in its set
  int num_small = 0;
  for (int c = 0; c < side.head_dim; c += 16) {
    const Float size = abs_of(load(row + c));
    const __mmask16 is_not_zero = _mm512_cmp_ps_mask(size, zeros(), _CMP_GT_OQ);
    num_small += __builtin_popcount(
        _mm512_mask_cmp_ps_mask(is_not_zero, size, broadcast(largest * 0x1p-6f), _CMP_LT_OQ));
  }
  return 4 * num_small >= side.head_dim;
}

// Writes 1 to 4 float32 rows in fixed point to `memory`.
inline QuerySet make_query_set(const Side& side, const float* rows, int stride, int count, bool is_float32,
                               uint8_t* memory) {
  QuerySet set;
  set.num_rows = side.num_groups > 1 || count == 3 ? 4 : count;
  bool has_many_limbs = is_float32;
  for (int r = 0; r < count && !has_many_limbs; ++r) has_many_limbs = needs_four_limbs(side, rows + r * stride);
  set.num_limbs = has_many_limbs ? 4 : 2;
  set.chunk_bytes = 4 * kChunkBytes / set.num_rows;
  set.num_chunks = (row_bytes_of(side) + set.chunk_bytes - 1) / set.chunk_bytes;
  const int num_places = 8 / bits_of(side.storage);
  const int64_t limb_bytes = static_cast<int64_t>(set.num_chunks) * num_places * set.num_limbs * 64;
  const int64_t bias_bytes = static_cast<int64_t>(side.num_groups) * set.num_limbs * 64;
  int8_t* limbs = reinterpret_cast<int8_t*>(memory);
  int32_t* bias = reinterpret_cast<int32_t*>(memory + limb_bytes);
  float* steps = reinterpret_cast<float*>(memory + limb_bytes + bias_bytes);
  std::memset(memory, 0, limb_bytes + bias_bytes + 64);
  const int lanes = 16 / set.num_rows, chunk_shift = __builtin_ctz(set.chunk_bytes);
  for (int r = 0; r < count; ++r) {
    int32_t sums[kMaxKeyChannels / kChunkBytes * kMaxLimbs];
    const auto place = [&](int i, int limb, int byte) {
      return limbs + (((byte >> chunk_shift) * num_places + i) * set.num_limbs + limb) * 64 +
             r * set.chunk_bytes + (byte & (set.chunk_bytes - 1));
    };
    const float step = fix_row(side, rows + r * stride, set.num_limbs, place, sums);
    for (int i = 0; i < lanes; ++i) steps[r * lanes + i] = step;
    for (int i = 0; i < side.num_groups * set.num_limbs; ++i) {
      bias[i * 16 + r * lanes] = -static_cast<int>(center_of(side.storage)) * sums[i];
    }
  }
  set.limbs = limbs;
  set.bias = bias;
  set.steps = steps;
  return set;
}

// All rows of a task, four at a time.
inline void fix_queries(const Work& work, const Keys& keys) {
  const int num_rows = work.task.num_rows;
  for (int r = 0; r < num_rows; r += 4) {
    static_cast<QuerySet*>(work.query_sets)[r / 4] = make_query_set(
        keys.side, keys.query + r * work.key_stride, work.key_stride, min_of(4, num_rows - r),
        work.params.query.dtype == Dtype::fp32,
        static_cast<uint8_t*>(work.query_memory) + r / 4 * query_set_bytes(keys.side));
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// A chunk of one token, repeated for every row; of a last, shorter chunk, `mask` says which bytes may be read.
template <int kRows>
inline __m512i load_chunk(const uint8_t* p, uint64_t mask) {
  const __m512i chunk = _mm512_maskz_loadu_epi8(mask, p);
  if constexpr (kRows == 4) return _mm512_broadcast_i32x4(_mm512_castsi512_si128(chunk));
  if constexpr (kRows == 2) return _mm512_broadcast_i64x4(_mm512_castsi512_si256(chunk));
  return chunk;
}
template <int kRows>
inline __m512i load_chunk(const uint8_t* p) {
  if constexpr (kRows == 4) return _mm512_broadcast_i32x4(load_as<__m128i>(p));
  if constexpr (kRows == 2) return _mm512_broadcast_i64x4(load_as<__m256i>(p));
  return load_as<__m512i>(p);
}

// Sums of four tokens over the quarters (128 bits) of each row: every quarter of a row gets the sums of the tokens.
template <int kRows>
inline Int sum_tokens(const Int (&x)[4]) {
  const auto unpack = [](Int a, Int b) {
    return (Int)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b) + (Int)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
  };
  const __m512i low = (__m512i)unpack(x[0], x[1]), high = (__m512i)unpack(x[2], x[3]);
  Int sums = (Int)_mm512_unpacklo_epi64(low, high) + (Int)_mm512_unpackhi_epi64(low, high);
  if constexpr (kRows <= 2) sums += (Int)_mm512_shuffle_i32x4((__m512i)sums, (__m512i)sums, 0xB1);
  if constexpr (kRows == 1) sums += (Int)_mm512_shuffle_i32x4((__m512i)sums, (__m512i)sums, 0x4E);
  return sums;
}

// Row r of the scores of four tokens goes to scores + r · kTile.
template <int kRows>
inline void store_rows(float* scores, Float x) {
  _mm_storeu_ps(scores, _mm512_castps512_ps128(x));
  if constexpr (kRows > 1) _mm_storeu_ps(scores + kTile, _mm512_extractf32x4_ps(x, 4 / kRows));
  if constexpr (kRows == 4) {
    _mm_storeu_ps(scores + 2 * kTile, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(scores + 3 * kTile, _mm512_extractf32x4_ps(x, 3));
  }
}

// Chunks first_chunk ... last_chunk - 1 of query · centred codes for `count` tokens, in float32 [row, kTile]. 8 tokens
// at a time with two limbs and 4 with four: 16 accumulators, as vpdpbusd takes 4 clocks. Inlined, it lacks registers.
template <Storage kStorage, int kRows, int kLimbs>
[[gnu::noinline]] void score_chunks(const Side& side, const QuerySet& set, int group, int first_chunk, int last_chunk,
                  const uint8_t* codes, int count, float* scores) {
  constexpr int kTokens = kLimbs == 2 ? 8 : 4, kBits = bits_of(kStorage), kPlaces = 8 / kBits;
  constexpr int kBytes = 4 * kChunkBytes / kRows;
  const int row_bytes = side.head_dim / kPlaces, part_bytes = row_bytes % kBytes;
  const int full_chunks = last_chunk == set.num_chunks && part_bytes != 0 ? last_chunk - 1 : last_chunk;
  const Float steps = load(set.steps);
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  const int64_t ahead = kTokensAhead * side.codes_stride_t + first_chunk * kBytes;
  const int bytes_used = (last_chunk - first_chunk) * kBytes;
  // Of the groups in one cache line, the first prefetches it.
  const bool is_first_of_line = first_chunk * kBytes % 64 == 0;
  for (int t = 0; t < count; t += kTokens) {
    const uint8_t* tokens = codes + t * side.codes_stride_t;
    int64_t stride = side.codes_stride_t;
    uint8_t copy[kTokens * kMaxKeyChannels];
    if (t + kTokens > count) {  // nothing may be read after the last token
      for (int n = 0; n < count - t; ++n) std::memcpy(copy + n * kMaxKeyChannels, tokens + n * stride, row_bytes);
      tokens = copy;
      stride = kMaxKeyChannels;
    }
    Int sums[kTokens][kLimbs];
    for (int limb = 0; limb < kLimbs; ++limb) {
      const Int bias = load_as<Int>(set.bias + (group * kLimbs + limb) * 16);
      for (int n = 0; n < kTokens; ++n) sums[n][limb] = bias;
    }
    const auto add_chunk = [&](int chunk, auto load_at) {
      const int8_t* limbs = set.limbs + chunk * kPlaces * kLimbs * 64;
      __m512i q[kPlaces][kLimbs];
      for (int i = 0; i < kPlaces * kLimbs; ++i) q[i / kLimbs][i % kLimbs] = load_as<__m512i>(limbs + i * 64);
      for (int n = 0; n < kTokens; ++n) {
        const __m512i bytes = load_at(tokens + n * stride + chunk * kBytes);
        const auto add = [&](__m512i part, int i) {
          for (int limb = 0; limb < kLimbs; ++limb) {
            sums[n][limb] = (Int)_mm512_dpbusd_epi32((__m512i)sums[n][limb], part, q[i][limb]);
          }
        };
        if constexpr (kPlaces == 1) {
          add(bytes, 0);
        } else {
          add(_mm512_and_si512(bytes, mask), 0);
          add(_mm512_and_si512(_mm512_srli_epi16(bytes, kBits), mask), 1);
          if constexpr (kPlaces == 4) {
            add(_mm512_and_si512(_mm512_srli_epi16(bytes, 2 * kBits), mask), 2);
            add(_mm512_and_si512(_mm512_srli_epi16(bytes, 3 * kBits), mask), 3);
          }
        }
      }
    };
    for (int chunk = first_chunk; chunk < full_chunks; ++chunk) {
      add_chunk(chunk, [](const uint8_t* p) { return load_chunk<kRows>(p); });
    }
    if (full_chunks < last_chunk) {
      const uint64_t part = (uint64_t{1} << part_bytes) - 1;
      add_chunk(full_chunks, [part](const uint8_t* p) { return load_chunk<kRows>(p, part); });
    }
    for (int n = 0; is_first_of_line && n < kTokens; ++n) {
      for (int i = 0; i < bytes_used; i += 64) prefetch(tokens + n * stride + ahead + i);
    }
    for (int n = 0; n < kTokens; n += 4) {
      Int both[4];  // limbs of each token
      for (int i = 0; i < 4; ++i) both[i] = (sums[n + i][kLimbs - 1] << 8) + sums[n + i][kLimbs - 2];
      Float x = __builtin_convertvector(sum_tokens<kRows>(both), Float);
      if constexpr (kLimbs == 4) {
        for (int i = 0; i < 4; ++i) both[i] = (sums[n + i][1] << 8) + sums[n + i][0];
        x = fma(x, broadcast(65536.0f), __builtin_convertvector(sum_tokens<kRows>(both), Float));
      }
      x *= steps;
      store_rows<kRows>(scores + t + n, x);
    }
  }
}

// Scores of a tile: integer products with codes, then one scale and zero per token and group.
inline void score_integers(const Work& work, const Keys& keys, int begin, int count) {
  const Side& side = keys.side;
  const AttendTask& task = work.task;
  load_scales(side, work.slot, task.kv_head, begin, count, work.key_scale, work.key_zero);
  const uint8_t* codes = codes_of(side, work.slot, task.kv_head, begin);
  for (int first = 0; first < task.num_rows; first += 4) {
    const QuerySet& set = static_cast<const QuerySet*>(work.query_sets)[first / 4];
    const int chunks = set.num_chunks / side.num_groups;
    for (int g = 0; g < side.num_groups; ++g) {
      const int last_chunk = side.num_groups == 1 ? set.num_chunks : (g + 1) * chunks;
      with_constant<4, 2, 1>(set.num_rows, [&](auto rows) {
        with_constant<2, 4>(set.num_limbs, [&](auto limbs) {
          with_integers(side.storage, [&](auto storage) {
            score_chunks<storage, rows, limbs>(side, set, g, g * chunks, last_chunk, codes, count, work.row_weights);
          });
        });
      });
      for (int r = first; r < min_of(first + 4, task.num_rows); ++r) {
        const Float query_sum = broadcast(work.query_sums[r * side.num_groups + g]);
        for (int t = 0; t < count; t += 16) {
          Float x = load(work.row_weights + (r - first) * kTile + t) * load(work.key_scale + g * kTile + t);
          if (!side.is_symmetric) x = fma(load(work.key_zero + g * kTile + t), query_sum, x);
          float* target = work.scores + r * kTile + t;
          store(target, g == 0 ? x : load(target) + x);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
