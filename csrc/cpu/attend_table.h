// Which kernel multiplies keys, and which adds up values: the first of its table that serves the storage type and the
// shape. Nothing else decides this.
#pragma once

#include <iterator>

#include "attend_float.h"

#if KVQ_WIDTH == 16
#include "attend_integer_keys.h"
#include "attend_integer_values.h"
#endif

namespace hf_kvquant::cpu::KVQ_ISA {
namespace {

constexpr unsigned bit_of(Storage storage) { return 1u << static_cast<int>(storage); }
constexpr unsigned kIntegers = bit_of(Storage::int8) | bit_of(Storage::int4) | bit_of(Storage::int2);
constexpr unsigned kAll = ~0u;  // all that codes.h reads
constexpr int kAny = std::numeric_limits<int>::max();

// What a kernel serves: `storages`, up to `max_channels` channels of which there are a multiple of `channels`, groups
// whose codes fill a multiple of `group_bytes` bytes, and the most query rows in a 16-bit dtype, in float32, and where
// a token has several scales.
struct Serves {
  unsigned storages;
  int max_channels, channels, group_bytes;
  int max_rows, max_rows_of_float32, max_rows_of_groups;

  bool serves(const Side& side, int num_rows, Dtype query_dtype) const {
    const int rows = side.num_groups > 1            ? max_rows_of_groups
                     : query_dtype == Dtype::fp32 ? max_rows_of_float32
                                                  : max_rows;
    return (storages & bit_of(side.storage)) != 0 && side.head_dim <= max_channels && side.head_dim % channels == 0 &&
           (side.num_groups == 1 || row_bytes_of(side) / side.num_groups % group_bytes == 0) && num_rows <= rows;
  }
};

// Scores of all rows and of tokens begin ... begin + count - 1 of the side, to work.scores up to the end of the tile.
struct KeyKernel : Serves {
  void (*prepare)(const Work&, const Keys&);  // after the query has changed; nullptr: nothing to do
  void (*score)(const Work&, const Keys&, int begin, int count);
};

// Adds p · value of a tile to the sums of all rows. Token `begin` of the side is token `token` of the sequence. Returns
// false, having changed nothing, if the tile has a number that is not finite: add_tile serves that.
struct ValueKernel : Serves {
  bool (*add)(const Work&, const Values&, int token, int begin, int count);
  // Brings one row of sums into natural order; nullptr if it is. Where it is not, `add` expects the scales of the tile
  // to be loaded and finite.
  void (*restore)(const Side&, const float* out, float* row);
};

// Float32 queries take twice as many integer products, and groups need separate weights for every row, so with many
// rows it is cheaper to dequantise once (64 queries of 32 heads, int8, 4096 tokens: 50 ms instead of 64 in float32, but
// 52 instead of 36 in bfloat16; one core, Zen 4).
constexpr KeyKernel kKeyKernels[] = {
//    storages   channels               group  rows      float32   groups
#if KVQ_WIDTH == 16
    {{kIntegers, kMaxKeyChannels, 8,    16,    kMaxRows, 8,        8},        fix_queries, score_integers},
#endif
    {{kAll,      kAny,       kWidth,    1,     8,        8,        0},        nullptr,     score_codes},
    {{kAll,      kAny,            1,    1,     kMaxRows, kMaxRows, kMaxRows}, nullptr,     score_tile},
};
constexpr ValueKernel kValueKernels[] = {
#if KVQ_WIDTH == 16
    {{kIntegers, kAny,            8,    4,     kMaxRows, 8,        8},        add_integers, restore_integer_sums},
#endif
    {{kAll,      kAny,       kWidth,    1,     8,        8,        0},        add_codes,    nullptr},
    {{kAll,      kAny,            1,    1,     kMaxRows, kMaxRows, kMaxRows}, add_tile,     nullptr},
};

constexpr const ValueKernel& kTileValues = kValueKernels[std::size(kValueKernels) - 1];

// nullptr for a tail that is not there.
template <class Kernel, int kCount>
inline const Kernel* find_kernel(const Kernel (&table)[kCount], const Side& side, int num_rows, Dtype query_dtype) {
  if (side.codes == nullptr) return nullptr;
  const Kernel* kernel = table;
  while (!kernel->serves(side, num_rows, query_dtype)) ++kernel;  // the last one serves everything
  return kernel;
}

}  // namespace
}  // namespace hf_kvquant::cpu::KVQ_ISA
