// Attention kernels for int4 keys and values with one scale (and zero) per 32 channels of a token.
#include "attend_table.cuh"

namespace hf_kvquant::cuda {

AttendKernel attend_int4_groups(int head_dim, int num_rows) {
  return kernel_for<Storage::int4, Storage::int4, true, true, Scales::groups>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
