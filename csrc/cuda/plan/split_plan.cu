// The plan that deals sequences of unequal lengths to thread blocks, in one launch. hf_kvquant/ops/planning.py defines
// it: with PyTorch's own kernels it takes thirty launches, 0.05 ms of a step (H200, 2026-11).
//
// One thread block does everything. Every sequence is compared with every other, which takes 3 us for 1,024 of them.
// A plan with a choice takes twice as long: 21 us instead of 10 for 60 of them (H200, 2026-12).
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

// Calls `use(b, shares, entry, slot)` for each sequence: how it is cut, and the first of its entries and of its slots.
// All threads must call this.
template <class Use>
__device__ void place(const Sequences& sequences, int64_t total, int num_slots, int min_tokens, Use use) {
  __shared__ Shares others[kPlanThreads];
  const int batch = sequences.batch;
  for (int first = 0; first < batch; first += kPlanThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const Shares shares = shares_of(sequences.tokens(b), total, num_slots, min_tokens);
    int entry = 0, slot = 0;  // of the sequences that come before
    for (int from = 0; from < batch; from += kPlanThreads) {
      __syncthreads();
      others[threadIdx.x] =
          shares_of(sequences.tokens(from + static_cast<int>(threadIdx.x)), total, num_slots, min_tokens);
      __syncthreads();
      for (int i = 0; i < min(kPlanThreads, batch - from); ++i) {
        const Shares other = others[i];
        if (other.tokens < shares.tokens || (other.tokens == shares.tokens && from + i >= b)) continue;
        entry += other.number;
        slot += other.number > 1 ? other.number : 0;
      }
    }
    if (b < batch) use(b, shares, entry, slot);
  }
}

// When the last share ends, in tokens of one thread block: see _estimated_end in planning.py.
__device__ unsigned long long estimated_end(const Sequences& sequences, int64_t total, int num_slots, int num_shares,
                                            int min_tokens, int tokens_between) {
  __shared__ int tokens[2 * kMaxChosenSlots];
  __shared__ unsigned long long end;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * num_slots; i += kPlanThreads) tokens[i] = 0;
  if (threadIdx.x == 0) end = total / num_slots;
  __syncthreads();
  place(sequences, total, num_shares, min_tokens, [&](int, const Shares& shares, int entry, int) {
    for (int i = entry; i < min(entry + shares.number, 2 * num_slots); ++i) tokens[i] = shares.tokens;
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_slots; i += kPlanThreads) {
    const int second = tokens[num_slots + i];
    const int64_t both = int64_t{tokens[num_slots - 1 - i]} + (second > 0 ? int64_t{second} + tokens_between : 0);
    atomicMax(&end, static_cast<unsigned long long>(both));
  }
  __syncthreads();
  return end;
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_splits(Sequences sequences, int num_slots, int most_slots, int min_tokens, int tokens_between, int4* plan) {
  const int batch = sequences.batch;
  __shared__ unsigned long long total;
  __shared__ int num_used;
  if (threadIdx.x == 0) total = 0, num_used = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int b = threadIdx.x; b < batch; b += kPlanThreads) own += sequences.tokens(b);
  atomicAdd(&total, own);
  __syncthreads();
  const auto all = static_cast<int64_t>(total);
  int chosen = num_slots;
  if (most_slots > num_slots) {
    const auto end = [&](int num_shares) {
      return estimated_end(sequences, all, num_slots, num_shares, min_tokens, tokens_between);
    };
    const unsigned long long few = end(num_slots), many = end(most_slots);
    if (many + tokens_between < few) chosen = most_slots;
  }
  place(sequences, all, chosen, min_tokens, [&](int b, const Shares& shares, int entry, int slot) {
    atomicAdd(&num_used, shares.number);
    for (int share = 0; share < shares.number; ++share) {
      plan[entry + share] = {b, sequences.length(b), share | shares.number << 16, slot};
    }
  });
  __syncthreads();
  for (int entry = num_used + static_cast<int>(threadIdx.x); entry < batch + most_slots; entry += kPlanThreads) {
    plan[entry] = {-1, 0, 0, 0};
  }
}

}  // namespace

void split_plan(const int32_t* lengths, const int32_t* starts, int batch, int num_slots, int most_slots, int min_tokens,
                int tokens_between, int32_t* plan, void* stream) {
  launch("split_plan", plan_splits, 1, kPlanThreads, 0, stream, Sequences{lengths, starts, batch}, num_slots,
         most_slots, min_tokens, tokens_between, reinterpret_cast<int4*>(plan));
}

}  // namespace hf_kvquant::cuda
