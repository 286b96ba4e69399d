// The C++ mirror of hf_kvquant/spec and hf_kvquant/ops: formats, layouts, planes, and the arguments of the ops as plain
// structs. Nothing here uses torch: csrc/args.h turns op arguments into these structs and checks them, csrc/cpu
// and csrc/cuda compute with them. When the extension loads, constants are compared with their Python counterparts.
//
// x ≈ code · scale + zero. Symmetric integer formats store code + offset (128 for int8, 8 for int4) and have no zero.
#pragma once

#include <cstdint>

// For functions that kernels on a GPU call too.
#ifdef __CUDACC__
#define KVQ_ON_DEVICE __host__ __device__
#else
#define KVQ_ON_DEVICE
#endif

namespace hf_kvquant {

// Raised together with OPS_VERSION in ops/kernels.py whenever a schema or the meaning of an argument changes.
constexpr int kOpsVersion = 24;
constexpr int kTokenAlignment = 64;  // capacities are multiples of this many tokens
constexpr int kNumCounters = 4096;   // see DecodeParams::counters
constexpr int kMaxScratchBytes = 64 << 20;  // of the tiles that long chunks read: 16k tokens of eight heads of 128
constexpr int kTailAlignment = 32;   // rows of a tail for newest tokens, with has_channel_scales, are multiples of this
constexpr int kTailColumns = 2;      // of a page table, before its pages; see reference.Tails
constexpr int kBlockSize = 128;      // tokens that share the scale of a channel; see Side::has_channel_scales
constexpr int kMaxCudaHeadDim = 256;  // above it, ops/kernels.py chooses the reference
constexpr int kMaxCudaAppended = 512;  // channels of rows that kernels append, for latents
constexpr int kMaxChosenSlots = 1024;  // of a split plan that chooses between these and more
constexpr int kMaxRingLength = 1 << 30;  // the most tokens that a ring counts, so that sums of positions fit an int

enum class Storage : int { none = 0, int8 = 1, int4 = 2, fp8 = 3, int3 = 4, int2 = 5 };
constexpr int kNumStorages = 6;

// What a code is, see spec/codes.py. All else about integers follows from their bits. Storage::none has no codes.
struct CodeType {
  int bits;
  bool is_integer;
};

KVQ_ON_DEVICE constexpr CodeType code_type(Storage storage) {
  switch (storage) {
    case Storage::int8: return {8, true};
    case Storage::int4: return {4, true};
    case Storage::fp8: return {8, false};
    case Storage::int3: return {3, true};
    case Storage::int2: return {2, true};
    case Storage::none: break;
  }
  return {0, false};
}

KVQ_ON_DEVICE constexpr int bits_of(Storage storage) { return code_type(storage).bits; }
KVQ_ON_DEVICE constexpr bool is_integer(Storage storage) { return code_type(storage).is_integer; }

// The code that the largest magnitude maps to; of asymmetric integers, the top of the range. As in reference.py.
KVQ_ON_DEVICE constexpr float max_code(Storage storage, bool is_symmetric) {
  return is_integer(storage) ? static_cast<float>((1 << (bits_of(storage) - is_symmetric)) - 1) : 448.f;
}

// Added to a signed code before it is stored unsigned. As in reference.py.
KVQ_ON_DEVICE constexpr float code_offset(Storage storage, bool is_symmetric) {
  return is_integer(storage) && is_symmetric ? static_cast<float>(1 << (bits_of(storage) - 1)) : 0.f;
}

// What shares a scale, see KVFormat in spec/formats.py.
enum class Granularity : int { tensor = 0, token = 1, head = 2, group = 3, channel = 4 };

// Where the token at position t is: in row t, or in row t mod capacity. See row_of.
enum class Rows : int { linear = 0, ring = 1 };

// A KVLayout as ops take it, see spec/layout.py. The names are compared with those there.
struct FormatFields {
  int64_t storage, granularity, group_size, is_symmetric, clip_ratio;  // group_size 0: none
};
struct LayoutFields {
  FormatFields key, value;
  int64_t sink_length, residual_length, rows;
};
constexpr const char* kLayoutFields =
    "key.storage key.granularity key.group_size key.symmetric key.clip_ratio "
    "value.storage value.granularity value.group_size value.symmetric value.clip_ratio "
    "sink_length residual_length rows";
constexpr const char* kLayoutValues = "none int8 int4 fp8 int3 int2; tensor token head group channel; linear ring";
constexpr int64_t kClipOne = int64_t{1} << 62;  // the integer for a clip ratio of 1

// Dtypes of the model's tensors: queries, new keys and values, and the codes of Storage::none.
enum class Dtype : int { fp32, fp16, bf16 };

// The bits of a float16 number; CPUs and GPUs convert them in different ways.
using half_bits = uint16_t;

// Codes are unsigned and in natural channel order, so that crop, reorder and append are plain copies. Codes of eight
// channels are one number, from the lowest bits up, whose lowest byte comes first: eight codes of b bits take b bytes.

// Keys or values of one layer. Strides are in elements, except the codes' strides. An axis of size 1 has stride 0, so
// that every granularity is read in the same way.
struct Side {
  Storage storage;
  Dtype dense_dtype;            // type of the codes of Storage::none
  int head_dim;                 // channels; a multiple of 8
  int num_groups;               // scales per token and head; head_dim / num_groups channels share one
  bool is_symmetric;            // no zero plane
  float clip_ratio;             // integer codes span this share of the range of the values; 1: all of it
  bool is_shared_by_heads;      // granularity token or tensor: all heads of a token share a scale
  bool is_frozen;               // granularity tensor: the scale is read at append, not computed
  uint8_t* codes;               // [batch, num_kv_heads, capacity, bytes of a row]; rows are contiguous
  int64_t codes_stride_b, codes_stride_h, codes_stride_t;  // in bytes
  half_bits* scale;             // [batch, num_kv_heads or 1, num_groups, capacity or 1]; nullptr for Storage::none
  half_bits* zero;              // like scale; nullptr when symmetric
  int64_t scale_stride_b, scale_stride_h, scale_stride_g, scale_stride_t;
  int64_t zero_stride_b, zero_stride_h, zero_stride_g, zero_stride_t;

