// Cuts a call of the attention kernel into thread blocks. The cut depends on shapes and the GPU, never on lengths,
// which only the device knows.
#include <algorithm>
#include <tuple>

#include "arch.h"
#include "plan.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kWarps = 8;  // of a multiprocessor

Occupancy find_occupancy(const AttendKernel& kernel, int num_warps, const Device& device) {
  const auto fits = [&](int stages) { return bytes_needed(kernel, num_warps, stages) <= device.bytes_per_cta; };
  Occupancy found{};
  found.num_stages = fits(kernel.num_stages) ? kernel.num_stages : fits(kernel.min_stages) ? kernel.min_stages : 0;
  if (found.num_stages == 0) return found;
  const void* function = reinterpret_cast<const void*>(kernel.function);
  check_cuda("decode",
             cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, device.bytes_per_cta),
             "the kernel must fit the GPU");
  check_cuda(
      "decode",
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.ctas_per_multiprocessor, function, num_warps * kLanesOfWarp,
                                                    bytes_needed(kernel, num_warps, found.num_stages)),
      "the kernel must fit the GPU");
  found.may_overlap = may_overlap(function);
  return found;
}

// Predicts the time of a cut, in microseconds. Thread blocks run in waves. A wave's thread blocks share the bandwidth,
// every multiprocessor alike, but none reads faster than its warps compute. Nothing is read during the first start and
// the last end; between waves, other thread blocks of a multiprocessor fill in as far as they can. Combining takes
// longer the more parts there are.
double predict(const AttendKernel& kernel, const ArchSpec& arch, int num_multiprocessors, int64_t num_units,
               int64_t steps, const Cut& cut) {
  const int64_t rounds = (steps + cut.num_warps - 1) / cut.num_warps;
  const int64_t slots = int64_t{num_multiprocessors} * cut.ctas_per_multiprocessor;
  const double step_bytes = kernel.stage_bytes;
  const double bytes = step_bytes * cut.num_warps * static_cast<double>((rounds + cut.splits - 1) / cut.splits);
  const double of_channel = step_bytes / (static_cast<double>(kernel.step_tokens) * kernel.head_dim);
  const double channels = kernel.key == Storage::fp8 && kernel.is_paged ? arch.paged_fp8_channels
                          : kernel.scales == Scales::rows               ? arch.channels
                                                                        : arch.grouped_channels;
  const double most =
      of_channel * std::min(channels * cut.num_warps, arch.all_channels / cut.ctas_per_multiprocessor);
  const auto wave = [&](int64_t ctas) {
    const int64_t sharing = (ctas + num_multiprocessors - 1) / num_multiprocessors * num_multiprocessors;
    return bytes / std::min(arch.bandwidth / static_cast<double>(sharing), most);
  };
  const int64_t ctas = num_units * cut.splits, whole = ctas / slots, rest = ctas % slots;
  const double filled_in =
      std::min(1.0, (cut.ctas_per_multiprocessor - 1) * most * num_multiprocessors / arch.bandwidth);
  return static_cast<double>(whole) * wave(slots) + (rest > 0 ? wave(rest) : 0) +
         arch.start_and_end[cut.num_warps > kFewAttendWarps] +
         arch.turn * (1 - filled_in) * static_cast<double>(whole - (rest > 0 ? 0 : 1)) +
         (cut.splits > 1 ? arch.combine + arch.combine_part * static_cast<double>(cut.splits) : 0);
}

Cut fastest_cut(const AttendKernel& kernel, const Device& device, int64_t num_units, int64_t steps, int64_t splits,
                int64_t most_splits) {
  const ArchSpec arch = arch_of(device.capability, device.num_multiprocessors);
  Cut best{};
  double least = 0;
  for (int num_warps = kFewAttendWarps; num_warps <= kMaxAttendWarps; num_warps *= 2) {
    const int most_ctas = occupancy_of(kernel, num_warps, device).ctas_per_multiprocessor;
    for (int ctas = std::min(2, most_ctas); ctas > 0 && ctas <= most_ctas; ++ctas) {
      const int64_t slots = int64_t{device.num_multiprocessors} * ctas;
      const int64_t worthwhile = std::min({steps / num_warps, 4 * slots / num_units, most_splits});
      const int64_t most = splits > 0 ? splits : std::max(int64_t{1}, worthwhile);
      for (Cut cut{std::max<int64_t>(1, splits), num_warps, ctas}; cut.splits <= most; ++cut.splits) {
        const double time = predict(kernel, arch, device.num_multiprocessors, num_units, steps, cut);
        if (best.splits == 0 || time < least) best = cut, least = time;
      }
    }
  }
  return best;
}

