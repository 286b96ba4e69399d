// Attention kernels for keys and values without codes.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template AttendKernel kernel_for<Storage::none, Storage::none, false, false, Scales::rows>(int, int, bool);

}  // namespace hf_kvquant::cuda
