// The lists of requirements.h. The order is that of the sentences that help most: formats, then dtypes, then how planes
// lie in memory, then sizes.
#include "requirements.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "cuda/attend/attend_table.h"
#include "cuda/latent/latent.h"

namespace hf_kvquant::cuda {
namespace {

// The fewest query rows of a key-value head for which the chunk kernels are faster (H200, 2026-11). That for few rows:
// where the attention kernel would read the codes more than twice. That for many: more than four times, but for short
// caches, of which its start takes most.
constexpr int kMinFewRows = 33, kMinChunkRows = 65, kMinChunkRowsOfShort = 128, kShortCapacity = 8192;
constexpr int kUnitChannels = 16;  // that a thread of it takes at a time

constexpr int kMaxGridY = 65535;  // sequences or heads in a grid
constexpr int kLatentRanks[] = {256, 512};

// --- in words

std::string text_of(Storage storage) {
  std::istringstream names(kLayoutValues);  // storage types come first
  std::string name;
  for (int i = 0; i <= static_cast<int>(storage); ++i) names >> name;
  if (name.back() == ';') name.pop_back();
  return name;
}

std::string text_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? "float32" : dtype == Dtype::fp16 ? "float16" : "bfloat16";
}

std::string text_of(Scales scales) {
  return scales == Scales::rows     ? "one scale for a row"
         : scales == Scales::groups ? "scales for groups of channels"
                                    : "scales for channels of keys";
}

std::string pair_of(Storage key, Storage value) { return text_of(key) + "+" + text_of(value); }

// "a, b or c", each once.
class Choices {
 public:
  void add(const std::string& choice) {
    if (choice == last_) return;
    if (!last_.empty()) text_ += (text_.empty() ? "" : ", ") + last_;
    last_ = choice;
  }
  std::string text() const { return text_.empty() ? last_ : text_ + " or " + last_; }

 private:
  std::string text_, last_;
};

std::string name_of(const Call& call, const Side& side) {
  const bool is_key = &side == &call.params.key_side;
  return call.params.is_latent ? is_key ? "latents" : "rope parts" : is_key ? "keys" : "values";
}

std::string of(const Call& call, const Side& side) { return " for " + name_of(call, side); }

// --- what requirements compare

int group_size_of(const Side& side) { return side.head_dim / side.num_groups; }

Scales scales_of(const DecodeParams& params) {
  if (params.key_side.has_channel_scales) return Scales::blocks;
  return params.key_side.num_groups > 1 || params.value_side.num_groups > 1 ? Scales::groups : Scales::rows;
}

template <class IsWanted>
const AttendRow* find(const IsWanted& is_wanted) {
  const AttendRow* const row = std::find_if(std::begin(kAttendTable), std::end(kAttendTable), is_wanted);
  return row == std::end(kAttendTable) ? nullptr : row;
}

constexpr bool has_equal_rows() {
  for (int i = 0; i < kNumAttendRows; ++i) {
    for (int j = 0; j < i; ++j) {
      const AttendRow &row = kAttendTable[i], &other = kAttendTable[j];
      if (row.key == other.key && row.value == other.value && row.scales == other.scales) return true;
    }
  }
  return false;
}
static_assert(!has_equal_rows(), "find_row knows which of two rows serves");

bool is_pair_of(const AttendRow& row, const DecodeParams& params) {
  return row.key == params.key_side.storage && row.value == params.value_side.storage;
}

// Bytes by which codes miss a multiple of `bytes`, somewhere.
int64_t rest_of_codes(const Side& side, int64_t bytes) {
  return (reinterpret_cast<int64_t>(side.codes) | side.codes_stride_b | side.codes_stride_h | side.codes_stride_t) %
         bytes;
}

// The same of scales and zeros and a multiple of 16 bytes.
int64_t rest_of_scales(const Side& side) {
  const int64_t strides = side.scale_stride_b | side.scale_stride_h | side.scale_stride_g | side.zero_stride_b |
                          side.zero_stride_h | side.zero_stride_g;
  return (reinterpret_cast<int64_t>(side.scale) | reinterpret_cast<int64_t>(side.zero) | 2 * strides) % 16;
}

int64_t rest_of_tail(const Side& side) {
  const int64_t strides = side.tail_stride_b | side.tail_stride_h | side.tail_stride_t;
  return (reinterpret_cast<int64_t>(side.tail) | 2 * strides) % 16;
}

int64_t rest_of_rows(const Dense& dense) {
  return (reinterpret_cast<int64_t>(dense.data) | 2 * (dense.stride_b | dense.stride_h | dense.stride_t)) % 16;
}

// The new tokens of a side.
const Dense& new_of(const Call& call, const Side& side) {
  return &side == &call.params.key_side ? call.new_tokens->key : call.new_tokens->value;
}

// Whether both scales and zeros have this stride from token to token.
bool has_token_stride(const Side& side, int64_t stride) {
  return side.scale_stride_t == stride && (side.zero == nullptr || side.zero_stride_t == stride);
}

std::string token_strides(const Side& side) {
  const std::string scale = std::to_string(side.scale_stride_t);
  return side.zero == nullptr ? "a stride of " + scale
                              : "strides of " + scale + " and " + std::to_string(side.zero_stride_t);
}

// In bytes, from sequence to sequence or head to head.
int64_t longest_stride(const Side& side) {
  return std::max({std::abs(side.codes_stride_b), std::abs(side.codes_stride_h), 2 * std::abs(side.scale_stride_b),
                   2 * std::abs(side.scale_stride_h), 2 * std::abs(side.zero_stride_b),
                   2 * std::abs(side.zero_stride_h)});
}

int64_t query_numbers(const DecodeParams& params) {
  const Dense& query = params.query;
  return params.batch * query.stride_b + params.num_q_heads * query.stride_h + params.q_len * query.stride_t;
}

}  // namespace

