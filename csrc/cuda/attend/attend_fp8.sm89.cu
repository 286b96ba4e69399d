// Attention kernels for e4m3 keys and values.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::fp8, Storage::fp8, false, false, Scales::rows>(int, int, bool);

}  // namespace hf_kvquant::cuda
