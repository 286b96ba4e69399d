// Prints which attention kernel a plan chooses, without a GPU: csrc/cuda/plan is linked to kernels that are only names.
//
// A line for each pair of formats and head dim that the table of kernels has, with and without pages: what was asked
// for, then what the chosen kernel is for. test_plan.py builds and reads it.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cuda/attend/attend_table.h"
#include "cuda/plan/plan.h"

namespace hf_kvquant::cuda {
namespace {

using Function = void (*)(DecodeParams, NewTokens, DecodePlan, float*);

// A kernel's name: its row in the table, head dim, and whether it is for pages.
Function name_of(int row, int head_dim, bool is_paged) {
  return reinterpret_cast<Function>(intptr_t{1} + row * 4096 + head_dim * 2 + is_paged);
}

constexpr int kBytes = 227 * 1024;  // of shared memory, as on Hopper

}  // namespace

template <Storage kKey, Storage kValue, bool kHasKeyZero, bool kHasValueZero, Scales kScales>
AttendKernel kernel_for(int head_dim, int num_rows, bool is_paged) {
  AttendKernel kernel{};
  for (int row = 0; row < kNumAttendRows; ++row) {
    const AttendRow& each = kAttendTable[row];
    if (each.key == kKey && each.value == kValue && each.scales == kScales) {
      kernel.function = name_of(row, head_dim, is_paged);
    }
  }
  kernel.fixed_bytes = kernel.stage_bytes = 1024, kernel.num_stages = kernel.min_stages = kernel.min_warps = 2;
  kernel.head_dim = head_dim, kernel.rows_per_tile = std::max(num_rows, 4), kernel.step_tokens = 32;
  kernel.slot_floats = kernel.rows_per_tile * (head_dim + 2), kernel.key = kKey, kernel.scales = kScales;
  kernel.is_paged = is_paged, kernel.has_key_zero = kHasKeyZero, kernel.has_value_zero = kHasValueZero;
  return kernel;
}

template <size_t... kRows>
void instantiate(std::index_sequence<kRows...>) {
  AttendKernel (*const kernels[])(int, int, bool) = {
      kernel_for<kAttendTable[kRows].key, kAttendTable[kRows].value, kAttendTable[kRows].has_key_zero,
                 kAttendTable[kRows].has_value_zero, kAttendTable[kRows].scales>...};
  volatile const auto used = kernels[0];
  static_cast<void>(used);
}

AttendKernel chunk_kernel_for(int, bool, ChunkKind) { return {}; }
Device current_device() { return {0, 90, 132, kBytes + 1024, kBytes, 1024}; }
bool may_overlap(const void*) { return true; }
void check_cuda(const char*, cudaError_t, const char*) {}
void launch(const char*, const void*, const Launch&, void**) {}
void append(const AppendParams&, void*) {}
void decode_general(const DecodeParams&, const DecodePlan&, float*, void*) {}

}  // namespace hf_kvquant::cuda

extern "C" {
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->numRegs = 128;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
}

using namespace hf_kvquant;
using namespace hf_kvquant::cuda;

// A side of two heads and 256 tokens, in memory that nobody reads.
Side side_of(Storage storage, bool has_zero, Scales scales, bool is_key, int head_dim) {
  Side side{};
  side.storage = storage, side.dense_dtype = Dtype::bf16, side.head_dim = head_dim, side.is_symmetric = !has_zero;
  side.num_groups = scales == Scales::groups ? head_dim / kGroupChannels : 1;
  side.has_channel_scales = scales == Scales::blocks && is_key;
  side.codes = reinterpret_cast<uint8_t*>(4096), side.codes_stride_t = row_bytes_of(side);
  side.codes_stride_h = 256 * side.codes_stride_t, side.codes_stride_b = 2 * side.codes_stride_h;
  if (storage == Storage::none) return side;
  side.scale = reinterpret_cast<half_bits*>(4096), side.scale_stride_t = 1, side.scale_stride_g = 256;
  side.scale_stride_h = 256 * side.num_groups, side.scale_stride_b = 2 * side.scale_stride_h;
  if (has_zero) {
    side.zero = side.scale, side.zero_stride_t = 1, side.zero_stride_g = 256;
    side.zero_stride_h = side.scale_stride_h, side.zero_stride_b = side.scale_stride_b;
  }
  return side;
}

int main() {
  instantiate(std::make_index_sequence<kNumAttendRows>());
  for (int row = 0; row < kNumAttendRows; ++row) {
    for (const int head_dim : {64, 128, 256}) {
      for (const bool is_paged : {false, true}) {
        const AttendRow& asked = kAttendTable[row];
        static const int32_t table[2] = {};
        DecodeParams params{};
        params.batch = params.q_len = 1, params.num_kv_heads = 2, params.num_q_heads = 4, params.capacity = 256;
        params.key_side = side_of(asked.key, asked.has_key_zero, asked.scales, true, head_dim);
        params.value_side = side_of(asked.value, asked.has_value_zero, asked.scales, false, head_dim);
        params.query = {reinterpret_cast<void*>(4096), Dtype::bf16, 4 * head_dim, head_dim, head_dim};
        params.softmax_scale = 1;
        if (is_paged) params.page_table = table, params.page_rows = 256, params.num_pages = 1;
        const int64_t found = reinterpret_cast<intptr_t>(plan_decode(params, nullptr).kernel.function) - 1;
        std::printf("%d %d %d %d %d %d\n", row, head_dim, is_paged, static_cast<int>(found / 4096),
                    static_cast<int>(found % 4096 / 2), static_cast<int>(found % 2));
      }
    }
  }
}
