// What copies codes and scales to shared memory for one warp: a pipeline of stages, each with one step. Asynchronous
// copies fill stages while the warp computes on earlier ones. Every warp has its own pipeline and waits for no other.
//
// A stage is [key codes][value codes][key scales][key zeros][value scales][value zeros], codes in the order of
// RowLayout, scales in token order, group by group. Tokens that no query of the thread block sees become zeros: their
// memory may hold anything, even uninitialised data.
//
// If the planes themselves are a ring, tokens continue at their first rows (laps.h). This never splits a step, since
// steps are aligned and the number of rows is a multiple of a step. With pages, nearly every step of a warp is in
// another page, so it has no pointers that move on: lanes hold the pages of its next 32 steps. Where few warps run,
// nothing hides what a step waits for, so each step finds the page of the next one, and entries of the page table are
// loaded 32 steps ahead. (A load in each step returns behind the copies before it: 1 x 128k, fp8, 96 us instead of 79,
// H200, 2026-11.)
#pragma once

#include "../common/codes.cuh"
#include "fragments.cuh"

namespace hf_kvquant::cuda {

// `kBlockChannels`: the channels of the keys in granularity channel, else 0. A stage then has the keys' scales and
// zeros of the step's block, channel by channel, instead of its tokens' scales and zeros. Codes of keys end with the
// last full block: the unfinished one has none (blocks.cuh).
template <int kKeyRowBytes, int kValueRowBytes, bool kHasKeyZero, bool kHasValueZero, int kNumGroups, int kTilesPerStep,
          int kBlockChannels, bool kIsPaged>
class Pipeline {
 public:
  static constexpr int kStepTokens = 16 * kTilesPerStep;
  static constexpr int kHalves = 2 * kTilesPerStep;  // half tiles of 8 tokens; the b of fragments.cuh
  static constexpr int kScaleBytes = kStepTokens * 2;
  static constexpr int kNumPlanes = 2 + kHasKeyZero + kHasValueZero;
  static constexpr int kPlaneBytes = kNumGroups * kScaleBytes;
  static constexpr int kValueAt = kStepTokens * kKeyRowBytes;
  static constexpr int kScalesAt = kValueAt + kStepTokens * kValueRowBytes;
  static constexpr bool kIsBlocked = kBlockChannels > 0;
  static constexpr int kKeyPlaneBytes = kIsBlocked ? kBlockChannels * 2 : kPlaneBytes;
  static constexpr int kKeyZeroAt = kScalesAt + kKeyPlaneBytes;
  static constexpr int kValueScaleAt = kScalesAt + (1 + kHasKeyZero) * kKeyPlaneBytes;
  static constexpr int kValueZeroAt = kValueScaleAt + kPlaneBytes;
  static constexpr int kStageBytes = kValueScaleAt + (1 + kHasValueZero) * kPlaneBytes;

  // `memory` is shared, num_stages · kStageBytes; `stride` is in steps. Call `seek` and `bound` before use.
  __device__ __forceinline__ Pipeline(const DecodePlan& plan, unsigned char* memory, int stride, int lane)
      : memory_(shared_address(memory)), stride_(stride * kStepTokens), lane_(lane), is_dense_(plan.is_dense) {
    key_place_ = place_of_chunk<kKeyRowBytes>(lane), value_place_ = place_of_chunk<kValueRowBytes>(lane);
    keep(key_place_);
    if constexpr (kKeyRowBytes == kValueRowBytes) {
      value_place_ = key_place_;
    } else {
      keep(value_place_);
    }
  }

  // Lists where the chunks of rows go that are not dense, once for all warps of a thread block. All threads of it call
  // this.
  static __device__ __noinline__ void list_chunks(const DecodeParams& params, const DecodePlan& plan, uint32_t list) {
    list_chunks<kKeyRowBytes>(params.key_side, plan.key_chunks, list);
    list_chunks<kValueRowBytes>(params.value_side, plan.value_chunks,
                                list + plan.key_chunks.num_chunks * kChunkPlaceBytes);
    __syncthreads();
  }