  // Granularity channel (keys, asymmetric int4): a channel has one scale and zero for each block of kBlockSize tokens,
  // counted from position 0. A block is quantised once all its tokens have left the residual window.
  //   scale, zero  [batch, num_kv_heads, capacity / kBlockSize, head_dim], channels contiguous; *_stride_g goes from
  //                block to block, num_groups is 1 and *_stride_t unused
  bool has_channel_scales;

  // Tokens kept dense, which attention reads from here: the sinks (tokens start ... start + sink_length - 1) and the
  // newest tokens (from tail_begin on). nullptr where there are neither; Storage::none never has a tail.
  void* tail;                   // [batch, num_kv_heads, sink_length + ring, head_dim], rows contiguous; see tail_row
  Dtype tail_dtype;
  int ring;                     // at least residual_length; with has_channel_scales aligned, and a block more
  int64_t tail_stride_b, tail_stride_h, tail_stride_t;  // in elements
};

// The first of the newest tokens that the newest query reads from the tail. `tail_from` as in reference.Tails.
KVQ_ON_DEVICE inline int tail_begin(const Side& side, int length, int residual_length, int tail_from) {
  const int newest = length > residual_length ? length - residual_length : 0;
  const int begin = side.has_channel_scales ? newest / kBlockSize * kBlockSize : newest;
  return begin > tail_from ? begin : tail_from;
}

// The first of the newest tokens that the tail keeps: those that attention reads, and others for a crop.
KVQ_ON_DEVICE inline int tail_kept(const Side& side, int length) {
  return tail_begin(side, length, side.has_channel_scales ? side.ring - kBlockSize : side.ring, 0);
}

// The first of the newest tokens that a query reads from the tail, which sees the first `num_seen` of `length` tokens:
// reference.window_begin.
KVQ_ON_DEVICE inline int window_begin(const Side& side, int num_seen, int length, int residual_length, int tail_from) {
  const int begin = tail_begin(side, num_seen, residual_length, tail_from), kept = tail_kept(side, length);
  return begin > kept ? begin : kept;
}

// Whether a token is one of the first `sink_length` that are not padding. These have rows of their own in the tail.
KVQ_ON_DEVICE inline bool is_sink(int token, int start, int sink_length) {
  return token >= start && token - start < sink_length;
}

// The row of a token in the tail.
KVQ_ON_DEVICE inline int tail_row(const Side& side, int token, int start, int sink_length) {
  return is_sink(token, start, sink_length) ? token - start : sink_length + token % side.ring;
}

// The row of a token in the codes and in scales and zeros that each token has. A block of granularity channel begins at
// the row of its first token. The rows of a ring hold the newest tokens. Its capacity is a multiple of kBlockSize, so
// no aligned tile or block crosses its end, and lengths go up to kMaxRingLength.
KVQ_ON_DEVICE inline int row_of(int token, int capacity, bool is_ring) { return is_ring ? token % capacity : token; }

inline int bytes_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// Bytes of the codes of one token and head.
inline int row_bytes_of(const Side& side) {
  if (side.storage == Storage::none) return side.head_dim * bytes_of(side.dense_dtype);
  return side.head_dim * bits_of(side.storage) / 8;
}

// Tokens as the model made them: [batch, heads, tokens, head_dim], channels contiguous, other strides in elements.
struct Dense {
  const void* data;  // nullptr when absent
  Dtype dtype;
  int64_t stride_b, stride_h, stride_t;
};

// The steps that keys go through before they are quantised, in this order. reference.transform_key and transform_query
// define them, including every rounding. Each tensor is [num_kv_heads, head_dim] float32, contiguous.
//   key      x = (key - center) · (1 / smoothing), rotated
//   query    smoothing · query, rotated; all logits of a row get softmax_scale · (query · center) added before softcap
struct KeyTransform {
  const float* center;     // nullptr: none
  const float* smoothing;  // the factors, positive; nullptr: none
  bool is_rotated;         // butterflies 1, 2, 4, ... apart in blocks of rotation_block channels, times 1 / sqrt(block)
};

KVQ_ON_DEVICE inline bool is_identity(const KeyTransform& transform) {
  return transform.center == nullptr && transform.smoothing == nullptr && !transform.is_rotated;
}

// The largest power of two that divides head_dim.
KVQ_ON_DEVICE inline int rotation_block(int head_dim) { return head_dim & -head_dim; }

// What an append and attention have in common.
struct CacheParams {
  int batch, num_kv_heads, q_len, capacity;  // q_len: new tokens, or tokens of the query
  Side key_side, value_side;
  KeyTransform key_transform;  // of the keys in the planes
  const int32_t* lengths;      // [batch]; include the new tokens
  const int32_t* starts;       // [batch], first position that is not padding; nullptr: 0
  int sink_length;             // first tokens that attention reads from the tails; 0: none
  int residual_length;         // newest tokens that attention reads from the tails; 0: none
  bool is_ring;                // see row_of
  // [batch, capacity / page_rows], the page of each page_rows tokens of a sequence; nullptr: sequences have their own
  // rows. With it, the first axis of the planes counts pages, and there are no rings or frozen scales.
  const int32_t* page_table;
  int page_table_stride;     // from one sequence to the next
  int page_rows, num_pages;  // page_rows is a multiple of kBlockSize
  // [batch, 2], strides of the page table: the columns of reference.Tails; nullptr: sequence b has tail b, from its
  // first token on. With it, the first axis of the tail planes counts slots, not pages.
  const int32_t* tail_columns;
  int num_tails;
};

// Where a token is in the planes: the index of their first axis, and the row.
struct Place {
  int slot, row;
};

inline Place place_of(const CacheParams& params, int b, int token) {
  if (params.page_table == nullptr) return {b, row_of(token, params.capacity, params.is_ring)};
  const int number = token / params.page_rows;
  const int32_t* const pages = params.page_table + static_cast<int64_t>(b) * params.page_table_stride;
  return {pages[number], token - number * params.page_rows};
}

// The index of a sequence's tail in the first axis of a tail plane.
inline int tail_slot_of(const CacheParams& params, int b) {
  return params.tail_columns == nullptr ? b : params.tail_columns[static_cast<int64_t>(b) * params.page_table_stride];
}

// The first token that this tail may have.
inline int tail_from_of(const CacheParams& params, int b) {
  if (params.tail_columns == nullptr) return 0;
  return params.tail_columns[static_cast<int64_t>(b) * params.page_table_stride + 1];
}

// New tokens of one layer, written at positions lengths - q_len ... lengths - 1. `starts` is used for tails only.
struct AppendParams : CacheParams {
  Dense key, value;
};

// Attention of one layer over everything stored; new tokens, if any, are appended before this runs.
// reference.decode_attention defines the result. In a ring, 0 < sliding_window and sliding_window - 1 + q_len <=
// capacity.
struct DecodeParams : CacheParams {
  int num_q_heads;
  Dense query;                // [batch, num_q_heads, q_len, key head_dim], not transformed yet; see is_latent
  int32_t* counters;          // [kNumCounters], zero before and after a call, CUDA only; nullptr: absent
  const float* sinks;         // [num_q_heads]; nullptr: none
  const float* alibi_slopes;  // [num_q_heads]; nullptr: none
  float softmax_scale;
  float softcap;              // 0: none
  int sliding_window;         // 0: none
  int num_splits;             // 0: the plan chooses
  // [num_planned, 4], as hf_kvquant/ops/planning.py makes it; nullptr: none. Only the CUDA kernel for few query rows
  // uses it.
  const int32_t* split_plan;
  int num_planned;
  // Whether the newest q_len tokens, the query's own, are not stored yet, but given: attention of a chunk.
  bool is_chunk;
  // Whether keys are latents, which are values, too, and values are rope parts: scores are query · (latent, rope part).
  bool is_latent;
  void* out;                  // [batch, q_len, num_q_heads, channels of values_of], contiguous, dtype of the query
  float* lse;                 // [batch, num_q_heads, q_len], contiguous, natural log
};

// What attention adds up.
inline const Side& values_of(const DecodeParams& params) {
  return params.is_latent ? params.key_side : params.value_side;
}

// Dense keys and values of the positions begin ... begin + num_tokens - 1, in the model's basis; zero where no token is
// held. reference.dequantize_tokens defines the result.
struct DequantizeParams : CacheParams {
  int begin, num_tokens;
  int num_seen;       // of a sequence's tokens, only the newest num_seen count as held; 0: all
  Dtype dtype;        // of the results
  void *key, *value;  // [batch, num_kv_heads, num_tokens, head_dim], contiguous
};

}  // namespace hf_kvquant
