// Attention kernels for int4 keys and int2 values with one scale (and zero) per token.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::int4, Storage::int2, true, true, Scales::rows>(int, int, bool);

}  // namespace hf_kvquant::cuda