  // Fills what no copy writes: with zeros where rows are narrower than the kernel's or a format has no zeros, and with
  // the scale of formats that have one for all tokens.
  static __device__ __noinline__ void fill_gaps(const DecodeParams& params, uint32_t memory, int num_stages, int lane,
                                                int b) {
    const Side &keys = params.key_side, &values = params.value_side;
    for (int byte = lane * 16; byte < num_stages * kStageBytes; byte += kLanes * 16) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(memory + byte), "r"(0) : "memory");
    }
    __syncwarp();
    for (int stage = 0; stage < num_stages; ++stage) {
      const uint32_t to = memory + stage * kStageBytes;
      if (!kIsBlocked && keys.scale != nullptr && keys.scale_stride_t == 0) {
        write_plane(to + kScalesAt, *scale_at(keys, b, 0, 0, 0), lane);
        if (kHasKeyZero && keys.zero != nullptr) write_plane(to + kKeyZeroAt, *zero_at(keys, b, 0, 0, 0), lane);
      }
      if (values.scale != nullptr && values.scale_stride_t == 0) {
        write_plane(to + kValueScaleAt, *scale_at(values, b, 0, 0, 0), lane);
        if (kHasValueZero && values.zero != nullptr) write_plane(to + kValueZeroAt, *zero_at(values, b, 0, 0, 0), lane);
      }
    }
    __syncwarp();
  }

  // Limits copies to tokens begin ... end - 1, and of keys to those before `key_end`, which is at most `end`. To be
  // called after the last `seek`.
  __device__ __forceinline__ void bound(const DecodeParams& params, const DecodePlan& plan, const Segment& segment,
                                        int begin, int end, int key_end) {
    begin_ = begin, end_ = end, key_end_ = kIsBlocked ? key_end : end;
    whole_end_ = kIsPaged ? key_end_ : min(key_end_, lap_end_);
    if (!is_dense_) {
      const int slot = kIsPaged ? 0 : segment.b, row = kIsPaged ? 0 : plan.laps.row(first_);
      key_codes_ = code_row(params.key_side, slot, segment.h, row);
      value_codes_ = code_row(params.value_side, slot, segment.h, row);
    }
    if constexpr (kIsPaged) {
      sequence_ = segment.b, num_found_ = 0;
      entry_behind_ = entry_of_lane(plan, first_);
      find_page(plan, first_);
    }
  }

  // Moves to a step.
  __device__ __forceinline__ void seek(const DecodePlan& plan, const Segment& segment, int step) {
    first_ = step * kStepTokens;
    // With pages, pointers stay at the first rows of the first page.
    const int lap = kIsPaged ? first_ : plan.laps.begin(first_), row = first_ - lap, slot = kIsPaged ? 0 : segment.b;
    if constexpr (!kIsPaged) lap_end_ = lap + plan.laps.num_rows;
    key_codes_ = chunk_of(plan.key_codes.at(slot, segment.h, row * (kKeyRowBytes / 16) + lane_));
    value_codes_ = chunk_of(plan.value_codes.at(slot, segment.h, row * (kValueRowBytes / 16) + lane_));
#pragma unroll
    for (int i = 0; i < kScaleCopies; ++i) {
      const int chunk = i * kLanes + lane_, number = chunk / (kNumGroups * kScaleChunks);
      const PlaneOfScales& plane = plan.scales[kFirstPlane + min(number, kNumTokenPlanes - 1)];
      unsigned further = row / kChunkTokens + chunk % kScaleChunks;
      if constexpr (kNumGroups > 1) {
        // The cache's groups may be larger than the kernel's, and its rows narrower.
        const int group = chunk / kScaleChunks % kNumGroups;
        further += plane.stride_g * min(plane.groups_per_group.quotient(group), plane.last_group);
      }
      has_scales_[i] = number < kNumTokenPlanes && plane.heads.data != nullptr;
      scales_[i] = reinterpret_cast<const half_bits*>(plane.heads.at(slot, segment.h, further));
      if constexpr (kIsPaged) scale_strides_[i] = plane.heads.stride_b;
    }
    if constexpr (kIsBlocked) {
#pragma unroll
      for (int i = 0; i < kBlockCopies; ++i) {
        const int chunk = i * kLanes + lane_;
        const PlaneOfScales& plane = plan.scales[min(chunk / kBlockChunks, kFirstPlane - 1)];
        blocks_[i] = plane.heads.at(slot, segment.h, chunk % kBlockChunks);
        block_strides_[i] = plane.stride_g;
        if constexpr (kIsPaged) page_strides_[i] = plane.heads.stride_b;
      }
    }
  }

  // Starts copying `step`, which must be the next one, into a stage, and moves on by a stride. The caller commits.
  __device__ __forceinline__ void fill(const DecodeParams& params, const DecodePlan& plan, uint32_t list, int stage,
                                       int step) {
    first_ = step * kStepTokens;
    const uint32_t to = memory_ + stage * kStageBytes;
    if constexpr (kIsPaged) {
      fill_from_page(params, plan, list, to);
      return find_page(plan, first_ + stride_);
    }
    if (is_dense_ && first_ >= begin_ && first_ + kStepTokens <= whole_end_) {
      fill_dense<kKeyRowBytes, false>(to, key_place_, key_codes_, end_);
      fill_dense<kValueRowBytes, false>(to + kValueAt, value_place_, value_codes_, end_);
      fill_scales<false>(to, scales_);
    } else {
      while (first_ >= lap_end()) start_lap(params, plan.laps);
      if (is_dense_) {
        fill_dense<kKeyRowBytes, true>(to, key_place_, key_codes_, key_end_);
        fill_dense<kValueRowBytes, true>(to + kValueAt, value_place_, value_codes_, end_);
      } else {
        fill_rows(key_codes_, plan.key_chunks, list, to, key_end_);
        fill_rows(value_codes_, plan.value_chunks, list + plan.key_chunks.num_chunks * kChunkPlaceBytes, to + kValueAt,
                  end_);
      }
      fill_scales<true>(to, scales_);
    }
    if constexpr (kIsBlocked) fill_block(params.key_side.head_dim, 0, first_ - lap_end_ + plan.laps.num_rows, to);
    key_codes_ += int64_t{stride_} * row_stride(params.key_side);
    value_codes_ += int64_t{stride_} * row_stride(params.value_side);
    for_all<kScaleCopies>([&](int i) { scales_[i] += stride_; });
  }

 private:
  static constexpr int kChunkTokens = 8;  // scales in 16 bytes
  static constexpr int kScaleChunks = kScaleBytes / 16;
  // Planes with scales of tokens come after those with scales of blocks.
  static constexpr int kFirstPlane = kIsBlocked ? 1 + kHasKeyZero : 0, kNumTokenPlanes = kNumPlanes - kFirstPlane;
  static constexpr int kTokenScalesAt = kIsBlocked ? kValueScaleAt : kScalesAt;
  static constexpr int kScaleCopies = (kNumTokenPlanes * kNumGroups * kScaleChunks + kLanes - 1) / kLanes;
  static constexpr int kBlockChunks = kIsBlocked ? kKeyPlaneBytes / 16 : 1;
  static constexpr int kBlockCopies = (kFirstPlane * kBlockChunks + kLanes - 1) / kLanes;

  static __device__ __forceinline__ const uint8_t* chunk_of(const uint4* chunk) {
    return reinterpret_cast<const uint8_t*>(chunk);
  }

  // Stride of rows of codes, in bytes: kRowBytes where rows are dense. plan.cpp has checked that it fits 32 bits.
  static __device__ __forceinline__ int row_stride(const Side& side) { return static_cast<int>(side.codes_stride_t); }

  // The entry of the page table for the step that is `lane` steps behind the one at token `first`; 0 beyond the end.
  __device__ __forceinline__ int entry_of_lane(const DecodePlan& plan, int64_t first) const {
    const int64_t token = first + int64_t{lane_} * stride_;
    return token < end_ ? plan.laps.entry(sequence_, static_cast<int>(token)) : 0;
  }

  // Finds the page and the row of the next step, which begins at `token`. The vote tells the compiler that no lane goes
  // another way, and the shuffle takes a number that nothing changes before it has been read.
  __device__ __forceinline__ void find_page(const DecodePlan& plan, int token) {
    if (__any_sync(kAllLanes, num_found_ % kLanes == 0)) {
      page_ = plan.laps.slot_of(entry_behind_);
      entry_behind_ = entry_of_lane(plan, int64_t{token} + kLanes * stride_);
    }
    next_page_ = __shfl_sync(kAllLanes, page_, num_found_), next_row_ = plan.laps.row(token);
  }

  // The same place in another page, `stride` being in multiples of 16 bytes and `page` 16 times its number. All pages
  // together may be larger than 64 GB, which 32 bits of such multiples do not count; this product of two numbers of 32
  // bits is one instruction, unlike one of 64 bits.
  template <class T>
  static __device__ __forceinline__ const T* in_page(const T* first, uint32_t stride, uint32_t page) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first) + uint64_t{stride} * page);
  }

  // `fill` with pages.
  __device__ __forceinline__ void fill_from_page(const DecodeParams& params, const DecodePlan& plan, uint32_t list,
                                                 uint32_t to) {
    const uint32_t page = next_page_ * 16u, row = next_row_;
    ++num_found_;
    const half_bits* scales[kScaleCopies];
    for_all<kScaleCopies>([&](int i) { scales[i] = in_page(scales_[i], scale_strides_[i], page) + row; });
    if constexpr (kIsBlocked) fill_block(params.key_side.head_dim, page, row, to);
    if (is_dense_) {
      const uint8_t* const keys = in_page(key_codes_, plan.key_codes.stride_b, page) + uint64_t{row} * kKeyRowBytes;
      const uint8_t* const values =
          in_page(value_codes_, plan.value_codes.stride_b, page) + uint64_t{row} * kValueRowBytes;
      if (first_ >= begin_ && first_ + kStepTokens <= whole_end_) {
        fill_dense<kKeyRowBytes, false>(to, key_place_, keys, end_);
        fill_dense<kValueRowBytes, false>(to + kValueAt, value_place_, values, end_);
        fill_scales<false>(to, scales);
        return;
      }
      fill_dense<kKeyRowBytes, true>(to, key_place_, keys, key_end_);
      fill_dense<kValueRowBytes, true>(to + kValueAt, value_place_, values, end_);
    } else {
      const auto rows = [&](const uint8_t* codes, const Side& side) {
        return codes + next_page_ * side.codes_stride_b + int64_t{row} * row_stride(side);
      };
      fill_rows(rows(key_codes_, params.key_side), plan.key_chunks, list, to, key_end_);
      fill_rows(rows(value_codes_, params.value_side), plan.value_chunks,
                list + plan.key_chunks.num_chunks * kChunkPlaceBytes, to + kValueAt, end_);
    }
    fill_scales<true>(to, scales);
  }

  // At the first step of a lap, moves pointers back by the rows of a lap. `fill` does not take this step as a whole
  // one, so whole steps, which are nearly all, need no check.
  __device__ __forceinline__ void start_lap(const DecodeParams& params, const Laps& laps) {
    lap_end_ = lap_end() + laps.num_rows;
    whole_end_ = min(key_end_, lap_end_);
    key_codes_ -= int64_t{laps.num_rows} * row_stride(params.key_side);
    value_codes_ -= int64_t{laps.num_rows} * row_stride(params.value_side);
    for_all<kScaleCopies>([&](int i) { scales_[i] -= laps.num_rows; });
  }

  // Derived from `whole_end_` where laps still matter: this saves a register in the loop, where few are left.
  __device__ __forceinline__ int lap_end() const {
    if constexpr (kIsBlocked) return lap_end_;
    return whole_end_ < end_ ? whole_end_ : INT32_MAX;
  }

  static __device__ __forceinline__ void write_plane(uint32_t to, half_bits bits, int lane) {
    const uint32_t pair = bits | static_cast<uint32_t>(bits) << 16;
    for (int byte = lane * 4; byte < kPlaneBytes; byte += kLanes * 4) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + byte), "r"(pair) : "memory");
    }
  }

  __device__ __forceinline__ int valid(int token, int end, int bytes) const {
    return token >= begin_ && token < end ? bytes : 0;
  }

  template <int kRowBytes>
  static __device__ __forceinline__ uint32_t place_of_chunk(int chunk) {
    const int token = chunk / (kRowBytes / 16);
    return RowLayout<kRowBytes>::offset(token / kHalves, token % kHalves, chunk % (kRowBytes / 16) * 16);
  }

  // Copies dense rows: a step is contiguous memory, and lanes copy neighbouring chunks.
  template <int kRowBytes, bool kIsEdge>
  __device__ __forceinline__ void fill_dense(uint32_t to, uint32_t lane_place, const uint8_t* from, int end) const {
    constexpr int kChunks = kRowBytes / 16;
    for_all<kStepTokens * kChunks / kLanes>([&](int i) {
      const int token = first_ + (i * kLanes + lane_) / kChunks;
      copy_async<16>(to + RowLayout<kRowBytes>::template copied_at<kHalves>(lane_place, i), from + i * kLanes * 16,
                     kIsEdge ? valid(token, end, 16) : 16);
    });
  }

  // Other rows: narrower than the kernel's, or with gaps between them. An entry of the list is a chunk's place in the
  // stage, with its token from bit 16 on, and its distance from the first chunk in memory. Computing these in every
  // step took as long as attention itself (H200, 2026-11).
  template <int kRowBytes>
  static __device__ __forceinline__ void list_chunks(const Side& side, const RowChunks& chunks, uint32_t list) {
    for (int chunk = threadIdx.x; chunk < chunks.num_chunks; chunk += blockDim.x) {
      const int token = chunks.per_row.quotient(chunk), byte = chunks.per_row.rest(chunk) * chunks.bytes;
      const uint32_t place = RowLayout<kRowBytes>::offset(token / kHalves, token % kHalves, byte) | token << 16;
      const uint32_t distance = token * static_cast<uint32_t>(side.codes_stride_t) + byte;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(list + chunk * kChunkPlaceBytes), "r"(place), "r"(distance)
                   : "memory");
    }
  }

  __device__ __forceinline__ void fill_rows(const uint8_t* rows, const RowChunks& chunks, uint32_t list, uint32_t to,
                                            int end) const {
    const auto entry = [list](int chunk, uint32_t& place, uint32_t& distance) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(place), "=r"(distance)
                   : "r"(list + chunk * kChunkPlaceBytes));
    };
    if (chunks.bytes == 16 && first_ >= begin_ && first_ + kStepTokens <= end) {
      constexpr int kAtOnce = 3;  // entries read before the first copy; with a head_dim of 96 these are all
#pragma unroll 1
      for (int first = lane_; first < chunks.num_chunks; first += kAtOnce * kLanes) {
        uint32_t place[kAtOnce], distance[kAtOnce];
        for_all<kAtOnce>([&](int i) { entry(min(first + i * kLanes, chunks.num_chunks - 1), place[i], distance[i]); });
        for_all<kAtOnce>([&](int i) {
          if (first + i * kLanes < chunks.num_chunks) copy_async<16>(to + (place[i] & 0xffff), rows + distance[i]);
        });
      }
      return;
    }
