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
  check_rows(*this, inputs[kX]);
  check_shape(*this, inputs[kBias] == column_type(inputs[kX]), "the bias must be {}, got {}",
              column_type(inputs[kX]).to_string(), inputs[kBias].to_string());
  return {inputs[kX]};
}

Cost AddBias::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[kY].shape.num_elements());
  return cost;
}

void AddBias::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, *grad);
  if (builder.needs_grad(kBias)) builder.emit(std::make_shared<AddBiasGrad>(), {*grad}, {kBias});
}

std::vector<ValueType> AddBiasGrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[kGrad]);
  return {column_type(inputs[kGrad])};
}

OperatorPtr make_add_bias() {
  return std::make_shared<AddBias>();
}

}  // namespace tessera
