#include "ops/add_bias/add_bias.h"

#include "ops/column_sums_size.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void check_rows(const Operator& op, const ValueType& x) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "the rows must be f32 or bf16 [T, H], got {}", x.to_string());
}

ValueType column_type(const ValueType& x) {
  return {.dtype = DType::kF32, .shape = {x.shape[1]}};
}

}  // namespace

std::vector<ValueType> AddBias::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and bias, got {} inputs", inputs.size());
  check_rows(*this, inputs[0]);
  check_shape(*this, inputs[1] == column_type(inputs[0]), "the bias must be {}, got {}",
              column_type(inputs[0]).to_string(), inputs[1].to_string());
  return {inputs[0]};
}

Cost AddBias::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[0].shape.num_elements());
  return cost;
}

void AddBias::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  if (builder.needs_grad(0)) builder.set_grad_input(0, *grad);
  if (builder.needs_grad(1)) builder.emit(std::make_shared<AddBiasGrad>(), {*grad}, {1});
}

std::vector<ValueType> AddBiasGrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[0]);
  return {column_type(inputs[0])};
}

int64_t AddBiasGrad::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return column_sums_bytes(inputs[0].shape[1]);
}

OperatorPtr make_add_bias() {
  return std::make_shared<AddBias>();
}

}  // namespace tessera
