#include <algorithm>

#include "ops/bf16_sum/bf16_sum.h"
#include "ops/bf16_sum/bf16_values.h"

namespace tessera {
namespace {

const std::byte* bytes_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data);
}

void round(const Operator& /*op*/, const KernelArgs& args) {
  round_to_bf16(bytes_of(args.in(0)), args.in(0).num_elements(),
                static_cast<std::byte*>(args.out(0).data));
}

void sum(const Operator& op, const KernelArgs& args) {
  const int64_t own = static_cast<const SumBf16Parts&>(op).own();
  const std::span<float> out = args.out(0).span<float>();
  if (args.in(1).data != args.out(0).data) std::ranges::copy(args.in(1).span<float>(), out.begin());
  sum_bf16_parts(bytes_of(args.in(0)), args.in(0).shape[0] + 1, own, out);
}

}  // namespace

void add_bf16_sum_cpu(KernelTable& table) {
  table["round_to_bf16"] = round;
  table["sum_bf16_parts"] = sum;
}

}  // namespace tessera