int64_t fastest_chunk_splits(const AttendKernel& kernel, const Device& device, int64_t num_units, int64_t steps) {
  const ArchSpec arch = arch_of(device.capability, device.num_multiprocessors);
  const double tile = (kernel.fill_scratch == nullptr ? arch.tile : arch.copied_tile) * kernel.step_tokens *
                      kernel.head_dim / (128 * 128);
  const auto time = [&](int64_t splits) {
    const auto waves = static_cast<double>((num_units * splits + device.num_multiprocessors - 1) /
                                           device.num_multiprocessors);
    return waves * (arch.chunk_start + tile * static_cast<double>((steps + splits - 1) / splits)) +
           (splits > 1 ? arch.combine_chunk * static_cast<double>(splits) : 0);
  };
  int64_t best = 1;
  const int64_t filling = 4 * int64_t{device.num_multiprocessors} / std::max<int64_t>(1, num_units) + 1;
  const int64_t most = std::min(steps, filling);
  for (int64_t splits = 2; splits <= most; ++splits) {
    if (time(splits) < time(best)) best = splits;
  }
  return best;
}

}  // namespace

Occupancy occupancy_of(const AttendKernel& kernel, int num_warps, const Device& device) {
  return remember(std::make_tuple(kernel.function, kernel.fixed_bytes, num_warps, device.number),
                  [&] { return find_occupancy(kernel, num_warps, device); });
}

int bytes_needed(const AttendKernel& kernel, int num_warps, int num_stages) {
  return kernel.fixed_bytes + num_warps * num_stages * kernel.stage_bytes;
}

int shared_bytes(const AttendKernel& kernel, const Device& device, const Occupancy& occupancy, const Cut& cut) {
  const int needed = bytes_needed(kernel, cut.num_warps, occupancy.num_stages);
  if (cut.ctas_per_multiprocessor >= occupancy.ctas_per_multiprocessor) return needed;
  const int too_many = device.bytes_per_multiprocessor / (cut.ctas_per_multiprocessor + 1) - device.reserved_bytes;
  return std::min(std::max(needed, too_many + 1), device.bytes_per_cta);
}

Cut choose_cut(const AttendKernel& kernel, const Device& device, int64_t num_units, int64_t steps, int64_t splits,
               int64_t most_splits) {
  return remember(
      std::make_tuple(kernel.function, kernel.fixed_bytes, device.number, num_units, steps, splits, most_splits),
      [&] { return fastest_cut(kernel, device, num_units, steps, splits, most_splits); });
}

bool is_fine_plan(const Device& device, int64_t num_shares) {
  // Others have slots for four thread blocks of a multiprocessor at most, these for six: see num_slots_of.
  return num_shares > 5 * int64_t{device.num_multiprocessors};
}

Cut planned_cut(const AttendKernel& kernel, const Device& device, bool is_fine) {
  const int num_warps = is_fine ? kernel.min_warps : kFewAttendWarps;
  const int most_ctas = occupancy_of(kernel, num_warps, device).ctas_per_multiprocessor;
  return {most_ctas > 0 ? 1 : 0, num_warps, std::min(kWarps / num_warps, most_ctas)};
}

bool has_chunk_code(const AttendKernel& kernel, const Device& device) {
  const void* function = reinterpret_cast<const void*>(kernel.function);
  return remember(std::make_tuple(function, device.number), [&] {
    cudaFuncAttributes attributes;
    // Where the extension was built for other GPUs only, there may be no code, or empty code.
    if (cudaFuncGetAttributes(&attributes, function) != cudaSuccess || attributes.ptxVersion < 90) {
      cudaGetLastError();
      return false;
    }
    check_cuda("decode",
               cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.fixed_bytes),
               "the kernel must fit the GPU");
    return true;
  });
}

int64_t choose_chunk_splits(const AttendKernel& kernel, const Device& device, int64_t num_units, int64_t steps) {
  return remember(std::make_tuple(kernel.function, device.number, num_units, steps),
                  [&] { return fastest_chunk_splits(kernel, device, num_units, steps); });
}

}  // namespace hf_kvquant::cuda
