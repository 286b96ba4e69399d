// The kernels for AVX2 with FMA and F16C, compiled with -mavx2 -mfma -mf16c.
#define KVQ_ISA avx2
#define KVQ_WIDTH 8
#include "instruction_set.h"
