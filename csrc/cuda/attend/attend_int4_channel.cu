// Attention kernels for int4 keys with one scale (and zero) per channel and block of tokens, and int4 values with one
// per token.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::int4, Storage::int4, true, true, Scales::blocks>(int head_dim, int num_rows);

}  // namespace hf_kvquant::cuda
