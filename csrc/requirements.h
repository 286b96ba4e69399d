// What the attention kernels for GPUs ask of a call: ordered lists of requirements. A kernel serves a call that meets
// all of its list, and the first one that it does not meet says why not: 'wanted X, got Y'. So decision and reason are
// the same code. Nothing here needs CUDA, so every build answers, on a CPU too. What a GPU and the build for it must
// have comes after these, in cuda/plan/choose.cpp.
#pragma once

#include <sstream>
#include <string>

#include "format.h"

namespace hf_kvquant::cuda {

struct AttendRow;

// Whether long chunks read tiles that a launch before fills once (sm90/chunk/scratch.cuh), from how many query rows of
// a key-value head on. So do chunks over unquantised tokens, which no other chunk kernel serves.
constexpr bool kHasScratch = true;
constexpr int kMinScratchRows = 1024;

// Up to how many query rows the chunk kernel for few of them serves, and whether it could: softcap and ALiBi change
// scores, which it has no code for.
constexpr int kMostFewRows = 64;
bool changes_scores(const DecodeParams& params);

// The row of kAttendTable with the storage types and the kind of scales of a call; nullptr: none.
const AttendRow* find_row(const DecodeParams& params);

struct Call {
  // `new_tokens` are appended first; nullptr: none.
  Call(const DecodeParams& params, const AppendParams* new_tokens)
      : params(params), new_tokens(new_tokens), row(find_row(params)) {}

  const DecodeParams& params;
  const AppendParams* new_tokens;
  const AttendRow* row;
};

// One of a call as a whole, which ignores `side`, or one of both sides: of keys and values, or latents and rope parts.
enum class Of { call, sides };

struct Requirement {
  Of of;
  bool (*is_met)(const Call& call, const Side& side);
  std::string (*sentence)(const Call& call, const Side& side);  // where it is not met
};

// The first requirement that a call does not meet, and for which side; false: it meets all.
struct Unmet {
  const Requirement* requirement;
  const Side* side;

  explicit operator bool() const { return requirement != nullptr; }
  std::string sentence(const Call& call) const { return requirement->sentence(call, *side); }
};

// Of the attention kernel (attend/), of the chunk kernel (sm90/chunk/) and of the kernel for latents (latent/).
Unmet unmet_by_attend(const Call& call);
Unmet unmet_by_chunk(const Call& call);
Unmet unmet_by_latent(const Call& call);

// Why the general kernel serves a call of decode, from the reasons of the other two; empty: one of them serves.
std::string why_general(const Call& call, const std::string& why_not_attend, const std::string& why_not_chunk);

// The same of a GPU that has and can do everything.
std::string why_general(const Call& call);

// The query rows of a key-value head.
inline int num_rows_of(const DecodeParams& params) {
  return params.num_q_heads / params.num_kv_heads * params.q_len;
}

// Whether keys or values without codes are numbers of the query's dtype, which tensor cores multiply as they are.
inline bool has_multipliable_values(const Side& side, Dtype query_dtype) {
  return side.storage != Storage::none || side.dense_dtype == query_dtype;
}

// Whether kernels may load eight channels of new tokens at once.
bool has_aligned_rows(const Dense& dense);

template <class Wanted, class... Got>
std::string wanted(const Wanted& what, const Got&... got) {
  std::ostringstream text;
  text << "wanted " << what << ", got ";
  (text << ... << got);
  return text.str();
}

}  // namespace hf_kvquant::cuda
