// The kernels for every processor: no intrinsics, four numbers at a time.
#define KVQ_ISA portable
#define KVQ_WIDTH 4
#include "instruction_set.h"
