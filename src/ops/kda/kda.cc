#include "ops/kda/kda.h"

#include "ops/batch_rows.h"
#include "ops/storage.h"

namespace tessera {

KdaOperator::KdaOperator(const KdaSpec& spec) : spec_(spec) {
  require(spec.num_heads > 0 && spec.key_size > 0 && spec.value_size > 0,
          "kda: {} heads with keys of {} and values of {}; all must be above 0", spec.num_heads,
          spec.key_size, spec.value_size);
}

std::string KdaOperator::attributes() const {
  return fmt::format("heads={} key_size={} value_size={}", spec_.num_heads, spec_.key_size,
                     spec_.value_size);
}

void KdaOperator::check_operands(std::span<const ValueType> inputs, size_t count) const {
  using Op = Kda;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& q = inputs[Op::kQ];
  const int64_t keys = spec_.num_heads * spec_.key_size;
  check_shape(*this, is_storage(q.dtype) && q.shape.rank() == 2 && q.ragged_dim < 0,
              "q is {}, expected f32 or bf16 [T, {}]", q.to_string(), keys);
  const int64_t tokens = q.shape[0];
  const auto check = [&](int idx, const char* name, DType dtype, int64_t width) {
    const ValueType expected{dtype, {tokens, width}};
    check_shape(*this, inputs[idx] == expected, "{} is {}, expected {}", name,
                inputs[idx].to_string(), expected.to_string());
  };
  check(Op::kQ, "q", q.dtype, keys);
  check(Op::kK, "k", q.dtype, keys);
  check(Op::kV, "v", q.dtype, spec_.num_heads * spec_.value_size);
  check(Op::kDecay, "g", DType::kF32, keys);
  check(Op::kBeta, "beta", DType::kF32, spec_.num_heads);
  const ValueType& bounds = inputs[Op::kCuSeqlens];
  check_shape(*this, bounds.dtype == DType::kI32 && bounds.shape.rank() == 1 && bounds.shape[0] > 0,
              "the bounds or the start are {}, expected i32 [1 or more]", bounds.to_string());
}

double KdaOperator::recurrence_flops(std::span<const ValueType> inputs) const {
  return 6.0 * static_cast<double>(inputs[Kda::kV].shape.num_elements()) *
         static_cast<double>(spec_.key_size);
}

std::vector<ValueType> Kda::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 6);
  return {inputs[kV]};
}

Cost Kda::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

void Kda::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kO);
  if (!grad) return;
  std::vector<ValueId> inputs;
  for (int idx = kQ; idx <= kCuSeqlens; ++idx) inputs.push_back(builder.input(idx));
  inputs.push_back(*grad);
  const auto grads = builder.emit(std::make_shared<KdaBackward>(spec()), inputs);
  for (int idx = kQ; idx <= kBeta; ++idx) {
    if (builder.needs_grad(idx)) builder.set_grad_input(idx, grads[idx]);
  }
}

std::vector<ValueType> KdaBackward::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 7);
  check_shape(*this, inputs[kGrad] == inputs[kV], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kV].to_string());
  return {inputs.begin(), inputs.begin() + kCuSeqlens};
}

Cost KdaBackward::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * recurrence_flops(inputs);
  return cost;
}

std::vector<ValueType> KdaCached::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 6);
  const Shape states = {spec().num_heads * spec().key_size, spec().value_size};
  return {inputs[kV], {DType::kF32, states}};
}

Cost KdaCached::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

std::string KdaBatch::attributes() const {
  return fmt::format("{} slots={}", KdaOperator::attributes(), num_slots_);
}

std::vector<ValueType> KdaBatch::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 8);
  check_batch_rows(*this, inputs.subspan(kCuSeqlens, 3));
  const Shape states = {num_slots_ * spec().num_heads * spec().key_size, spec().value_size};
  return {inputs[kV], {DType::kF32, states}};
}

Cost KdaBatch::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

OperatorPtr make_kda(const KdaSpec& spec) {
  return std::make_shared<Kda>(spec);
}

OperatorPtr make_kda_cached(const KdaSpec& spec) {
  return std::make_shared<KdaCached>(spec);
}

OperatorPtr make_kda_batch(const KdaSpec& spec, int64_t num_slots) {
  return std::make_shared<KdaBatch>(spec, num_slots);
}

}  // namespace tessera
