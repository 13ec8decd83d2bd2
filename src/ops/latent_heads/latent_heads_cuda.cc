#include "ops/cuda/row_args.h"
#include "ops/latent_heads/latent_heads.h"
#include "ops/latent_heads/latent_heads_kernels.h"

namespace tessera {
namespace {

/// `input` has as many rows as all operands.
cuda::LatentHeadsSizes describe(const LatentHeadsSpec& spec, const KernelArgs& args, int input) {
  const Tensor& first = args.in(input);
  return {.dtype = first.dtype,
          .rows = cuda::rows_of(args, input, first.shape[1]),
          .num_heads = static_cast<int>(spec.num_heads),
          .nope = static_cast<int>(spec.nope_size),
          .rope = static_cast<int>(spec.rope_size),
          .value = static_cast<int>(spec.value_size)};
}

void latent_heads(const LatentHeads& op, const Args<LatentHeads>& args) {
  using Op = LatentHeads;
  cuda::launch_latent_heads(describe(op.spec(), args, Op::kKv),
                            {.kv = args.in(Op::kKv).data,
                             .shared = args.in(Op::kShared).data,
                             .keys = args.out(Op::kKeys).data,
                             .values = args.out(Op::kValues).data},
                            cuda::stream_of(args));
}

void latent_heads_backward(const LatentHeadsBackward& op, const Args<LatentHeadsBackward>& args) {
  using Op = LatentHeadsBackward;
  cuda::launch_latent_heads_backward(describe(op.spec(), args, Op::kGradKeys),
                                     {.keys = args.in(Op::kGradKeys).data,
                                      .values = args.in(Op::kGradValues).data,
                                      .kv = args.out(Op::kGradKv).data,
                                      .shared = args.out(Op::kGradShared).data},
                                     cuda::stream_of(args));
}

}  // namespace

void add_latent_heads_cuda(KernelTable& table) {
  add_kernel<LatentHeads>(table, latent_heads);
  add_kernel<LatentHeadsBackward>(table, latent_heads_backward);
}

}  // namespace tessera
