#include "ops/bf16_sum/bf16_sum.h"
#include "ops/bf16_sum/bf16_sum_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

void round_to_bf16(const RoundToBf16& /*op*/, const Args<RoundToBf16>& args) {
  using Op = RoundToBf16;
  cuda::launch_round_to_bf16(args.in(Op::kX).as<float>(), args.in(Op::kX).num_elements(),
                             args.out(Op::kRounded).data, cuda::stream_of(args));
}

void sum_bf16_parts(const SumBf16Parts& op, const Args<SumBf16Parts>& args) {
  using Op = SumBf16Parts;
  cuda::launch_sum_bf16_parts({.others = args.in(Op::kParts).data,
                               .dtype = args.in(Op::kOwn).dtype,
                               .own_part = args.in(Op::kOwn).data,
                               .sum = args.out(Op::kSum).data,
                               .count = args.in(Op::kOwn).num_elements(),
                               .own = static_cast<int>(op.own()),
                               .num_parts = static_cast<int>(args.in(Op::kParts).shape[0] + 1)},
                              cuda::stream_of(args));
}

void add_to_bf16(const AddToBf16& /*op*/, const Args<AddToBf16>& args) {
  using Op = AddToBf16;
  cuda::launch_add_to_bf16({.x = args.in(Op::kX).as<float>(),
                            .sum = args.out(Op::kSum).data,
                            .count = args.in(Op::kX).num_elements(),
                            .sets = args.set_accumulators},
                           cuda::stream_of(args));
}

}  // namespace

void add_bf16_sum_cuda(KernelTable& table) {
  add_kernel<RoundToBf16>(table, round_to_bf16);
  add_kernel<SumBf16Parts>(table, sum_bf16_parts);
  add_kernel<AddToBf16>(table, add_to_bf16);
}

}  // namespace tessera
