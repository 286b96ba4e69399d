// Attention kernels for int4 keys with one scale (and zero) per channel and block of tokens, and int4 values with one
// per token.
#include "attend_table.cuh"

namespace hf_kvquant::cuda {

AttendKernel attend_int4_channel(int head_dim, int num_rows) {
  return kernel_for<Storage::int4, Storage::int4, true, true, Scales::blocks>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
