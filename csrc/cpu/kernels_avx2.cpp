// AVX2 with FMA and F16C, compiled with -mavx2 -mfma -mf16c. Only called when the processor has all three.
// The kernels are those of attend.h and quantize.h; this file gives them their namespace and their table.
#define KVQ_ISA avx2
#define KVQ_USE_AVX2 1
#define KVQ_USE_AVX512 0

#include "attend.h"
#include "quantize.h"

namespace hf_kvquant::cpu {

const Kernels kAvx2Kernels = {
    "avx2",       avx2::kMaxRows, avx2::Workspace::size,  avx2::attend,
    avx2::finish, avx2::quantize_scratch, avx2::quantize, avx2::quantize_blocks,
    avx2::is_finite};

}  // namespace hf_kvquant::cpu
