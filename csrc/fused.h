// The fused ops between the linear layers of a model: their arguments as plain structs, checked by args.h, and their
// CUDA kernels. reference.rms_norm, add_rms_norm, rotary and silu_mul define the results, including every rounding; on
// other devices PyTorch runs those functions. All tensors of a call share one dtype, except the mean. Also here: linear
// layers with tile-packed int4 weights, and the prefetch of a linear layer's weights.
#pragma once

#include "format.h"

namespace hf_kvquant {

constexpr int kFusedVector = 4;          // numbers that are loaded at a time
constexpr int kMinSummedChannels = 128;  // shorter rows need `mean`
constexpr int kMaxNormChannels = 16384;
constexpr int kMaxRotaryHeadDim = 1024;
constexpr int kPackedOutputs = 8, kPackedInputs = 128;  // packed weights: of a tile, and of a slice of one

struct RmsNormParams {
  const void* x;       // [num_rows, num_channels], contiguous
  const void* other;   // like x, added to it first; nullptr: nothing
  const void* weight;  // [num_channels]
  const float* mean;   // [num_rows], of the squares; nullptr: the kernel computes it
  void* total;         // x + other; unused without `other`
  void* out;           // like x
  Dtype dtype;
  int64_t num_rows;
  int num_channels;  // a multiple of kFusedVector
  float eps;
};

struct RotaryParams {
  int batch, num_q_heads, num_kv_heads, q_len, head_dim;  // head_dim is even
  Dense query, key;          // [batch, heads, q_len, head_dim]
  Dense cos, sin;            // [batch, 1, q_len, head_dim]; stride 0 where sequences share them
  Dense out_query, out_key;  // like query and key
};

struct SiluMulParams {
  const void *gate, *up;  // contiguous
  void* out;
  Dtype dtype;
  int64_t numel;  // a multiple of kFusedVector
};

// packed_linear.cu has the layout of the codes.
struct PackedLinearParams {
  const void* x;               // [num_rows, num_inputs] bf16, contiguous
  const void* codes;           // [num_outputs / 8, num_inputs / 128, 32, 4] int32
  const void* scale_and_zero;  // [num_inputs / group size, num_outputs, 2] bf16
  void* out;                   // [num_rows, num_outputs] bf16
  int64_t num_rows;
  int num_inputs, num_outputs;  // multiples of 128 and 16
  int group_log2;               // of inputs that share a scale and a zero: 5 to 8
};

namespace cuda {

// `stream` is on the current device.
void rms_norm(const RmsNormParams& params, void* stream);
void rotary(const RotaryParams& params, void* stream);
void silu_mul(const SiluMulParams& params, void* stream);
void packed_linear(const PackedLinearParams& params, void* stream);
// Loads the first bytes of `memory` into the L2 cache. Writes nothing and does not wait.
void prefetch(const void* memory, int64_t num_bytes, void* stream);

}  // namespace cuda
}  // namespace hf_kvquant
