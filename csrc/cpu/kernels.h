// What cpu.cpp calls: a table of functions for each instruction set, and the tasks that they receive. The functions are
// in attend.h and quantize.h; each kernels_*.cpp compiles them and fills one table.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace hf_kvquant::cpu {

// Attention of some query rows of one kv head of one sequence to some of its tokens. A row is one query token of one
// head. Rows are numbered by position, then by head: row = position · num_q_per_kv + head. So a block of rows spans few
// positions and its causal bound is tight.
struct AttendTask {
  int b, kv_head;
  int first_row, num_rows;
  int begin, end;    // tokens; may be empty
  bool has_queries;  // scratch still holds these rows, prepared by the thread's last task, a split of the same block
};

// Unnormalised softmax over some of the tokens: out = sum of p · value, sum = sum of p, p = e^(logit − max).
struct Partial {
  float* out;  // [num_rows, value head_dim]
  float* max;  // [num_rows], -inf when nothing was visible
  float* sum;  // [num_rows]
};

// New tokens of one side.
struct QuantizeTask {
  const CacheParams* cache;
  const Dense* source;
  const Side* side;
  const KeyTransform* transform;  // nullptr: none
};

struct Kernels {
  // The most rows that share one dequantised tile.
  int max_rows;
  // Floats of scratch that attend needs for max_rows rows, whatever the length of the cache.
  int64_t (*attend_scratch)(const DecodeParams& params);
  void (*attend)(const DecodeParams& params, const AttendTask& task, float* scratch, const Partial& partial);
  // Combines the splits of a block of rows by their log-sum-exp, in order, adds the sink, and writes out and lse.
  void (*finish)(const DecodeParams& params, const AttendTask& task, const Partial* partials, int num_partials,
                 float* scratch);
  // Floats of scratch that the next two need.
  int64_t (*quantize_scratch)(const QuantizeTask& task);
  // Quantises tokens first ... last - 1 of `q_len` in one head, or in all heads where they share a scale.
  void (*quantize)(const QuantizeTask& task, int b, int head, int first, int last, float* scratch);
  // For granularity channel: quantises the blocks of one head that new tokens push out of the residual window. Reads
  // the tail and the new tokens.
  void (*quantize_blocks)(const QuantizeTask& task, int b, int head, float* scratch);
  // Whether tokens first ... last - 1 of a head are finite. A frozen scale needs this checked before codes are written.
  bool (*is_finite)(const QuantizeTask& task, int b, int head, int first, int last, float* scratch);
};

// Defined only for instruction sets that are compiled.
namespace portable { extern const Kernels kKernels; }
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }

}  // namespace hf_kvquant::cpu