#pragma unroll 1
    for (int chunk = lane_; chunk < chunks.num_chunks; chunk += kLanes) {
      uint32_t place, distance;
      entry(chunk, place, distance);
      const uint32_t at = to + (place & 0xffff);
      const int num_valid = valid(first_ + static_cast<int>(place >> 16), end, chunks.bytes);
      if (chunks.bytes == 16) {
        copy_async<16>(at, rows + distance, num_valid);
      } else if (chunks.bytes == 8) {
        copy_async<8>(at, rows + distance, num_valid);
      } else {
        copy_async<4>(at, rows + distance, num_valid);
      }
    }
  }

  template <bool kIsEdge>
  __device__ __forceinline__ void fill_scales(uint32_t to, const half_bits* const (&scales)[kScaleCopies]) const {
    for_all<kScaleCopies>([&](int i) {
      const int chunk = i * kLanes + lane_, token = first_ + chunk % kScaleChunks * kChunkTokens;
      if (!has_scales_[i]) return;
      // Scales before `begin` may be read: they are always initialised, and those tokens are masked.
      copy_async<16>(to + kTokenScalesAt + chunk * 16, scales[i], kIsEdge ? min(max(2 * (end_ - token), 0), 16) : 16);
    });
  }

  // Copies the scales and zeros of the step's block, which is at `row`, with pages in the one that in_page calls `page`.
  // The unfinished block's scales and zeros are not read.
  __device__ __forceinline__ void fill_block(int head_dim, uint32_t page, uint32_t row, uint32_t to) const {
    if (first_ >= key_end_) return;
    const uint32_t block = row / kBlockSize;
    for_all<kBlockCopies>([&](int i) {
      const int chunk = i * kLanes + lane_;
      const bool has_chunk = chunk < kFirstPlane * kBlockChunks && chunk % kBlockChunks * 8 < head_dim;
      const uint4* from = blocks_[i] + block * block_strides_[i];
      if constexpr (kIsPaged) from = in_page(from, page_strides_[i], page);
      if (has_chunk) copy_async<16>(to + kScalesAt + chunk * 16, from);
    });
  }

  uint32_t memory_;
  int stride_, lane_;                 // stride in tokens
  uint32_t key_place_, value_place_;  // of the lane's first chunk, in a stage's codes
  bool is_dense_;
  int begin_ = 0, end_ = 0, key_end_ = 0;
  int lap_end_ = 0;    // of the lap that the pointers are in; see lap_end
  int whole_end_ = 0;  // of steps that are copied without checking their tokens
  int first_ = 0;      // token of the step
  const uint8_t *key_codes_ = nullptr,
                *value_codes_ = nullptr;   // its rows; where they are dense, the lane's first chunk
  const half_bits* scales_[kScaleCopies];  // the lane's chunks of it
  bool has_scales_[kScaleCopies];
  const uint4* blocks_[kBlockCopies > 0 ? kBlockCopies : 1];  // the lane's chunks of scales of the first block
  uint32_t block_strides_[kBlockCopies > 0 ? kBlockCopies : 1];
  uint32_t page_strides_[kIsPaged && kIsBlocked ? kBlockCopies : 1];  // of these, in multiples of 16 bytes
  // With pages: where scales of the next page are, in multiples of 16 bytes; the pages of 32 steps, and entries of the
  // page table for the next 32; how many steps were found, and where the next one is.
  uint32_t scale_strides_[kIsPaged ? kScaleCopies : 1];
  int sequence_ = 0, page_ = 0, entry_behind_ = 0;
  int num_found_ = 0, next_page_ = 0, next_row_ = 0;
};

}  // namespace hf_kvquant::cuda
