#include <algorithm>

#include "ops/bf16_sum/bf16_sum.h"
#include "ops/bf16_sum/bf16_values.h"

namespace tessera {
namespace {

const std::byte* bytes_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data);
}

void round(const RoundToBf16& /*op*/, const Args<RoundToBf16>& args) {
  using Op = RoundToBf16;
  round_to_bf16(bytes_of(args.in(Op::kX)), args.in(Op::kX).num_elements(),
                static_cast<std::byte*>(args.out(Op::kRounded).data));
}

void sum(const SumBf16Parts& op, const Args<SumBf16Parts>& args) {
  using Op = SumBf16Parts;
  const int64_t own = op.own();
  const std::span<float> out = args.out(Op::kSum).span<float>();
  if (args.in(Op::kOwn).data != args.out(Op::kSum).data)
    std::ranges::copy(args.in(Op::kOwn).span<float>(), out.begin());
  sum_bf16_parts(bytes_of(args.in(Op::kParts)), args.in(Op::kParts).shape[0] + 1, own, out);
}

}  // namespace

void add_bf16_sum_cpu(KernelTable& table) {
  add_kernel<RoundToBf16>(table, round);
  add_kernel<SumBf16Parts>(table, sum);
}

}  // namespace tessera
