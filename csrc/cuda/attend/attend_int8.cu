// Attention kernels for symmetric int8 keys and values.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::int8, Storage::int8, false, false, Scales::rows>(int, int, bool);

}  // namespace hf_kvquant::cuda
