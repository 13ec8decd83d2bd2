#include "ops/gated_delta/gated_delta.h"

#include "ops/batch_rows.h"
#include "ops/storage.h"

namespace tessera {

GatedDeltaOperator::GatedDeltaOperator(const GatedDeltaSpec& spec) : spec_(spec) {
  require(spec.num_key_heads > 0 && spec.num_value_heads > 0 && spec.key_size > 0 &&
              spec.value_size > 0,
          "gated_delta: {} key heads of {} and {} value heads of {}; all must be above 0",
          spec.num_key_heads, spec.key_size, spec.num_value_heads, spec.value_size);
  require(spec.num_value_heads % spec.num_key_heads == 0,
          "gated_delta: {} value heads are no multiple of {} key heads", spec.num_value_heads,
          spec.num_key_heads);
}

std::string GatedDeltaOperator::attributes() const {
  return fmt::format("keys={}x{} values={}x{}", spec_.num_key_heads, spec_.key_size,
                     spec_.num_value_heads, spec_.value_size);
}

void GatedDeltaOperator::check_operands(std::span<const ValueType> inputs, size_t count) const {
  using Op = GatedDelta;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& q = inputs[Op::kQ];
  check_shape(*this, is_storage(q.dtype) && q.shape.rank() == 2 && q.ragged_dim < 0,
              "q is {}, expected f32 or bf16 [T, {}]", q.to_string(),
              spec_.num_key_heads * spec_.key_size);
  const int64_t tokens = q.shape[0];
  const auto check = [&](int idx, const char* name, DType dtype, int64_t width) {
    const ValueType expected{dtype, {tokens, width}};
    check_shape(*this, inputs[idx] == expected, "{} is {}, expected {}", name,
                inputs[idx].to_string(), expected.to_string());
  };
  check(Op::kQ, "q", q.dtype, spec_.num_key_heads * spec_.key_size);
  check(Op::kK, "k", q.dtype, spec_.num_key_heads * spec_.key_size);
  check(Op::kV, "v", q.dtype, spec_.num_value_heads * spec_.value_size);
  check(Op::kDecay, "g", DType::kF32, spec_.num_value_heads);
  check(Op::kBeta, "beta", DType::kF32, spec_.num_value_heads);
  const ValueType& bounds = inputs[Op::kCuSeqlens];
  check_shape(*this, bounds.dtype == DType::kI32 && bounds.shape.rank() == 1 && bounds.shape[0] > 0,
              "the bounds or the start are {}, expected i32 [1 or more]", bounds.to_string());
}

double GatedDeltaOperator::recurrence_flops(std::span<const ValueType> inputs) const {
  return 6.0 * static_cast<double>(inputs[GatedDelta::kV].shape.num_elements()) *
         static_cast<double>(spec_.key_size);
}

std::vector<ValueType> GatedDelta::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 6);
  return {inputs[kV]};
}

Cost GatedDelta::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

void GatedDelta::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kO);
  if (!grad) return;
  std::vector<ValueId> inputs;
  for (int idx = kQ; idx <= kCuSeqlens; ++idx) inputs.push_back(builder.input(idx));
  inputs.push_back(*grad);
  const auto grads = builder.emit(std::make_shared<GatedDeltaBackward>(spec()), inputs);
  for (int idx = kQ; idx <= kBeta; ++idx) {
    if (builder.needs_grad(idx)) builder.set_grad_input(idx, grads[idx]);
  }
}

std::vector<ValueType> GatedDeltaBackward::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 7);
  check_shape(*this, inputs[kGrad] == inputs[kV], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kV].to_string());
  return {inputs.begin(), inputs.begin() + kCuSeqlens};
}

Cost GatedDeltaBackward::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * recurrence_flops(inputs);
  return cost;
}

std::vector<ValueType> GatedDeltaCached::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 6);
  const Shape states = {spec().num_value_heads * spec().key_size, spec().value_size};
  return {inputs[kV], {DType::kF32, states}};
}

Cost GatedDeltaCached::cost(std::span<const ValueType> inputs,
                            std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

std::string GatedDeltaBatch::attributes() const {
  return fmt::format("{} slots={}", GatedDeltaOperator::attributes(), num_slots_);
}

std::vector<ValueType> GatedDeltaBatch::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 8);
  check_batch_rows(*this, inputs.subspan(kCuSeqlens, 3));
  const Shape states = {num_slots_ * spec().num_value_heads * spec().key_size, spec().value_size};
  return {inputs[kV], {DType::kF32, states}};
}

Cost GatedDeltaBatch::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

OperatorPtr make_gated_delta_batch(const GatedDeltaSpec& spec, int64_t num_slots) {
  return std::make_shared<GatedDeltaBatch>(spec, num_slots);
}

OperatorPtr make_gated_delta_cached(const GatedDeltaSpec& spec) {
  return std::make_shared<GatedDeltaCached>(spec);
}

OperatorPtr make_gated_delta(const GatedDeltaSpec& spec) {
  return std::make_shared<GatedDelta>(spec);
}

}  // namespace tessera
