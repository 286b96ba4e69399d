// Attention kernels for symmetric int8 keys and int4 values.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::int8, Storage::int4, false, true, Scales::rows>(int, int, bool);

}  // namespace hf_kvquant::cuda
