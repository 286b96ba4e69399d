// The plan that deals sequences of unequal lengths to thread blocks, in one launch. hf_kvquant/ops/planning.py defines
// it: with PyTorch's own kernels it takes thirty launches, 0.05 ms of a step (H200, 2026-11).
//
// One thread block does everything. Every sequence is compared with every other, which takes 3 us for 1,024 of them.
#include "../common/device.h"
#include "../cuda.h"

namespace hf_kvquant::cuda {
namespace {

constexpr int kPlanThreads = 1024;

// The sequences, and how many of their first tokens are padding; `starts` nullptr: none.
struct Sequences {
  const int32_t *lengths, *starts;
  int batch;

  __device__ int length(int b) const { return b < batch ? lengths[b] : 0; }

  // Tokens that are attended to.
  __device__ int tokens(int b) const {
    const int held = max(length(b), 0);
    return starts == nullptr || b >= batch ? held : max(held - max(starts[b], 0), 0);
  }
};

// How a sequence is cut: its tokens in a share, rounded up, and its shares.
struct Shares {
  int tokens, number;
};

__device__ Shares shares_of(int held, int64_t total, int num_slots, int min_tokens) {
  const auto wanted = static_cast<int>(int64_t{held} * num_slots / max(total, int64_t{1}));
  const int number = max(min(wanted, held / min_tokens), 1);
  return {(held + number - 1) / number, number};
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_splits(Sequences sequences, int num_slots, int min_tokens, int4* plan) {
  const int batch = sequences.batch;
  __shared__ unsigned long long total;
  __shared__ Shares others[kPlanThreads];
  __shared__ int num_used;
  if (threadIdx.x == 0) total = 0, num_used = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int b = threadIdx.x; b < batch; b += kPlanThreads) own += sequences.tokens(b);
  atomicAdd(&total, own);
  __syncthreads();
  const auto all = static_cast<int64_t>(total);
  for (int first = 0; first < batch; first += kPlanThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const Shares shares = shares_of(sequences.tokens(b), all, num_slots, min_tokens);
    int entry = 0, slot = 0;  // of the first share: entries and slots of the sequences that come before
    for (int from = 0; from < batch; from += kPlanThreads) {
      __syncthreads();
      others[threadIdx.x] =
          shares_of(sequences.tokens(from + static_cast<int>(threadIdx.x)), all, num_slots, min_tokens);
      __syncthreads();
      for (int i = 0; i < min(kPlanThreads, batch - from); ++i) {
        const Shares other = others[i];
        if (other.tokens < shares.tokens || (other.tokens == shares.tokens && from + i >= b)) continue;
        entry += other.number;
        slot += other.number > 1 ? other.number : 0;
      }
    }
    if (b >= batch) continue;
    atomicAdd(&num_used, shares.number);
    for (int share = 0; share < shares.number; ++share) {
      plan[entry + share] = {b, sequences.length(b), share | shares.number << 16, slot};
    }
  }
  __syncthreads();
  for (int entry = num_used + static_cast<int>(threadIdx.x); entry < batch + num_slots; entry += kPlanThreads) {
    plan[entry] = {-1, 0, 0, 0};
  }
}

}  // namespace

void split_plan(const int32_t* lengths, const int32_t* starts, int batch, int num_slots, int min_tokens, int32_t* plan,
                void* stream) {
  launch("split_plan", plan_splits, 1, kPlanThreads, 0, stream, Sequences{lengths, starts, batch}, num_slots,
         min_tokens, reinterpret_cast<int4*>(plan));
}

}  // namespace hf_kvquant::cuda
