#include "ops/permute/permute.h"

#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

void check_count(const Operator& op, std::span<const ValueType> inputs, size_t expected) {
  check_shape(op, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
}

void check_rows(const Operator& op, const ValueType& rows, std::string_view what) {
  const bool is_activation = is_storage(rows.dtype);
  check_shape(op, is_activation && rows.shape.rank() == 2,
              "{} must be f32 or bf16 with 2 dims, got {}", what, rows.to_string());
}

void check_probs(const Operator& op, const ValueType& probs, const Shape& shape) {
  check_shape(op, probs.dtype == DType::kF32 && probs.shape == shape,
              "probs must be f32 {}, got {}", shape.to_string(), probs.to_string());
}

Cost moved_bytes(std::span<const ValueType> inputs, std::span<const ValueType> outputs) {
  Cost cost;
  for (const ValueType& type : inputs) cost.bytes += static_cast<double>(type.num_bytes());
  for (const ValueType& type : outputs) cost.bytes += static_cast<double>(type.num_bytes());
  return cost;
}

double multiply_adds(const ValueType& rows) {
  return 2.0 * static_cast<double>(rows.shape.num_elements());
}

}  // namespace

std::vector<ValueType> Permute::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, 3);
  const ValueType& x = inputs[kX];
  if (x.scale.is_scaled() || x.dtype == DType::kF16) {
    check_shape(*this, x.shape.rank() == 2 && takes_scaled_rows({x.dtype, x.scale}),
                "x must have scales of its rows, got {}", x.to_string());
  } else {
    check_rows(*this, x, "x");
  }
  check_source(*this, inputs[kSource]);
  check_row_of(*this, inputs[kRowOf]);
  check_same_first_dim(*this, inputs[kX], inputs[kRowOf], "x and row_of_TK");
  ValueType rows = rows_like(inputs[kSource], x.dtype, x.shape[1]);
  rows.scale = x.scale;
  return {rows};
}

Cost Permute::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  return moved_bytes(inputs.first(2), outputs);  // row_of_TK serves the gradient alone
}

void Permute::differentiate(GradientBuilder& builder) const {
  builder.set_grad_input(
      kX, builder.emit(make_unpermute(), {*builder.grad_output(kRows), builder.input(kRowOf),
                                          builder.input(kSource)})[Unpermute::kY]);
}

std::vector<ValueType> Unpermute::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, addend_ ? 4 : 3);
  check_rows(*this, inputs[kRows], "y");
  check_row_of(*this, inputs[kRowOf]);
  check_source(*this, inputs[kSource]);
  check_same_first_dim(*this, inputs[kRows], inputs[kSource], "y and source_R");
  const ValueType tokens = rows_like(inputs[kRowOf], inputs[kRows].dtype, inputs[kRows].shape[1]);
  if (addend_) check_addend(*this, inputs[kAddend], tokens);
  return {tokens};
}

Cost Unpermute::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = moved_bytes(inputs.first(2), outputs);  // source_R serves the gradient alone
  if (addend_) cost += moved_bytes(inputs.subspan(3), {});
  return cost;
}

OperatorPtr Unpermute::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<Unpermute>(true);
}

void Unpermute::differentiate(GradientBuilder& builder) const {
  if (addend_ && builder.needs_grad(kAddend))
    builder.set_grad_input(kAddend, *builder.grad_output(kY));
  builder.set_grad_input(
      kRows, builder.emit(make_permute(), {*builder.grad_output(kY), builder.input(kSource),
                                           builder.input(kRowOf)})[Permute::kRows]);
}

std::vector<ValueType> PermuteProbs::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, 3);
  check_source(*this, inputs[kSource]);
  check_row_of(*this, inputs[kRowOf]);
  check_probs(*this, inputs[kProbs], inputs[kRowOf].shape);
  return {with_dtype(inputs[kSource], DType::kF32)};
}

