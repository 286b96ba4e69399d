// Attention kernels for e4m3 keys and values.
#include "attend_table.cuh"

namespace hf_kvquant::cuda {

AttendKernel attend_fp8(int head_dim, int num_rows) {
  return kernel_for<Storage::fp8, Storage::fp8, false, false, Scales::rows>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
