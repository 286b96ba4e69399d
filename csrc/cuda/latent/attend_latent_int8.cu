// Kernels for int8 latents and rope parts.
#include "instantiate.cuh"

namespace hf_kvquant::cuda {

template LatentKernel latent_kernel_for<Storage::int8>(int, int);

}  // namespace hf_kvquant::cuda
