#include "ops/cuda/row_args.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/layer_norm/layer_norm_kernels.h"

namespace tessera {
namespace {

void layer_norm(const LayerNorm& op, const Args<LayerNorm>& args) {
  const Tensor& x = args.in(LayerNorm::kX);
  cuda::launch_layer_norm({.dtype = x.dtype,
                           .rows = cuda::rows_of(args, LayerNorm::kX, x.shape[1]),
                           .size = x.shape[1],
                           .eps = op.eps(),
                           .x = x.data,
                           .weight = args.in(LayerNorm::kWeight).as<float>(),
                           .bias = args.in(LayerNorm::kBias).as<float>()},
                          args.out(LayerNorm::kY).data, cuda::stream_of(args));
}

}  // namespace

void add_layer_norm_cuda(KernelTable& table) {
  add_kernel<LayerNorm>(table, layer_norm);
}

}  // namespace tessera