bool changes_scores(const DecodeParams& params) { return params.softcap > 0.f || params.alibi_slopes != nullptr; }

namespace {

int min_chunk_rows(const DecodeParams& params) {
  if (params.is_chunk) return 1;
  if (num_rows_of(params) <= kMostFewRows && !changes_scores(params)) return kMinFewRows;
  return params.capacity < kShortCapacity ? kMinChunkRowsOfShort : kMinChunkRows;
}

int64_t unit_bytes(const Side& side) {
  return side.storage == Storage::none ? 16 : int64_t{kUnitChannels} * bits_of(side.storage) / 8;
}

bool is_latent_side(const Call& call, const Side& side) { return &side == &call.params.key_side; }

// Of int4 latents; other latents and rope parts have one scale for a row.
int wanted_groups(const Call& call, const Side& side) {
  const bool has_groups = is_latent_side(call, side) && side.storage == Storage::int4;
  return has_groups ? std::max(1, side.head_dim / kLatentGroup) : 1;
}

// --- requirements that several kernels have

constexpr Requirement kHalfQuery = {
    Of::call,
    [](const Call& call, const Side&) { return call.params.query.dtype != Dtype::fp32; },
    [](const Call& call, const Side&) {
      return wanted("a query in float16 or bfloat16", text_of(call.params.query.dtype));
    }};

constexpr Requirement kQueryDtype = {
    Of::sides,
    [](const Call& call, const Side& side) {
      return has_multipliable_values(side, call.params.query.dtype);
    },
    [](const Call& call, const Side& side) {
      return wanted("unquantised " + name_of(call, side) + " in the query's " + text_of(call.params.query.dtype),
                    text_of(side.dense_dtype));
    }};

constexpr Requirement kGrid = {
    Of::call,
    [](const Call& call, const Side&) { return std::max(call.params.batch, call.params.num_kv_heads) <= kMaxGridY; },
    [](const Call& call, const Side&) {
      return wanted("at most " + std::to_string(kMaxGridY) + " sequences and key-value heads", call.params.batch,
                    " and ", call.params.num_kv_heads);
    }};

constexpr Requirement kPages = {
    Of::call,
    [](const Call& call, const Side&) { return call.params.num_pages <= kMaxPages; },
    [](const Call& call, const Side&) {
      return wanted("at most " + std::to_string(kMaxPages) + " pages", call.params.num_pages);
    }};

// Strides fit an Origin. Only a plane of 64 GB would not fit, whereas all pages together may be as large as they like.
constexpr Requirement kStrides = {
    Of::sides,
    [](const Call&, const Side& side) { return longest_stride(side) / 16 <= INT32_MAX; },
    [](const Call& call, const Side& side) {
      return wanted("sequences and heads less than 2^35 bytes apart", longest_stride(side), of(call, side));
    }};

// A whole step of rows of codes fits 32 bits.
constexpr Requirement kRowStride = {
    Of::sides,
    [](const Call&, const Side& side) { return std::abs(side.codes_stride_t) <= INT32_MAX / kBlockSize; },
    [](const Call& call, const Side& side) {
      return wanted("rows of codes at most " + std::to_string(INT32_MAX / kBlockSize) + " bytes apart",
                    std::abs(side.codes_stride_t), of(call, side));
    }};

// Offsets in the query fit 32 bits.
constexpr Requirement kQueryStrides = {
    Of::call,
    [](const Call& call, const Side&) { return query_numbers(call.params) <= INT32_MAX; },
    [](const Call& call, const Side&) {
      return wanted("a query that spans less than 2^31 numbers", query_numbers(call.params));
    }};

// Tokens of windows for crops and earlier queries, as far as a tail has rows for them.
int num_kept(const Side& side) { return side.ring - (side.has_channel_scales ? kBlockSize : 0); }

// A query reads a token from both tails, or its keys alone from the tail if they have scales for blocks.
constexpr Requirement kTails = {
    Of::call,
    [](const Call& call, const Side&) {
      const DecodeParams& params = call.params;
      const Side &keys = params.key_side, &values = params.value_side;
      if (params.q_len == 1 || params.is_chunk || keys.tail == nullptr || values.tail == nullptr) return true;
      return keys.has_channel_scales ? num_kept(keys) >= num_kept(values) : num_kept(keys) == num_kept(values);
    },
    [](const Call& call, const Side&) {
      return wanted("tails of keys and values with room for equally many of the newest tokens",
                    num_kept(call.params.key_side), " and ", num_kept(call.params.value_side));
    }};

// --- the attention kernel

constexpr Requirement kAttend[] = {
    {Of::call,
     [](const Call& call, const Side&) {
       return call.row != nullptr ||
              find([&](const AttendRow& row) { return is_pair_of(row, call.params); }) != nullptr;
     },
     [](const Call& call, const Side&) {
       Choices choices;
       for (const AttendRow& row : kAttendTable) choices.add(pair_of(row.key, row.value));
       return wanted("keys and values as " + choices.text(),
                     pair_of(call.params.key_side.storage, call.params.value_side.storage));
     }},
    {Of::call, [](const Call& call, const Side&) { return call.row != nullptr; },
     [](const Call& call, const Side&) {
       Choices choices;
       for (const AttendRow& row : kAttendTable) {
         if (is_pair_of(row, call.params)) choices.add(text_of(row.scales));
       }
       const std::string pair = pair_of(call.params.key_side.storage, call.params.value_side.storage);
       return wanted(choices.text() + " for " + pair, text_of(scales_of(call.params)));
     }},
    {Of::sides,
     [](const Call& call, const Side& side) {
       const bool is_key = &side == &call.params.key_side;
       return side.is_symmetric || (is_key ? call.row->has_key_zero : call.row->has_value_zero);
     },
     [](const Call& call, const Side& side) {
       return wanted("symmetric " + text_of(side.storage) + " " + name_of(call, side), "asymmetric ones");
     }},
    {Of::sides,
     [](const Call& call, const Side& side) {
       return side.num_groups <= 1 || call.row->scales == Scales::groups;
     },
     [](const Call& call, const Side& side) {
       return wanted("one scale for a row of " + name_of(call, side) + " beside scales for channels of keys",
                     "groups of ", group_size_of(side));
     }},
    {Of::sides,
     [](const Call&, const Side& side) {
       return side.num_groups <= 1 || side.head_dim / side.num_groups % kGroupChannels == 0;
     },
     [](const Call& call, const Side& side) {
       return wanted("groups of a multiple of " + std::to_string(kGroupChannels) + " channels", group_size_of(side),
                     of(call, side));
     }},
    kHalfQuery,
    kQueryDtype,
    {Of::call,
     [](const Call& call, const Side&) {
       return call.params.key_side.storage != Storage::none || is_identity(call.params.key_transform);
     },
     [](const Call& call, const Side&) {
       const KeyTransform& transform = call.params.key_transform;
       return wanted("no transform of unquantised keys", transform.center != nullptr      ? "a center"
                                                         : transform.smoothing != nullptr ? "smoothing"
                                                                                          : "a rotation");
     }},
    {Of::sides,
     [](const Call& call, const Side& side) {
       return side.tail == nullptr || side.tail_dtype == call.params.query.dtype;
     },
     [](const Call& call, const Side& side) {
       return wanted("dense tokens in the query's " + text_of(call.params.query.dtype), text_of(side.tail_dtype),
                     of(call, side));
     }},
    {Of::sides, [](const Call&, const Side& side) { return side.head_dim <= kMaxCudaHeadDim; },
     [](const Call& call, const Side& side) {
       return wanted("at most " + std::to_string(kMaxCudaHeadDim) + " channels", side.head_dim, of(call, side));
     }},
    // Rows of codes are copied 4 bytes at a time or more; int2 rows may have any even number of bytes.
    {Of::sides, [](const Call&, const Side& side) { return (rest_of_codes(side, 4) | row_bytes_of(side) % 4) == 0; },
     [](const Call& call, const Side& side) {
       return wanted("rows of codes at multiples of 4 bytes", "a remainder of ",
                     rest_of_codes(side, 4) | row_bytes_of(side) % 4, of(call, side));
     }},
    // Scales are copied eight tokens at a time, or need no copy because all tokens share one.
    {Of::sides,
     [](const Call&, const Side& side) {
       return side.has_channel_scales || has_token_stride(side, 0) || has_token_stride(side, 1);
     },
     [](const Call& call, const Side& side) {
       return wanted("scales and zeros of tokens side by side, or one for all tokens", token_strides(side),
                     of(call, side));
     }},
    {Of::sides,
     [](const Call&, const Side& side) {
       return (side.scale_stride_t == 0 && !side.has_channel_scales) || rest_of_scales(side) == 0;
     },
     [](const Call& call, const Side& side) {
       return wanted("scales and zeros at multiples of 16 bytes", "a remainder of ", rest_of_scales(side),
                     of(call, side));
     }},
    {Of::sides, [](const Call&, const Side& side) { return side.tail == nullptr || rest_of_tail(side) == 0; },
     [](const Call& call, const Side& side) {
       return wanted("dense tokens at multiples of 16 bytes", "a remainder of ", rest_of_tail(side), of(call, side));
     }},
    kTails,
    kGrid,
    kPages,
    kStrides,
    kRowStride,
    kQueryStrides,
};

// --- the chunk kernel

constexpr Requirement kManyRows = {
    Of::call,
    [](const Call& call, const Side&) { return num_rows_of(call.params) >= min_chunk_rows(call.params); },
    [](const Call& call, const Side&) {
      return wanted(std::to_string(min_chunk_rows(call.params)) + " query rows of a key-value head or more",
                    num_rows_of(call.params));
    }};

constexpr Requirement kChunk[] = {
    kManyRows,
    kHalfQuery,
    {Of::sides,
     [](const Call& call, const Side& side) {
       return side.storage != Storage::none ||
              (kHasScratch && num_rows_of(call.params) >= kMinScratchRows && side.dense_dtype != Dtype::fp32);
     },
     [](const Call& call, const Side& side) {
       return wanted("codes, or 16 bits and " + std::to_string(kMinScratchRows) + " query rows of a key-value head",
                     text_of(side.dense_dtype), " " + name_of(call, side) + " and ", num_rows_of(call.params));
     }},
    {Of::sides, [](const Call&, const Side& side) { return side.head_dim % kUnitChannels == 0; },
     [](const Call& call, const Side& side) {
       return wanted("a multiple of " + std::to_string(kUnitChannels) + " channels", side.head_dim, of(call, side));
     }},
    // All codes that a thread takes have one scale, and are loaded at once.
    {Of::sides, [](const Call&, const Side& side) { return group_size_of(side) % kUnitChannels == 0; },
     [](const Call& call, const Side& side) {
       return wanted("groups of a multiple of " + std::to_string(kUnitChannels) + " channels", group_size_of(side),
                     of(call, side));
     }},
    {Of::sides, [](const Call&, const Side& side) { return rest_of_codes(side, unit_bytes(side)) == 0; },
     [](const Call& call, const Side& side) {
       return wanted("rows of codes at multiples of " + std::to_string(unit_bytes(side)) + " bytes",
                     "a remainder of ", rest_of_codes(side, unit_bytes(side)), of(call, side));
     }},
    // New tokens that are not stored yet are read as they are.
    {Of::sides,
     [](const Call& call, const Side& side) { return !call.params.is_chunk || has_aligned_rows(new_of(call, side)); },
     [](const Call& call, const Side& side) {
       const Dense& rows = new_of(call, side);
       const std::string rest = ", a remainder of " + std::to_string(rest_of_rows(rows));
       return wanted("new " + name_of(call, side) + " in 16 bits with rows at multiples of 16 bytes",
                     text_of(rows.dtype), rest);
     }},
    kTails,
    kGrid,
    kPages,
    kStrides,
    kRowStride,
    kQueryStrides,
};

// --- the kernel for latents, without a ring or scales of channels, which the op refuses

constexpr Requirement kLatent[] = {
    {Of::call,
     [](const Call& call, const Side&) {
       const Storage latent = call.params.key_side.storage, rope = call.params.value_side.storage;
       return latent == Storage::int4 ? rope == Storage::int8
                                      : (latent == Storage::int8 || latent == Storage::fp8) && rope == Storage::none;
     },
     [](const Call& call, const Side&) {
       return wanted("latents and rope parts as int8+none, fp8+none or int4+int8",
                     pair_of(call.params.key_side.storage, call.params.value_side.storage));
     }},
    {Of::sides,
     [](const Call& call, const Side& side) {
       return side.is_symmetric != (is_latent_side(call, side) && side.storage == Storage::int4);
     },
     [](const Call& call, const Side& side) {
       return wanted((side.is_symmetric ? "asymmetric " : "symmetric ") + text_of(side.storage) + " " +
                         name_of(call, side),
                     side.is_symmetric ? "symmetric ones" : "asymmetric ones");
     }},
    {Of::call,
     [](const Call& call, const Side&) {
       const int rank = call.params.key_side.head_dim;
       return std::find(std::begin(kLatentRanks), std::end(kLatentRanks), rank) != std::end(kLatentRanks);
     },
     [](const Call& call, const Side&) {
       Choices choices;
       for (const int rank : kLatentRanks) choices.add(std::to_string(rank));
       return wanted("latents of " + choices.text() + " channels", call.params.key_side.head_dim);
     }},
    {Of::call,
     [](const Call& call, const Side&) {
       const int channels = call.params.value_side.head_dim;
       return channels <= kRopeChannels && channels % 16 == 0;
     },
     [](const Call& call, const Side&) {
       return wanted("rope parts of a multiple of 16 channels up to " + std::to_string(kRopeChannels),
                     call.params.value_side.head_dim);
     }},
    {Of::sides, [](const Call& call, const Side& side) { return side.num_groups == wanted_groups(call, side); },
     [](const Call& call, const Side& side) {
       const int count = wanted_groups(call, side);
       return wanted((count == 1 ? "one scale" : std::to_string(count) + " scales") + " in a row", side.num_groups,
                     of(call, side));
     }},
    {Of::call, [](const Call& call, const Side&) { return call.params.num_kv_heads == 1; },
     [](const Call& call, const Side&) { return wanted("latents of one head", call.params.num_kv_heads); }},
    kHalfQuery,
    kQueryDtype,
    {Of::call,
     [](const Call& call, const Side&) {
       const Side &latent = call.params.key_side, &rope = call.params.value_side;
       return rope.storage == Storage::none ||
              ((latent.tail == nullptr) == (rope.tail == nullptr) && latent.ring == rope.ring);
     },
     [](const Call& call, const Side&) {
       return wanted("as many dense tokens of latents as of rope parts", call.params.key_side.ring, " and ",
                     call.params.value_side.ring);
     }},
    {Of::sides, [](const Call&, const Side& side) { return side.codes_stride_t == row_bytes_of(side); },
     [](const Call& call, const Side& side) {
       return wanted("rows of codes " + std::to_string(row_bytes_of(side)) + " bytes apart, without gaps",
                     side.codes_stride_t, of(call, side));
     }},
    {Of::sides,
     [](const Call&, const Side& side) { return side.storage == Storage::none || has_token_stride(side, 1); },
     [](const Call& call, const Side& side) {
       return wanted("scales and zeros of each token, side by side", token_strides(side), of(call, side));
     }},
    {Of::sides, [](const Call&, const Side& side) { return (rest_of_codes(side, 16) | rest_of_scales(side)) == 0; },
     [](const Call& call, const Side& side) {
       return wanted("codes, scales and zeros at multiples of 16 bytes", "a remainder of ",
                     rest_of_codes(side, 16) | rest_of_scales(side), of(call, side));
     }},
    kTails,
};

template <size_t kCount>
Unmet first_unmet(const Requirement (&requirements)[kCount], const Call& call) {
  const Side &keys = call.params.key_side, &values = call.params.value_side;
  for (const Requirement& requirement : requirements) {
    if (!requirement.is_met(call, keys)) return {&requirement, &keys};
    if (requirement.of == Of::sides && !requirement.is_met(call, values)) return {&requirement, &values};
  }
  return {nullptr, nullptr};
}

}  // namespace

