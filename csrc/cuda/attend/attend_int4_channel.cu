// Attention kernels for int4 keys with one scale (and zero) per channel and block of tokens, and int4 values with one
// per token.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::int4, Storage::int4, true, true, Scales::blocks>(int, int, bool);

}  // namespace hf_kvquant::cuda