void PermuteProbs::differentiate(GradientBuilder& builder) const {
  builder.set_grad_input(
      kProbs,
      builder.emit(make_unpermute_probs(), {*builder.grad_output(kRowProbs), builder.input(kRowOf),
                                            builder.input(kSource)})[UnpermuteProbs::kProbs]);
}

std::vector<ValueType> UnpermuteProbs::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, 3);
  check_row_of(*this, inputs[kRowOf]);
  check_source(*this, inputs[kSource]);
  check_probs(*this, inputs[kRowProbs], inputs[kSource].shape);
  return {with_dtype(inputs[kRowOf], DType::kF32)};
}

void UnpermuteProbs::differentiate(GradientBuilder& builder) const {
  builder.set_grad_input(
      kRowProbs,
      builder.emit(make_permute_probs(), {*builder.grad_output(kProbs), builder.input(kSource),
                                          builder.input(kRowOf)})[PermuteProbs::kRowProbs]);
}

std::vector<ValueType> UnpermuteWeighted::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, addend_ ? 5 : 4);
  check_rows(*this, inputs[kRows], "y");
  check_row_of(*this, inputs[kRowOf]);
  check_source(*this, inputs[kSource]);
  check_probs(*this, inputs[kProbs], inputs[kRowOf].shape);
  check_same_first_dim(*this, inputs[kRows], inputs[kSource], "y and source_R");
  const ValueType tokens = rows_like(inputs[kRowOf], inputs[kRows].dtype, inputs[kRows].shape[1]);
  if (addend_) check_addend(*this, inputs[kAddend], tokens);
  return {tokens};
}

Cost UnpermuteWeighted::cost(std::span<const ValueType> inputs,
                             std::span<const ValueType> outputs) const {
  Cost cost = moved_bytes(inputs.first(3), outputs);
  if (addend_) cost += moved_bytes(inputs.subspan(4), {});
  cost.flops = multiply_adds(inputs[kRows]);
  return cost;
}

OperatorPtr UnpermuteWeighted::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<UnpermuteWeighted>(true);
}

void UnpermuteWeighted::differentiate(GradientBuilder& builder) const {
  if (addend_ && builder.needs_grad(kAddend))
    builder.set_grad_input(kAddend, *builder.grad_output(kY));
  const auto grads = builder.emit(std::make_shared<UnpermuteWeightedBackward>(),
                                  {*builder.grad_output(kY), builder.input(kRows),
                                   builder.input(kProbs), builder.input(kSource)});
  if (builder.needs_grad(kRows))
    builder.set_grad_input(kRows, grads[UnpermuteWeightedBackward::kGradRows]);
  if (builder.needs_grad(kProbs))
    builder.set_grad_input(kProbs, grads[UnpermuteWeightedBackward::kGradProbs]);
}

std::vector<ValueType> UnpermuteWeightedBackward::infer(std::span<const ValueType> inputs) const {
  check_count(*this, inputs, 4);
  check_rows(*this, inputs[kGrad], "grad");
  check_rows(*this, inputs[kRows], "y");
  check_source(*this, inputs[kSource]);
  check_same_first_dim(*this, inputs[kRows], inputs[kSource], "y and source_R");
  check_same_first_dim(*this, inputs[kGrad], inputs[kProbs], "grad and probs");
  return {inputs[kRows], inputs[kProbs]};
}

Cost UnpermuteWeightedBackward::cost(std::span<const ValueType> inputs,
                                     std::span<const ValueType> outputs) const {
  Cost cost = moved_bytes(inputs, outputs);
  cost.flops = 2 * multiply_adds(inputs[kRows]);
  return cost;
}

OperatorPtr make_permute() {
  return std::make_shared<Permute>();
}
OperatorPtr make_unpermute() {
  return std::make_shared<Unpermute>();
}
OperatorPtr make_permute_probs() {
  return std::make_shared<PermuteProbs>();
}
OperatorPtr make_unpermute_probs() {
  return std::make_shared<UnpermuteProbs>();
}
OperatorPtr make_unpermute_weighted() {
  return std::make_shared<UnpermuteWeighted>();
}

}  // namespace tessera
