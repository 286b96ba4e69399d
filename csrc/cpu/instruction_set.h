// Compiles the kernels for one instruction set, which the including kernels_*.cpp names (see simd.h), and puts them
// into its table.
#pragma once

#include "attend.h"
#include "quantize.h"

namespace hf_kvquant::cpu::KVQ_ISA {

const Kernels kKernels = {kMaxRows, attend_scratch, attend, finish, quantize_scratch, quantize, quantize_blocks,
                          is_finite};

}  // namespace hf_kvquant::cpu::KVQ_ISA
