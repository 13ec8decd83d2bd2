#include <algorithm>

#include "ops/bf16_sum/bf16_sum.h"
#include "ops/bf16_sum/bf16_values.h"

namespace tessera {
namespace {

constexpr int64_t kAddedAlone = 16384;  ///< elements that one thread adds

const std::byte* bytes_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data);
}

void round(const RoundToBf16& /*op*/, const Args<RoundToBf16>& args) {
  using Op = RoundToBf16;
  round_to_bf16(bytes_of(args.in(Op::kX)), args.in(Op::kX).num_elements(),
                static_cast<std::byte*>(args.out(Op::kRounded).data));
}

template <typename T>
void sum_as(const SumBf16Parts& op, const Args<SumBf16Parts>& args) {
  using Op = SumBf16Parts;
  const std::span<T> out = args.out(Op::kSum).template span<T>();
  if (args.in(Op::kOwn).data != args.out(Op::kSum).data)
    std::ranges::copy(args.in(Op::kOwn).template span<T>(), out.begin());
  sum_bf16_parts(bytes_of(args.in(Op::kParts)), args.in(Op::kParts).shape[0] + 1, op.own(), out);
}

void sum(const SumBf16Parts& op, const Args<SumBf16Parts>& args) {
  args.in(SumBf16Parts::kOwn).dtype == DType::kBF16 ? sum_as<Bf16>(op, args)
                                                    : sum_as<float>(op, args);
}

void add_to(const AddToBf16& /*op*/, const Args<AddToBf16>& args) {
  using Op = AddToBf16;
  const float* __restrict const x = args.in(Op::kX).as<float>();
  Bf16* __restrict const sum = args.out(Op::kSum).as<Bf16>();
  const int64_t n = args.in(Op::kX).num_elements();
  const bool sets = args.set_accumulators;
#pragma omp parallel for schedule(static) if (n > kAddedAlone)
  for (int64_t i = 0; i < n; ++i) sum[i] = Bf16(sets ? x[i] : static_cast<float>(sum[i]) + x[i]);
}

}  // namespace

void add_bf16_sum_cpu(KernelTable& table) {
  add_kernel<RoundToBf16>(table, round);
  add_kernel<SumBf16Parts>(table, sum);
  add_kernel<AddToBf16>(table, add_to);
}

}  // namespace tessera
