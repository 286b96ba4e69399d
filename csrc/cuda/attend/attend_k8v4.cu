// Attention kernels for symmetric int8 keys and int4 values.
#include "attend_table.cuh"

namespace hf_kvquant::cuda {

AttendKernel attend_k8v4(int head_dim, int num_rows) {
  return kernel_for<Storage::int8, Storage::int4, false, true, Scales::rows>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
