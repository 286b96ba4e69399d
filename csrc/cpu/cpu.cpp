// The CPU side of append and attention: chooses the instruction set, cuts the work into tasks and runs them on threads.
// Kernels are called through the tables of kernels.h. New tokens that stay dense are copied to their rows in the tail
// here (`keep_dense`). Threads are PyTorch's own, so torch.set_num_threads applies here too.
//
// A task of decode is one block of query rows of one kv head and one split of the visible tokens. Splits depend on
// lengths and num_splits only, never on threads, and are combined in order, so results do not change with the machine's
// load or number of cores.
#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "kernels.h"

namespace hf_kvquant::cpu {
namespace {

// --- instruction sets ------------------------------------------------------------------------------------------------

struct InstructionSet {
  const char* name;
  bool is_supported;  // by this processor
  const Kernels* kernels;
};

// Those that are compiled, the best first. setup.py defines a macro for each that it compiles besides the portable one.
const std::vector<InstructionSet>& instruction_sets() {
#define SUPPORTS __builtin_cpu_supports
  static const std::vector<InstructionSet> sets = {
#ifdef HF_KVQUANT_AVX512
      {"avx512",
       SUPPORTS("fma") && SUPPORTS("f16c") && SUPPORTS("avx512f") && SUPPORTS("avx512bw") && SUPPORTS("avx512vl") &&
           SUPPORTS("avx512dq") && SUPPORTS("avx512vnni"),
       &avx512::kKernels},
#endif
#ifdef HF_KVQUANT_AVX2
      {"avx2", SUPPORTS("avx2") && SUPPORTS("fma") && SUPPORTS("f16c"), &avx2::kKernels},
#endif
      {"portable", true, &portable::kKernels}};
#undef SUPPORTS
  return sets;
}

// The set of a name, or the best one for nullptr; nullptr if the name is unknown or this processor does not support it.
const InstructionSet* find_set(const char* name) {
  for (const InstructionSet& set : instruction_sets()) {
    if (set.is_supported && (name == nullptr || std::strcmp(name, set.name) == 0)) return &set;
  }
  return nullptr;
}

std::atomic<const InstructionSet*>& current_set() {
  static std::atomic<const InstructionSet*> current{find_set(nullptr)};
  return current;
}

// --- threads ---------------------------------------------------------------------------------------------------------

// Runs task(i) for i in 0 ... count - 1. A thread takes a run of consecutive tasks at a time, half of its share of
// those left: consecutive tasks read neighbouring memory, and codes prefetched into a core's L2 must be used by that
// core (taking single tasks in turn cost int8 at 16k tokens a third of its speed). Runs get shorter, so that a slow
// core does not hold up the others.
template <class Task>
void run_tasks(int64_t count, bool is_small, const Task& task) {
  const int64_t num_threads = is_small ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), count);
  if (num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next; begin < count;) {
      const int64_t end = begin + std::max<int64_t>(1, (count - begin) / (2 * num_threads));
      if (!next.compare_exchange_weak(begin, end)) continue;
      for (int64_t i = begin; i < end; ++i) task(i);
      begin = next;
    }
  });
}

