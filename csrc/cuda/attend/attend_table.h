// Which calls the attention kernels serve: one row per pair of storage types. A new pair is a new row and a file of
// instantiations (attend_*.cu); csrc/requirements.cpp reads the rows, and what none of them serves gets the generic
// kernel. Every row has kernels for head dims up to 256 and for any number of query rows (instantiate.cuh).
#pragma once

#include "../cuda.h"

namespace hf_kvquant::cuda {

struct AttendRow {
  Storage key, value;
  bool has_key_zero, has_value_zero;  // false: that side must be symmetric; true: it may be
  Scales scales;
};

// One for all files: `Call::row` points into it.
inline constexpr AttendRow kAttendTable[] = {
    {Storage::none, Storage::none, false, false, Scales::rows},  // of the query's dtype, without a key transform
    {Storage::int8, Storage::int8, false, false, Scales::rows},
    {Storage::int8, Storage::int4, false, true, Scales::rows},
    {Storage::int4, Storage::int4, true, true, Scales::rows},
    {Storage::int4, Storage::int4, true, true, Scales::groups},  // of a multiple of kGroupChannels
    {Storage::int4, Storage::int4, true, true, Scales::blocks},  // of keys; values have one scale per token
    {Storage::fp8, Storage::fp8, false, false, Scales::rows},
    {Storage::int4, Storage::int2, true, true, Scales::rows},
    {Storage::int2, Storage::int2, true, true, Scales::rows},
};
constexpr int kNumAttendRows = sizeof kAttendTable / sizeof kAttendTable[0];

}  // namespace hf_kvquant::cuda
