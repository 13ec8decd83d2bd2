#include "ops/norm_rope/norm_rope.h"

#include "ops/column_sums_size.h"

namespace tessera {

NormRope::NormRope(double eps, const RotarySpec& spec) : norm_(eps), rope_(spec, false) {
  require(spec.head_size <= kMaxHeadSize, "norm_rope: heads of {}, more than {}", spec.head_size,
          kMaxHeadSize);
}

std::string NormRope::attributes() const {
  return norm_.attributes() + " " + rope_.attributes();
}

std::vector<ValueType> NormRope::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes x, weight and positions, got {} inputs",
              inputs.size());
  const ValueType turned[] = {inputs[0], inputs[2]};
  rope_.infer(turned);
  check_shape(*this, inputs[1].shape == Shape{spec().head_size},
              "the weight must be f32 [{}], got {}", spec().head_size, inputs[1].to_string());
  return norm_.infer(inputs.first(2));
}

void NormRope::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(1), "norm_rope: rstd is a statistic and takes no gradient");
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<NormRopeBackward>(spec()),
      {builder.input(0), builder.input(1), builder.input(2), builder.output(1), *grad}, {1});
  if (builder.needs_grad(0)) builder.set_grad_input(0, grads[0]);
}

std::vector<ValueType> NormRopeBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 5,
              "takes x, weight, positions, rstd and gradient, got {} inputs", inputs.size());
  const ValueType turned[] = {inputs[4], inputs[2]};
  back_.infer(turned);
  const ValueType normed[] = {inputs[0], inputs[1], inputs[3], inputs[4]};
  return RmsNormBackward().infer(normed);
}

int64_t NormRopeBackward::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return column_sums_bytes(inputs[1].shape[0]);
}

OperatorPtr make_norm_rope(double eps, const RotarySpec& spec) {
  return std::make_shared<NormRope>(eps, spec);
}

}  // namespace tessera
