// Attention kernels for symmetric int8 keys and values.
#include "attend_table.cuh"

namespace hf_kvquant::cuda {

AttendKernel attend_int8(int head_dim, int num_rows) {
  return kernel_for<Storage::int8, Storage::int8, false, false, Scales::rows>(head_dim, num_rows);
}

}  // namespace hf_kvquant::cuda
