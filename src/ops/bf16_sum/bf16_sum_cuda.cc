#include "ops/bf16_sum/bf16_sum.h"
#include "ops/bf16_sum/bf16_sum_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

int64_t no_workspace(const Operator& /*op*/, std::span<const ValueType> /*inputs*/) {
  return 0;
}

void round_to_bf16(const Operator& /*op*/, const KernelArgs& args) {
  cuda::launch_round_to_bf16(args.in(0).as<float>(), args.in(0).num_elements(), args.out(0).data,
                             cuda::stream_of(args));
}

void sum_bf16_parts(const Operator& op, const KernelArgs& args) {
  cuda::launch_sum_bf16_parts({.others = args.in(0).data,
                               .own_part = args.in(1).as<float>(),
                               .sum = args.out(0).as<float>(),
                               .count = args.in(1).num_elements(),
                               .own = static_cast<int>(static_cast<const SumBf16Parts&>(op).own()),
                               .num_parts = static_cast<int>(args.in(0).shape[0] + 1)},
                              cuda::stream_of(args));
}

}  // namespace

void add_bf16_sum_cuda(KernelTable& table) {
  table["round_to_bf16"] = Kernel(round_to_bf16, no_workspace);
  table["sum_bf16_parts"] = Kernel(sum_bf16_parts, no_workspace);
}

}  // namespace tessera
