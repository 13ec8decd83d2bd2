#include "ops/cuda/row_args.h"
#include "ops/jitter/jitter.h"
#include "ops/jitter/jitter_kernels.h"

namespace tessera {
namespace {

void jitter(const Jitter& /*op*/, const Args<Jitter>& args) {
  const Tensor& x = args.in(Jitter::kX);
  cuda::launch_jitter({.dtype = x.dtype,
                       .rows = {.bound = x.shape[0]},
                       .width = x.shape[1],
                       .token_numbers = args.in(Jitter::kTokenNumbers).as<int64_t>(),
                       .noise = args.in(Jitter::kNoise).as<int32_t>(),
                       .x = x.data,
                       .y = args.out(Jitter::kY).data},
                      cuda::stream_of(args));
}

}  // namespace

void add_jitter_cuda(KernelTable& table) {
  add_kernel<Jitter>(table, jitter);
}

}  // namespace tessera
