// Attention kernels for int4 keys and values with one scale (and zero) per 32 channels of a token.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::int4, Storage::int4, true, true, Scales::groups>(int, int, bool);

}  // namespace hf_kvquant::cuda
