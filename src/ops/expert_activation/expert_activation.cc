#include "ops/expert_activation/expert_activation.h"

#include <algorithm>

#include "ops/scaled_rows.h"

namespace tessera {
namespace {

void check_probs(const Operator& op, const ValueType& probs_R, int64_t num_rows) {
  check_shape(op, probs_R.dtype == DType::kF32 && probs_R.shape == Shape{num_rows},
              "probs_R must be f32 [{}], got {}", num_rows, probs_R.to_string());
}

ValueType quantized(const ValueType& values) {
  return Quantize(short_blocks()).infer({&values, 1})[Quantize::kY];
}

}  // namespace

ExpertActivation::ExpertActivation(const ExpertActivationSpec& spec)
    : function_(spec.function),
      sizes_(spec.expert_sizes, "expert_activation"),
      apply_prob_(spec.apply_prob) {}

bool ExpertActivation::has_short_blocks() const {
  return sizes_.are_equal() && sizes_.largest() % kShortBlock == 0;
}

OperatorPtr ExpertActivation::giving_quantized(int output, const Quantize& quantize) const {
  const bool suits = output == kAct && tessera::has_short_blocks(quantize.spec());
  if (gives_fp8_ || !suits || !has_short_blocks()) return nullptr;
  auto result = std::make_shared<ExpertActivation>(*this);
  result->gives_fp8_ = true;
  return result;
}

std::string ExpertActivation::attributes() const {
  return fmt::format("{} experts={}{}{}", to_string(function_), sizes_.to_string(),
                     apply_prob_ ? " apply_prob" : "", gives_fp8_ ? " gives_fp8" : "");
}

std::vector<ValueType> ExpertActivation::infer(std::span<const ValueType> inputs) const {
  const OperandSet<Input> operands = input_set();
  check_shape(*this, std::ssize(inputs) == operands.size(), "takes {} inputs, got {}",
              operands.size(), inputs.size());
  const ValueType& pre = inputs[kPre];
  const ValueType& offsets = inputs[operands.position(kOffsets)];
  check_shape(*this, is_storage(pre.dtype) && pre.shape.rank() == 2 && pre.shape[1] == pre_width(),
              "pre must be f32 or bf16 [R, {}], got {}", pre_width(), pre.to_string());
  if (apply_prob_) check_probs(*this, inputs[operands.position(kProbs)], pre.shape[0]);
  check_shape(*this,
              offsets.dtype == DType::kI64 && offsets.shape == Shape{sizes_.num_experts() + 1},
              "offsets must be i64 [{}], got {}", sizes_.num_experts() + 1, offsets.to_string());
  std::vector<ValueType> results{with_last_dim(pre, sizes_.largest())};
  if (gives_fp8_) {
    check_shape(*this, has_short_blocks(), "cuts rows of equal multiples of 128 values, got {}",
                sizes_.to_string());
    results.push_back(quantized(results[kAct]));
  }
  return results;
}

void ExpertActivation::differentiate(GradientBuilder& builder) const {
  using Backward = ExpertActivationBackward;
  const OperandSet<Input> operands = input_set();
  std::vector<ValueId> inputs{*builder.grad_output(kAct)};
  for (int i = 0; i < operands.size(); ++i) inputs.push_back(builder.input(i));
  const auto backward = std::make_shared<Backward>(*this);
  const auto grads = builder.emit(backward, inputs);
  if (builder.needs_grad(kPre)) builder.set_grad_input(kPre, grads[Backward::kGradPre]);
  if (apply_prob_ && builder.needs_grad(operands.position(kProbs)))
    builder.set_grad_input(operands.position(kProbs), grads[Backward::kGradProbs]);
}

std::string ExpertActivationBackward::attributes() const {
  return fmt::format("{}{}{}{}", forward_.attributes(), gives_act_ ? " gives_act" : "",
                     pre_format_ == RowFormat::kScaled ? " scaled_pre" : "",
                     gives_fp8_ ? " gives_fp8" : "");
}

std::vector<ValueType> ExpertActivationBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() > kPre, "takes the gradient and the forward inputs");
  std::vector<ValueType> forward_inputs(inputs.begin() + kPre, inputs.end());
  ValueType& pre = forward_inputs[ExpertActivation::kPre];
  if (pre_format_ == RowFormat::kScaled)
    pre = values_of_scaled_rows(*this, pre, inputs[kGrad].dtype);
  const ValueType act = forward_.infer(forward_inputs)[ExpertActivation::kAct];
  check_shape(*this, inputs[kGrad].dtype == act.dtype && inputs[kGrad].shape == act.shape,
              "the gradient must be {}, got {}", act.to_string(), inputs[kGrad].to_string());
  std::vector<ValueType> results{pre};
  if (forward_.apply_prob()) results.push_back(inputs[input_set().position(kProbs)]);
  if (gives_act_) results.push_back(act);
  if (gives_fp8_) {
    check_shape(*this, !gives_act_ && forward_.has_short_blocks(),
                "gives fp8 of rows of equal multiples of 128 values, and no activation beside");
    results.push_back(quantized(results[kGradPre]));
  }
  return results;
}

OperatorPtr ExpertActivationBackward::giving_also(std::span<const ValueId> inputs,
                                                  const Operator& other,
                                                  std::span<const ValueId> other_inputs) const {
  const auto* activation = dynamic_cast<const ExpertActivation*>(&other);
  const bool is_own = activation != nullptr && activation->attributes() == forward_.attributes() &&
                      std::ranges::equal(inputs.subspan(kPre), other_inputs);
  if (gives_act_ || gives_fp8_ || !is_own || pre_format_ != RowFormat::kValues) return nullptr;
  return std::make_shared<ExpertActivationBackward>(forward_, true);
}

OperatorPtr ExpertActivationBackward::reading_scaled_rows(int input) const {
  if (input != kPre) return nullptr;
  return std::make_shared<ExpertActivationBackward>(forward_, gives_act_, RowFormat::kScaled,
                                                    gives_fp8_);
}

OperatorPtr ExpertActivationBackward::giving_quantized(int output, const Quantize& quantize) const {
  const bool suits = output == kGradPre && has_short_blocks(quantize.spec());
  if (gives_act_ || gives_fp8_ || !suits || !forward_.has_short_blocks()) return nullptr;
  return std::make_shared<ExpertActivationBackward>(forward_, false, pre_format_, true);
}

OperatorPtr make_expert_activation(const ExpertActivationSpec& spec) {
  return std::make_shared<ExpertActivation>(spec);
}

}  // namespace tessera
