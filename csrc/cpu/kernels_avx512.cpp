// AVX-512 (F, BW, VL, DQ, VNNI) with FMA and F16C. Only called when the processor has all of them: Cascade Lake, Zen 4
// and later.
// The kernels are those of attend.h and quantize.h; this file gives them their namespace and their table.
#define KVQ_ISA avx512
#define KVQ_USE_AVX2 0
#define KVQ_USE_AVX512 1

// GCC 12 reports the undefined operand of its own unmasked intrinsics as uninitialized.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "attend.h"
#include "quantize.h"

namespace hf_kvquant::cpu {

const Kernels kAvx512Kernels = {
    "avx512",       avx512::kMaxRows, avx512::Workspace::size,  avx512::attend,
    avx512::finish, avx512::quantize_scratch, avx512::quantize, avx512::quantize_blocks,
    avx512::is_finite};

}  // namespace hf_kvquant::cpu
