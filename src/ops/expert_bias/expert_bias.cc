#include "ops/expert_bias/expert_bias.h"

#include <memory>

namespace tessera {

ExpertBias::ExpertBias(const ExpertBiasSpec& spec)
    : sizes_(spec.sizes, "expert_bias"),
      first_column_(spec.first_column),
      apply_prob_(spec.apply_prob),
      block_size_(spec.block_size) {
  require(
      first_column_ >= 0 && block_size_ >= 0 && (first_column_ == 0 || block_size_ == 0),
      "expert_bias: from column {} on in blocks of {}; neither may be negative, and sparse rows "
      "have their biases from the first column on",
      first_column_, block_size_);
}

std::string ExpertBias::attributes() const {
  std::string text = fmt::format("experts={}", sizes_.to_string());
  if (first_column_ > 0) text += fmt::format(" from={}", first_column_);
  if (is_sparse()) text += fmt::format(" block={}", block_size_);
  return text + (apply_prob_ ? " apply_prob" : "");
}

std::vector<ValueType> ExpertBias::infer(std::span<const ValueType> inputs) const {
  const OperandSet<Input> operands = input_set();
  check_shape(*this, std::ssize(inputs) == operands.size(), "takes {} inputs, got {}",
              operands.size(), inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& bias = inputs[kBias];
  const ValueType& offsets = inputs[operands.position(kOffsets)];
  const bool fits =
      is_sparse() ? x.shape.rank() == 3 && x.shape[1] == block_size_ && x.shape[2] == block_size_
                  : x.shape.rank() == 2 && x.shape[1] - first_column_ >= sizes_.largest();
  check_shape(*this, is_storage(x.dtype) && fits,
              "x must be f32 or bf16 rows for biases of {}, got {}", sizes_.to_string(),
              x.to_string());
  check_shape(*this, bias == bias_type(), "the biases must be {}, got {}", bias_type().to_string(),
              bias.to_string());
  check_shape(*this,
              offsets.dtype == DType::kI64 && offsets.shape == Shape{sizes_.num_experts() + 1},
              "offsets must be i64 [{}], got {}", sizes_.num_experts() + 1, offsets.to_string());
  if (apply_prob_) {
    const ValueType& probs_R = inputs[operands.position(kProbs)];
    check_shape(*this,
                probs_R.dtype == DType::kF32 && probs_R.shape.rank() == 1 &&
                    (is_sparse() || probs_R.shape[0] == x.shape[0]),
                "probs_R must be f32 [R], got {}", probs_R.to_string());
  }
  if (is_sparse()) {
    const ValueType& rows = inputs[operands.position(kRowOffsets)];
    check_shape(*this, rows.dtype == DType::kI32 && rows.shape.rank() == 1 && rows.shape[0] >= 1,
                "row_offsets must be i32 [R / {} + 1], got {}", block_size_, rows.to_string());
  }
  return {x};
}

void ExpertBias::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const OperandSet<Input> operands = input_set();
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, *grad);
  std::vector<ValueId> inputs = {*grad};
  for (const Input input : {kBias, kProbs}) {
    if (apply_prob_) inputs.push_back(builder.input(operands.position(input)));
  }
  inputs.push_back(builder.input(operands.position(kOffsets)));
  if (is_sparse()) inputs.push_back(builder.input(operands.position(kRowOffsets)));
  const auto backward = std::make_shared<ExpertBiasBackward>(*this);
  const auto grads = builder.emit(backward, inputs, {kBias});
  if (apply_prob_ && builder.needs_grad(operands.position(kProbs)))
    builder.set_grad_input(operands.position(kProbs), grads[ExpertBiasBackward::kGradProbs]);
}

OperatorPtr ExpertBiasBackward::with_value() const {
  return std::make_shared<ExpertBiasBackward>(forward_, true);
}

std::vector<ValueType> ExpertBiasBackward::infer(std::span<const ValueType> inputs) const {
  const OperandSet<Input> operands = input_set();
  check_shape(*this, std::ssize(inputs) == operands.size(), "takes {} inputs, got {}",
              operands.size(), inputs.size());
  const ValueType bias = forward_.bias_type();
  std::vector<ValueType> of_forward = {inputs[kGrad], bias};
  if (forward_.apply_prob()) of_forward.push_back(inputs[operands.position(kProbs)]);
  of_forward.push_back(inputs[operands.position(kOffsets)]);
  if (forward_.is_sparse()) of_forward.push_back(inputs[operands.position(kRowOffsets)]);
  forward_.infer(of_forward);
  if (!forward_.apply_prob()) return {bias};
  check_shape(*this, inputs[kBias] == bias, "the biases must be {}, got {}", bias.to_string(),
              inputs[kBias].to_string());
  return {inputs[operands.position(kProbs)], bias};
}

OperatorPtr make_expert_bias(const ExpertBiasSpec& spec) {
  return std::make_shared<ExpertBias>(spec);
}

}  // namespace tessera
