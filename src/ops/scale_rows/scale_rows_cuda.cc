#include "ops/cuda/context.h"
#include "ops/scale_rows/scale_rows.h"
#include "ops/scale_rows/scale_rows_kernels.h"

namespace tessera {
namespace {

void scale_rows(const ScaleRows& op, const Args<ScaleRows>& args) {
  const Tensor& master = args.out(ScaleRows::kMaster);
  cuda::launch_scale_rows(
      {.factors = args.in(ScaleRows::kFactors).as<float>(),
       .master_type = master.dtype,
       .master = master.data,
       .weight = op.num_outputs() == 2 ? args.out(ScaleRows::kWeight).data : nullptr,
       .rows = master.shape[0],
       .columns = master.shape[1]},
      cuda::stream_of(args));
}

}  // namespace

void add_scale_rows_cuda(KernelTable& table) {
  add_kernel<ScaleRows>(table, scale_rows);
}

}  // namespace tessera
