#include "optim/gradient_math.h"

#include <array>

#include "ops/add/add.h"

namespace tessera {

Tensor GradientMath::elements(std::byte* memory, DType dtype, IndexRange range) const {
  return {memory + range.begin * dtype_size(dtype),
          dtype,
          {range.count},
          is_host() ? nullptr : &device()};
}

void GradientMath::run(const Operator& op, std::span<const Tensor> inputs, const Tensor& output,
                       bool sets) const {
  if (output.num_elements() == 0) return;
  const std::array<const int64_t*, 4> no_extents = {};
  backend_.kernel(op)(op, {.inputs = inputs,
                           .outputs = std::span(&output, 1),
                           .workspace = {},
                           .extents = no_extents,
                           .context = backend_.context(),
                           .set_accumulators = sets});
}

void GradientMath::copy(const Tensor& from, const Tensor& to) const {
  if (from.data != to.data) device().copy(to.data, from.data, from.num_bytes());
}

void GradientMath::round(const Tensor& from, const Tensor& to) const {
  run(*make_round_to_bf16(), std::span(&from, 1), to);
}

void GradientMath::sum_parts(const Tensor& parts, int64_t num_parts, int64_t own,
                             const Tensor& sum) const {
  const std::array inputs = {
      Tensor{parts.data, parts.dtype, {num_parts - 1, sum.num_elements()}, parts.device}, sum};
  run(*make_sum_bf16_parts(own), inputs, sum);
}

void GradientMath::add_rounded(const Tensor& values, const Tensor& sum, bool sets) const {
  const Tensor flat = {values.data, values.dtype, {values.num_elements()}, values.device};
  run(*add_to_bf16_, std::span(&flat, 1), {sum.data, sum.dtype, {sum.num_elements()}, sum.device},
      sets);
}

void GradientMath::add(const Tensor& values, const Tensor& sum) const {
  const std::array inputs = {sum, values};
  run(*make_add(), inputs, sum);
}

}  // namespace tessera
