// The fused ops between the linear layers of a model: their arguments as plain structs, checked by args.h, and their
// CUDA kernels. reference.rms_norm, add_rms_norm, rotary and silu_mul define the results, including every rounding; on
// other devices PyTorch runs those functions. All tensors of a call share one dtype, except the mean. Also here: linear
// layers with tile-packed int4 weights, the prefetch of a linear layer's weights, and layers with states, whose tensors
// have dtypes of their own: one token (spec/state_steps.py) and many (spec/state_chunks.py).
#pragma once

#include "format.h"

namespace hf_kvquant {

constexpr int kFusedVector = 4;          // numbers that are loaded at a time
constexpr int kMinSummedChannels = 128;  // shorter rows need `mean`
constexpr int kMaxNormChannels = 16384;
constexpr int kMaxRotaryHeadDim = 1024;
constexpr int kPackedOutputs = 8, kPackedInputs = 128;  // packed weights: of a tile, and of a slice of one

struct RmsNormParams {
  const void* x;       // [num_rows, num_channels], rows contiguous
  int64_t row_stride;  // of x; other tensors are contiguous
  const void* other;   // like x, added to it first; nullptr: nothing
  const void* weight;  // [num_channels]
  const void* gate;    // like x, whose SiLU multiplies the result; nullptr: nothing
  const float* mean;   // [num_rows], of the squares; nullptr: the kernel computes it
  void* total;         // x + other; unused without `other`
  void* out;           // like x
  Dtype dtype;
  int64_t num_rows;
  int num_channels;  // a multiple of kFusedVector
  float eps;
  bool is_zero_centered;  // 1 + weight multiplies, and only the product is rounded
};

struct RotaryParams {
  int batch, num_q_heads, num_kv_heads, q_len, head_dim;
  int rotary_dim;            // the first channels of a head, which are turned; even. The others are copied.
  Dense query, key;          // [batch, heads, q_len, head_dim]
  Dense cos, sin;            // [batch, 1, q_len, rotary_dim]; stride 0 where sequences share them
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

constexpr int kMaxConvWidth = 8;       // inputs that a convolution of a state sees, the new one included
constexpr int kMaxDeltaKeyDim = 256;   // channels of a key in a recurrence

// Which slots of a state the sequences of a batch have, [batch] each; nullptr: sequence b has slot b.
struct StepSlots {
  const int64_t *read, *write;
  int64_t num_slots;  // of the state. Other numbers read zeros, and are not written.
};

// One token of a causal convolution along each channel. The newest inputs are the state, oldest first.
struct ConvStepParams {
  const void* x;  // [batch, channels, 1]
  Dtype dtype;    // of x and out
  int64_t stride_b, stride_c;
  void* state;  // [slots, channels, state_len], channels contiguous
  Dtype state_dtype;
  int64_t state_stride;  // from one slot to the next
  StepSlots slots;
  const void* weight;  // [channels, width], contiguous; width - 1 <= state_len
  const void* bias;    // [channels]; nullptr: none
  Dtype weight_dtype;  // in which the sum is rounded, and its SiLU
  void* out;           // [batch, channels, 1], contiguous
  int batch, channels, state_len, width;
  bool has_silu;
};

// One token of the gated delta rule, of one head:
//   S = exp(g) S,  S += k (beta (v - Sᵀk))ᵀ,  out = Sᵀq / √key_dim,
// where q and k have been divided by √(sum of squares + 1e-6) if `normalizes`. Query heads serve equally many heads.
struct DeltaStepParams {
  Dense query, key;  // [batch, 1, num_k_heads, key_dim]; stride_t unused, as in all of these
  Dense value;       // [batch, 1, num_heads, value_dim]
  Dense decay, beta;  // g and beta, [batch, 1, num_heads]; stride_h from one head to the next
  const void* state;  // [slots, num_heads, key_dim, value_dim] of float32 or float16, slots contiguous
  void* target;       // the new states; may be `state`. Float16 takes its largest number for larger ones
  Dtype state_dtype;  // of both
  int64_t state_stride, target_stride;  // from one slot to the next
  StepSlots slots;
  void* out;  // like value in shape and query in dtype, contiguous
  // Sequences of a row, of which those of one token are computed, [batch + 1]; nullptr: token b is that of sequence b.
  // Then `stride_b` goes from one token of the row to the next.
  const int64_t* begins;
  int64_t num_tokens;  // of the row
  int batch, num_k_heads, num_heads, key_dim, value_dim;
  bool normalizes;
};

constexpr int kGateInputs = 32;  // inputs of gates come in multiples of this

// The gates of the gated delta rule: decays g = -exp(A_log) softplus(x · decay_weight + dt_bias) and
// beta = beta_factor · sigmoid(x · beta_weight).
struct DeltaGatesParams {
  const void* x;  // [num_rows, num_inputs], rows contiguous and at multiples of 16 bytes
  int64_t row_stride;
  const void *decay_weight, *beta_weight;  // [num_heads, num_inputs], contiguous
  Dtype dtype;                             // of x, weights and beta: float16 or bfloat16
  const void *A_log, *dt_bias;             // [num_heads]
  Dtype A_log_dtype, dt_bias_dtype;
  float* g;    // [num_rows, num_heads], contiguous
  void* beta;  // likewise
  float beta_factor;
  int64_t num_rows;
  int num_inputs, num_heads;
};

constexpr int kMaxChunkKeyDim = 128;  // channels of a key where a recurrence has many tokens

// Sequences whose tokens lie in one row, one behind the other. Tokens of none, behind the last, give zeros.
struct Sequences {
  const int64_t* begins;  // [count + 1]: each one's first token, and where the last one ends
  StepSlots slots;        // given; a slot that is written is read by its own sequence alone
  int64_t num_tokens;     // of the row
  int count;
};

// A causal convolution along each channel, of many tokens.
struct ConvChunksParams {
  const void* x;  // [1, channels, tokens]
  Dtype dtype;    // of x and out
  int64_t stride_c, stride_t;
  Sequences sequences;
  void* state;  // as in ConvStepParams, and what follows
  Dtype state_dtype;
  int64_t state_stride;
  const void* weight;
  const void* bias;
  Dtype weight_dtype;
  void* out;  // [1, tokens, channels], contiguous
  int channels, state_len, width;
  bool has_silu;
};

// The gated delta rule of many tokens; see DeltaStepParams. All vectors are float16, or all are bfloat16.
struct DeltaChunksParams {
  Dense query, key;   // [1, tokens, num_k_heads, key_dim]; rows begin at multiples of 16 bytes
  Dense value;        // [1, tokens, num_heads, value_dim]; at multiples of 4 bytes, and value_dim is even
  Dense decay, beta;  // g and beta, [1, tokens, num_heads], of any dtype
  Sequences sequences;
  void* state;  // as in DeltaStepParams
  Dtype state_dtype;
  int64_t state_stride;
  void* out;  // like value in shape and query in dtype, contiguous
  int num_k_heads, num_heads, key_dim, value_dim;
  bool normalizes;
};

namespace cuda {

// `stream` is on the current device.
void rms_norm(const RmsNormParams& params, void* stream);
void rotary(const RotaryParams& params, void* stream);
void silu_mul(const SiluMulParams& params, void* stream);
void packed_linear(const PackedLinearParams& params, void* stream);
void conv_step(const ConvStepParams& params, void* stream);
void delta_step(const DeltaStepParams& params, void* stream);
void delta_gates(const DeltaGatesParams& params, void* stream);
void conv_chunks(const ConvChunksParams& params, void* stream);
void delta_chunks(const DeltaChunksParams& params, void* stream);
// Loads the first bytes of `memory` into the L2 cache. Writes nothing and does not wait.
void prefetch(const void* memory, int64_t num_bytes, void* stream);

}  // namespace cuda
}  // namespace hf_kvquant
