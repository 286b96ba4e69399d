// Runs on every processor: no intrinsics, four numbers at a time.
// The kernels are those of attend.h and quantize.h; this file gives them their namespace and their table.
#define KVQ_ISA portable
#define KVQ_USE_AVX2 0
#define KVQ_USE_AVX512 0

#include "attend.h"
#include "quantize.h"

namespace hf_kvquant::cpu {

const Kernels kPortableKernels = {
    "portable",       portable::kMaxRows, portable::Workspace::size,  portable::attend,
    portable::finish, portable::quantize_scratch, portable::quantize, portable::quantize_blocks,
    portable::is_finite};

}  // namespace hf_kvquant::cpu
