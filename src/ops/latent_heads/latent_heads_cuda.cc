#include "ops/cuda/row_args.h"
#include "ops/latent_heads/latent_heads.h"
#include "ops/latent_heads/latent_heads_kernels.h"

namespace tessera {
namespace {

cuda::LatentHeadsSizes describe(const LatentHeadsSpec& spec, const KernelArgs& args) {
  const Tensor& first = args.in(0);
  return {.dtype = first.dtype,
          .rows = cuda::rows_of(args, 0, first.shape[1]),
          .num_heads = static_cast<int>(spec.num_heads),
          .nope = static_cast<int>(spec.nope_size),
          .rope = static_cast<int>(spec.rope_size),
          .value = static_cast<int>(spec.value_size)};
}

void latent_heads(const Operator& op, const KernelArgs& args) {
  cuda::launch_latent_heads(describe(static_cast<const LatentHeads&>(op).spec(), args),
                            {.kv = args.in(0).data,
                             .shared = args.in(1).data,
                             .keys = args.out(0).data,
                             .values = args.out(1).data},
                            cuda::stream_of(args));
}

void latent_heads_backward(const Operator& op, const KernelArgs& args) {
  cuda::launch_latent_heads_backward(
      describe(static_cast<const LatentHeadsBackward&>(op).spec(), args),
      {.keys = args.in(0).data,
       .values = args.in(1).data,
       .kv = args.out(0).data,
       .shared = args.out(1).data},
      cuda::stream_of(args));
}

}  // namespace

void add_latent_heads_cuda(KernelTable& table) {
  table["latent_heads"] = latent_heads;
  table["latent_heads_backward"] = latent_heads_backward;
}

}  // namespace tessera
