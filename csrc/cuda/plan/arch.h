// What the plan knows about a GPU that its driver does not tell.
#pragma once

namespace hf_kvquant::cuda {

// The numbers with which `predict` (cut.cpp) weighs one way to cut a call against another. Times are in microseconds.
struct ArchSpec {
  // Bytes a microsecond that all multiprocessors read together. H200: 4.54 TB/s over 4 GiB, 4.44 over 570 MiB, with
  // loads of 16 bytes and a sum (2026-11); that is 94 % of its data sheet.
  double bandwidth = 4.5e6;
  // Channels of keys and values that a warp attends to a microsecond, if it need not wait for memory: without groups or
  // blocks, with them. Like all numbers below fitted to times of decode calls on an H200 (2026-11).
  double channels = 6700, grouped_channels = 5400;
  // When nothing is read: before the first copy and after the last, with the fewest warps and with the most.
  double start_and_end[2] = {3.5, 4.2};
  double turn = 2.5;                           // from one wave of thread blocks to the next
  double combine = 1.25, combine_part = 0.12;  // to combine parts: once, and for every part
};

// The numbers for a GPU with a compute capability such as 90. All GPUs share those of the H200: they are good enough to
// choose by, since the ratio of a full wave to a partial one decides.
constexpr ArchSpec arch_of(int /* capability */, int /* num_multiprocessors */) { return {}; }

}  // namespace hf_kvquant::cuda
