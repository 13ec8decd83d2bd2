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
  const ValueType turned[] = {inputs[kX], inputs[kPositions]};
  rope_.infer(turned);
  check_shape(*this, inputs[kWeight].shape == Shape{spec().head_size},
              "the weight must be f32 [{}], got {}", spec().head_size, inputs[kWeight].to_string());
  return norm_.infer(inputs.first(2));
}

void NormRope::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(kRstd), "norm_rope: rstd is a statistic and takes no gradient");
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(std::make_shared<NormRopeBackward>(spec()),
                                  {builder.input(kX), builder.input(kWeight),
                                   builder.input(kPositions), builder.output(kRstd), *grad},
                                  {kWeight});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[NormRopeBackward::kGradX]);
}

std::vector<ValueType> NormRopeBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 5,
              "takes x, weight, positions, rstd and gradient, got {} inputs", inputs.size());
  const ValueType turned[] = {inputs[kGrad], inputs[kPositions]};
  back_.infer(turned);
  const ValueType normed[] = {inputs[kX], inputs[kWeight], inputs[kRstd], inputs[kGrad]};
  return RmsNormBackward().infer(normed);
}

OperatorPtr make_norm_rope(double eps, const RotarySpec& spec) {
  return std::make_shared<NormRope>(eps, spec);
}

}  // namespace tessera
