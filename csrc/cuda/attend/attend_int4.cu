// Attention kernels for int4 keys and values with one scale (and zero) per token.
#include "attend_table.cuh"

namespace hf_kvquant::cuda {

AttendKernel attend_int4(int head_dim, int num_rows) {
  return kernel_for<Storage::int4, Storage::int4, true, true, Scales::rows>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
