#include "ops/vocab_loss/vocab_loss.h"

namespace tessera {
namespace {

const ValueType kScalar = {.dtype = DType::kF32, .shape = {1}};

/// Those that the loss and its gradient have in common, scalars behind them, and weights.
template <typename Op>
void check_inputs(const Op& op, std::span<const ValueType> inputs, size_t num_scalars) {
  const int64_t num_parts = op.num_parts();
  const size_t first_weights = Op::kScale + num_scalars;
  const size_t num_inputs = first_weights + (op.weighted() ? 1 : 0);
  check_shape(op, inputs.size() == num_inputs, "takes {} inputs, got {}", num_inputs,
              inputs.size());
  const ValueType& lse = inputs[Op::kLse];
  const ValueType& labels = inputs[Op::kLabels];
  check_shape(op, labels.dtype == DType::kI32 && labels.shape.rank() == 1 && !labels.ragged(),
              "labels must be i32 [T], got {}", labels.to_string());
  const int64_t tokens = labels.shape[0];
  const Shape in_a_row = {num_parts * tokens};
  const Shape by_part = {num_parts, tokens};
  check_shape(op, lse.dtype == DType::kF32 && (lse.shape == in_a_row || lse.shape == by_part),
              "lse must be f32 [{} · {}], got {}", num_parts, tokens, lse.to_string());
  check_shape(op, inputs[Op::kLabelLogit] == lse, "label_logit must be {} as lse is, got {}",
              lse.to_string(), inputs[Op::kLabelLogit].to_string());
  for (size_t i = Op::kScale; i < first_weights; ++i) {
    check_shape(op, inputs[i] == kScalar, "input {} must be f32 [1], got {}", i,
                inputs[i].to_string());
  }
  if (!op.weighted()) return;
  const ValueType weights = with_dtype(labels, DType::kF32);
  check_shape(op, inputs.back() == weights, "token_weights must be {}, got {}", weights.to_string(),
              inputs.back().to_string());
}

std::string describe_parts(int64_t num_parts, bool weighted) {
  return fmt::format("parts={}{}", num_parts, weighted ? " weighted" : "");
}

}  // namespace

VocabLoss::VocabLoss(int64_t num_parts, bool weighted)
    : num_parts_(num_parts), weighted_(weighted) {
  require(num_parts >= 1, "vocab_loss: a vocabulary in {} parts, expected at least 1", num_parts);
}

std::string VocabLoss::attributes() const {
  return describe_parts(num_parts_, weighted_);
}

std::string VocabLossBackward::attributes() const {
  return describe_parts(num_parts_, weighted_);
}

std::vector<ValueType> VocabLoss::infer(std::span<const ValueType> inputs) const {
  check_inputs(*this, inputs, 1);
  return {kScalar, with_dtype(inputs[kLabels], DType::kF32)};
}

void VocabLoss::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(kTokenLoss), "vocab_loss: only the loss may have a gradient");
  ensure(!builder.needs_grad(kScale), "vocab_loss: the scale has no gradient");
  std::vector<ValueId> inputs = {builder.input(kLse), builder.input(kLabelLogit),
                                 builder.input(kLabels), builder.input(kScale),
                                 *builder.grad_output(kLoss)};
  if (weighted_) inputs.push_back(builder.input(kTokenWeights));
  const std::vector<ValueId> grads =
      builder.emit(std::make_shared<VocabLossBackward>(num_parts_, weighted_), inputs);
  for (int idx = 0; idx < 2; ++idx) {
    if (builder.needs_grad(idx)) builder.set_grad_input(idx, grads[idx]);
  }
}

std::vector<ValueType> VocabLossBackward::infer(std::span<const ValueType> inputs) const {
  check_inputs(*this, inputs, 2);
  return {inputs[kLse], inputs[kLabelLogit]};
}

OperatorPtr make_vocab_loss(int64_t num_parts, bool weighted) {
  return std::make_shared<VocabLoss>(num_parts, weighted);
}

}  // namespace tessera
