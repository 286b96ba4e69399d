// The kernels for AVX-512 (F, BW, VL, DQ, VNNI) with FMA and F16C: Cascade Lake, Zen 4 and later.
#define KVQ_ISA avx512
#define KVQ_WIDTH 16

// GCC 12 reports the undefined operand of its own unmasked intrinsics as uninitialized.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "instruction_set.h"