// Memory that a thread keeps and that only grows: decode steps after the first allocate nothing.
class Scratch {
 public:
  float* reserve(int64_t count) {
    if (count > size_) {
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t size_ = 0;
};

// --- append ----------------------------------------------------------------------------------------------------------

constexpr int kTokensPerTask = 64;
// Below this many numbers, one thread finishes before a second one is awake (one token of 8 heads: 3 us).
constexpr int64_t kSmallAppend = 32768;

constexpr half_bits kHalfNan = 0x7E00;

float* append_scratch(int64_t count) {
  static thread_local Scratch scratch;
  return scratch.reserve(count);
}

// The first new token that gets codes. A ring would overwrite those before it, and two tokens must not race for a row.
int first_kept(const CacheParams& cache) { return cache.is_ring ? std::max(0, cache.q_len - cache.capacity) : 0; }

// All tokens of a sequence share a frozen scale, so one number that is not finite makes it NaN for all of them.
void check_frozen(const Kernels& kernels, const QuantizeTask& task, int batch, bool is_small) {
  const Side& side = *task.side;
  const int64_t scratch_size = kernels.quantize_scratch(task);
  std::vector<std::atomic<bool>> is_flawed(batch);
  run_tasks(static_cast<int64_t>(batch) * task.cache->num_kv_heads, is_small, [&](int64_t i) {
    const int b = static_cast<int>(i / task.cache->num_kv_heads), head = static_cast<int>(i % task.cache->num_kv_heads);
    if (!kernels.is_finite(task, b, head, first_kept(*task.cache), task.cache->q_len, append_scratch(scratch_size))) {
      is_flawed[b] = true;
    }
  });
  for (int b = 0; b < batch; ++b) {
    if (!is_flawed[b]) continue;
    side.scale[b * side.scale_stride_b] = kHalfNan;
    if (side.zero != nullptr) side.zero[b * side.zero_stride_b] = kHalfNan;
  }
}

// Copies to the tail those new tokens of one head that it keeps.
void keep_dense(const QuantizeTask& task, int b, int head) {
  const Side& side = *task.side;
  const CacheParams& cache = *task.cache;
  const Dense& source = *task.source;
  const int size = bytes_of(side.tail_dtype), length = cache.lengths[b], first_new = length - cache.q_len;
  const int start = cache.starts == nullptr ? 0 : cache.starts[b];
  const auto copy = [&](int token) {
    const int64_t from = b * source.stride_b + head * source.stride_h + (token - first_new) * source.stride_t;
    const int64_t to = tail_slot_of(cache, b) * side.tail_stride_b + head * side.tail_stride_h +
                       tail_row(side, token, start, cache.sink_length) * side.tail_stride_t;
    std::memcpy(static_cast<uint8_t*>(side.tail) + to * size, static_cast<const uint8_t*>(source.data) + from * size,
                static_cast<size_t>(side.head_dim) * size);
  };
  const int recent = std::max(tail_kept(side, length), first_new);
  for (int token = std::max(start, first_new); token < recent && is_sink(token, start, cache.sink_length); ++token) {
    copy(token);
  }
  for (int token = recent; token < length; ++token) copy(token);
}

// `transform` applies to keys; nullptr for values.
void append_side(const Kernels& kernels, const AppendParams& params, const Dense& source, const Side& side,
                 const KeyTransform* transform) {
  if (transform != nullptr && is_identity(*transform)) transform = nullptr;
  const QuantizeTask task = {&params, &source, &side, transform};
  const int64_t scratch_size = kernels.quantize_scratch(task);
  const int64_t numbers = static_cast<int64_t>(params.batch) * params.num_kv_heads * params.q_len * side.head_dim;
  const bool is_small = numbers <= kSmallAppend;
  if (side.tail != nullptr) {
    run_tasks(static_cast<int64_t>(params.batch) * params.num_kv_heads, is_small, [&](int64_t i) {
      const int head = static_cast<int>(i % params.num_kv_heads), b = static_cast<int>(i / params.num_kv_heads);
      // First the blocks: in the tail, a new token overwrites one that may leave the window in this very call.
      if (side.has_channel_scales) kernels.quantize_blocks(task, b, head, append_scratch(scratch_size));
      keep_dense(task, b, head);
    });
  }
  if (side.has_channel_scales) return;
  if (side.storage != Storage::none && side.is_frozen) check_frozen(kernels, task, params.batch, is_small);
  const int heads = side.storage != Storage::none && side.is_shared_by_heads ? 1 : params.num_kv_heads;
  const int kept = first_kept(params), chunks = (params.q_len - kept + kTokensPerTask - 1) / kTokensPerTask;
  run_tasks(static_cast<int64_t>(params.batch) * heads * chunks, is_small, [&](int64_t i) {
    const int first = kept + static_cast<int>(i % chunks) * kTokensPerTask;
    const int head = static_cast<int>(i / chunks % heads), b = static_cast<int>(i / chunks / heads);
    kernels.quantize(task, b, head, first, std::min(first + kTokensPerTask, params.q_len),
                     append_scratch(scratch_size));
  });
}

// --- decode ----------------------------------------------------------------------------------------------------------

constexpr int kTokensPerSplit = 512;
constexpr int kEnoughTasks = 256;

struct Plan {
  int num_rows, num_row_blocks, rows_per_block;
  int num_splits;
};

struct Span {
  int begin, end;
};

// The tokens visible to any of the query tokens `first` ... `last` of a sequence.
Span visible_span(const DecodeParams& params, int b, int first, int last) {
  const int length = params.lengths[b];
  int begin = params.starts == nullptr ? 0 : std::max(params.starts[b], 0);
  if (params.sliding_window > 0) begin = std::max(begin, length - params.q_len + first - params.sliding_window + 1);
  return {begin, std::max(begin, length - params.q_len + last + 1)};
}

// Splits have 512 tokens, or more where that would make more than 256 tasks. 256 tasks are enough for many cores and to
// balance unequal ones, while partial results stay below 2 % of the codes read.
Plan make_plan(const DecodeParams& params, int max_rows) {
  Plan plan;
  plan.num_rows = params.num_q_heads / params.num_kv_heads * params.q_len;
  plan.rows_per_block = std::min(plan.num_rows, max_rows);
  plan.num_row_blocks = (plan.num_rows + plan.rows_per_block - 1) / plan.rows_per_block;
  // More splits than tiles would only add empty splits.
  plan.num_splits = std::min(params.num_splits, std::max(1, params.capacity / kTokenAlignment));
  if (plan.num_splits <= 0) {
    int longest = 0;
    for (int b = 0; b < params.batch; ++b) {
      const Span span = visible_span(params, b, 0, params.q_len - 1);
      longest = std::max(longest, span.end - span.begin);
    }
    const int64_t blocks = static_cast<int64_t>(params.batch) * params.num_kv_heads * plan.num_row_blocks;
    const int64_t wanted = (longest + kTokensPerSplit - 1) / kTokensPerSplit;
    plan.num_splits = static_cast<int>(std::max<int64_t>(1, std::min(wanted, kEnoughTasks / blocks)));
  }
  return plan;
}

// Split `split` of a span, in whole tiles of 64 tokens counted from the start of the span.
Span split_span(const Span& span, int split, int num_splits) {
  const int64_t tiles = (static_cast<int64_t>(span.end - span.begin) + kTokenAlignment - 1) / kTokenAlignment;
  const auto border = [&](int64_t s) {
    return static_cast<int>(std::min<int64_t>(span.begin + tiles * s / num_splits * kTokenAlignment, span.end));
  };
  return {border(split), border(split + 1)};
}

Partial partial_at(float* memory, int num_rows, int value_dim) {
  float* max = memory + static_cast<int64_t>(num_rows) * value_dim;
  return {memory, max, max + num_rows};
}

}  // namespace

void append(const AppendParams& params) {
  if (params.batch == 0 || params.q_len == 0) return;
  const Kernels& kernels = *current_set().load()->kernels;
  append_side(kernels, params, params.key, params.key_side, &params.key_transform);
  append_side(kernels, params, params.value, params.value_side, nullptr);
}

void decode(const DecodeParams& params) {
  if (params.batch == 0 || params.q_len == 0) return;
  const Kernels& kernels = *current_set().load()->kernels;
  const Plan plan = make_plan(params, kernels.max_rows);
  const int value_dim = values_of(params).head_dim;
  const int num_q_per_kv = params.num_q_heads / params.num_kv_heads;
  const int64_t partial_size = static_cast<int64_t>(plan.rows_per_block) * (value_dim + 2);
  const int64_t num_blocks = static_cast<int64_t>(params.batch) * params.num_kv_heads * plan.num_row_blocks;
  const int64_t attend_size = (kernels.attend_scratch(params) + 15) / 16 * 16;

  // The last task of a block to finish combines its splits, so no second round of threads is needed. Without splits, a
  // partial result never leaves its thread.
  static thread_local Scratch partial_scratch;
  float* partials =
      plan.num_splits == 1 ? nullptr : partial_scratch.reserve(num_blocks * plan.num_splits * partial_size);
  std::vector<std::atomic<int>> num_done(plan.num_splits == 1 ? 0 : num_blocks);

  static std::atomic<uint64_t> num_calls{0};
  const uint64_t call = ++num_calls;

  run_tasks(num_blocks * plan.num_splits, false, [&](int64_t i) {
    static thread_local Scratch scratch;
    static thread_local uint64_t last_call = 0;  // with last_block: the call and block whose queries scratch holds
    static thread_local int64_t last_block = 0;
    float* memory = scratch.reserve(attend_size + partial_size);
    const int split = static_cast<int>(i % plan.num_splits);
    const int64_t block = i / plan.num_splits;
    AttendTask task;
    task.kv_head = static_cast<int>(block / plan.num_row_blocks % params.num_kv_heads);
    task.b = static_cast<int>(block / plan.num_row_blocks / params.num_kv_heads);
    task.first_row = static_cast<int>(block % plan.num_row_blocks) * plan.rows_per_block;
    task.num_rows = std::min(plan.rows_per_block, plan.num_rows - task.first_row);
    const Span span = visible_span(params, task.b, task.first_row / num_q_per_kv,
                                   (task.first_row + task.num_rows - 1) / num_q_per_kv);
    const Span part = split_span(span, split, plan.num_splits);
    task.begin = part.begin;
    task.end = part.end;
    task.has_queries = last_call == call && last_block == block;
    last_call = call;
    last_block = block;

    if (plan.num_splits == 1) {
      const Partial partial = partial_at(memory + attend_size, task.num_rows, value_dim);
      kernels.attend(params, task, memory, partial);
      kernels.finish(params, task, &partial, 1, memory);  // may overwrite the queries: there is no other split
      return;
    }
    float* block_memory = partials + block * plan.num_splits * partial_size;
    kernels.attend(params, task, memory, partial_at(block_memory + split * partial_size, task.num_rows, value_dim));
    if (++num_done[block] < plan.num_splits) return;
    static thread_local std::vector<Partial> all;
    all.resize(plan.num_splits);
    for (int s = 0; s < plan.num_splits; ++s) {
      all[s] = partial_at(block_memory + s * partial_size, task.num_rows, value_dim);
    }
    kernels.finish(params, task, all.data(), plan.num_splits, memory + attend_size);
  });
}

const char* capability() { return current_set().load()->name; }

bool set_capability(const char* name) {
  const InstructionSet* set = find_set(name);
  if (set == nullptr) return false;
  current_set() = set;
  return true;
}

}  // namespace hf_kvquant::cpu
