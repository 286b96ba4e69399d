// What the plan knows about a GPU that its driver does not tell. One row per GPU; a new one needs a row only where the
// numbers of the default choose badly. Only the H200 was measured.
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
  // Of e4m3 in pages: where 4 warps ran on a multiprocessor, 1 x 128k took 76 us; with 8, which this chooses, 70.
  double paged_fp8_channels = 3800;
  // The same for all warps of a multiprocessor together. It counts for codes so small that memory is not the limit.
  double all_channels = 43000;
  // When nothing is read: before the first copy and after the last, with the fewest warps and with the most.
  double start_and_end[2] = {3.5, 4.2};
  double turn = 2.5;                           // from one wave of thread blocks to the next
  double combine = 1.25, combine_part = 0.12;  // to combine parts: once, and for every part
  // Of a thread block of the chunk kernel: before its first tile and after its last, a tile of 128 tokens and 128
  // channels, and one part to combine. A tile that is only copied is an estimate: 2,600 clocks at 1.6 GHz (now 2,400).
  double chunk_start = 6, tile = 2.2, copied_tile = 1.6, combine_chunk = 1;
};

// Only the bandwidth is known of other GPUs: gigabytes a second of the data sheet, of which they are taken to reach as
// much as an H200. The rest counts for little wherever reading takes long.
constexpr ArchSpec not_measured(double gigabytes) {
  ArchSpec spec;
  spec.bandwidth = 0.94e3 * gigabytes;
  return spec;
}

// The numbers for a GPU with a compute capability such as 90. H100 and H200 have the same number of multiprocessors, so
// all GPUs of 9.0 share the numbers of the H200; so do GPUs that are not listed, on which the ratio of a full wave to a
// partial one still chooses well enough.
constexpr ArchSpec arch_of(int capability, int num_multiprocessors) {
  struct Row {
    int capability, num_multiprocessors;
    double gigabytes;
  };
  constexpr Row kRows[] = {
      {80, 108, 2039},  // A100 80 GB
      {80, 56, 933},    // A30
      {86, 72, 600},    // A10
      {86, 82, 936},    // RTX 3090
      {86, 84, 696},    // A40
      {89, 58, 300},    // L4
      {89, 128, 1008},  // RTX 4090
      {89, 142, 864},   // L40S
  };
  for (const Row& row : kRows) {
    if (row.capability == capability && row.num_multiprocessors == num_multiprocessors) {
      return not_measured(row.gigabytes);
    }
  }
  return {};
}

}  // namespace hf_kvquant::cuda
