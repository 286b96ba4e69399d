// Kernels for int4 latents and int8 rope parts.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template LatentKernel latent_kernel_for<Storage::int4>(int, int);

}  // namespace hf_kvquant::cuda
