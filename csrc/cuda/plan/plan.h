// The parts of the plan: plan.cpp asks the kernels in turn, choose.cpp says whether one serves the call, cut.cpp into
// how many thread blocks to cut it.
#pragma once

#include <string>

#include "../../requirements.h"
#include "../common/device.h"
#include "../cuda.h"

namespace hf_kvquant::cuda {

constexpr int kLanesOfWarp = 32;

// Its `function` is nullptr where the general kernel has to serve; `why_not` then says why, if it is wanted.
AttendKernel choose_kernel(const Call& call, std::string* why_not);

// The same for many query rows; where its `function` is nullptr, choose_kernel chooses.
AttendKernel choose_chunk_kernel(const Call& call, std::string* why_not);

// The scratch that a chunk kernel reads its tiles from: tiles of a side of one sequence and head, and of how many heads
// it may hold the tiles at a time, those of all sequences together. 0: it does not fit.
struct Scratch {
  int tiles, most_heads;
};

Scratch scratch_of(const DecodeParams& params, const AttendKernel& kernel);

// The most copies of tokens that a chunk kernel attends to: see `Copies` in sm90/chunk/shape.cuh.
int most_copies(const DecodeParams& params);

// Whether the extension has code of a chunk kernel for a GPU that it fits.
bool has_chunk_code(const AttendKernel& kernel, const Device& device);

// Whether the attention kernel can quantise the new tokens itself. It must support their formats in full, and a single
// thread block must see all queries of a head. `new_tokens` nullptr: there are none.
bool can_append(const AttendKernel& kernel, const AppendParams* new_tokens, int64_t num_row_tiles);

// How a kernel with a given number of warps per thread block runs on a GPU.
struct Occupancy {
  int num_stages;               // of a warp's pipeline: all if they fit, else fewer
  int ctas_per_multiprocessor;  // at most; 0: the kernel does not fit
  bool may_overlap;             // see device.h
};

Occupancy occupancy_of(const AttendKernel& kernel, int num_warps, const Device& device);

// Into how many thread blocks to split a unit, with how many warps, and how many of them may share a multiprocessor.
struct Cut {
  int64_t splits;
  int num_warps;
  int ctas_per_multiprocessor;
};

// Of shared memory.
int bytes_needed(const AttendKernel& kernel, int num_warps, int num_stages);

// Shared memory of a thread block: at least so much that no more of them run on a multiprocessor than the cut wants.
int shared_bytes(const AttendKernel& kernel, const Device& device, const Occupancy& occupancy, const Cut& cut);

// The fastest cut of `num_units` units of `steps` steps each with `splits` splits, or with at most `most_splits` if
// that is 0. It has 0 splits if the kernel does not fit the GPU. Cuts are remembered, since trying all of them takes
// microseconds, in every layer and step.
Cut choose_cut(const AttendKernel& kernel, const Device& device, int64_t num_units, int64_t steps, int64_t splits,
               int64_t most_splits);

// Whether a split plan with slots for so many shares of all heads was made for the smallest thread blocks: see
// num_slots_of in hf_kvquant/ops/planning.py.
bool is_fine_plan(const Device& device, int64_t num_shares);

// The cut where a split plan says how sequences are split: many small thread blocks.
Cut planned_cut(const AttendKernel& kernel, const Device& device, bool is_fine);

// What choose_cut does for a chunk kernel, of which one thread block runs on a multiprocessor.
int64_t choose_chunk_splits(const AttendKernel& kernel, const Device& device, int64_t num_units, int64_t steps);

}  // namespace hf_kvquant::cuda