const AttendRow* find_row(const DecodeParams& params) {
  const Scales scales = scales_of(params);
  return find([&](const AttendRow& row) { return is_pair_of(row, params) && row.scales == scales; });
}

bool has_aligned_rows(const Dense& dense) {
  return dense.dtype != Dtype::fp32 && rest_of_rows(dense) == 0;
}

Unmet unmet_by_attend(const Call& call) { return first_unmet(kAttend, call); }
Unmet unmet_by_chunk(const Call& call) { return first_unmet(kChunk, call); }
Unmet unmet_by_latent(const Call& call) { return first_unmet(kLatent, call); }

std::string why_general(const Call& call, const std::string& why_not_attend, const std::string& why_not_chunk) {
  if (why_not_attend.empty() || why_not_chunk.empty()) return "";
  // For few query rows nobody expects the chunk kernel.
  const bool has_many_rows = kManyRows.is_met(call, call.params.key_side);
  return why_not_attend + (has_many_rows ? "; for many query rows: " + why_not_chunk : "");
}

std::string why_general(const Call& call) {
  const Unmet attend = unmet_by_attend(call), chunk = unmet_by_chunk(call);
  return why_general(call, attend ? attend.sentence(call) : "", chunk ? chunk.sentence(call) : "");
}

}  // namespace hf_kvquant::cuda
