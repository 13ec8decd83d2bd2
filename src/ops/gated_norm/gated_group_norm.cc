#include "ops/gated_norm/gated_group_norm.h"

#include "ops/storage.h"

namespace tessera {
namespace {

std::string group_attributes(const GroupNormSpec& spec) {
  return fmt::format("groups={} eps={}", spec.num_groups, spec.eps);
}

void check_groups(const Operator& op, const GroupNormSpec& spec, std::span<const ValueType> inputs,
                  size_t count) {
  using Op = GatedGroupNorm;
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[Op::kX];
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim < 0,
              "x is {}, expected f32 or bf16 [T,C]", x.to_string());
  check_shape(op, x.shape[1] > 0 && x.shape[1] % spec.num_groups == 0,
              "x is {}, whose elements {} groups do not divide", x.to_string(), spec.num_groups);
  check_shape(op, inputs[Op::kZ] == x, "z is {}, expected {}", inputs[Op::kZ].to_string(),
              x.to_string());
  const ValueType weight{DType::kF32, {x.shape[1]}};
  check_shape(op, inputs[Op::kWeight] == weight, "the weight is {}, expected {}",
              inputs[Op::kWeight].to_string(), weight.to_string());
}

}  // namespace

GatedGroupNorm::GatedGroupNorm(const GroupNormSpec& spec) : spec_(spec) {
  require(spec.num_groups > 0 && spec.eps >= 0,
          "gated_group_norm: {} groups and an eps of {}; expected 1 or more, and at least 0",
          spec.num_groups, spec.eps);
}

std::string GatedGroupNorm::attributes() const {
  return group_attributes(spec_);
}

std::vector<ValueType> GatedGroupNorm::infer(std::span<const ValueType> inputs) const {
  check_groups(*this, spec_, inputs, 3);
  return {inputs[kX]};
}

void GatedGroupNorm::differentiate(GradientBuilder& builder) const {
  using Backward = GatedGroupNormBackward;
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<Backward>(spec_),
      {builder.input(kX), builder.input(kZ), builder.input(kWeight), *grad}, {kWeight});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[Backward::kGradX]);
  if (builder.needs_grad(kZ)) builder.set_grad_input(kZ, grads[Backward::kGradZ]);
}

std::string GatedGroupNormBackward::attributes() const {
  return group_attributes(spec_);
}

std::vector<ValueType> GatedGroupNormBackward::infer(std::span<const ValueType> inputs) const {
  check_groups(*this, spec_, inputs, 4);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kX].to_string());
  return {inputs[kX], inputs[kZ], inputs[kWeight]};
}

OperatorPtr make_gated_group_norm(const GroupNormSpec& spec) {
  return std::make_shared<GatedGroupNorm>(spec);
}

}  // namespace tessera
