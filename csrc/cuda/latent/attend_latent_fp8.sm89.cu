// Kernels for fp8 latents and rope parts.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template LatentKernel latent_kernel_for<Storage::fp8>(int, int);

}  // namespace hf_kvquant::cuda
