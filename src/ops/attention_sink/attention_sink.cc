#include "ops/attention_sink/attention_sink.h"

#include <memory>

namespace tessera {

AttentionSink::AttentionSink(const AttentionSinkSpec& spec) : spec_(spec) {
  require(spec.num_heads >= 1 && spec.first_head >= 0 &&
              spec.num_sinks - spec.first_head >= spec.num_heads,
          "attention_sink: {} heads from {} on are not among {} sinks", spec.num_heads,
          spec.first_head, spec.num_sinks);
}

std::string AttentionSink::attributes() const {
  std::string text = fmt::format("heads={}", spec_.num_heads);
  if (spec_.num_sinks > spec_.num_heads)
    text += fmt::format(" from={} of={}", spec_.first_head, spec_.num_sinks);
  return text;
}

std::vector<ValueType> AttentionSink::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes o, lse and sinks, got {} inputs", inputs.size());
  const ValueType& o = inputs[kO];
  check_shape(*this,
              is_storage(o.dtype) && o.shape.rank() == 2 && !o.ragged() &&
                  o.shape[1] % spec_.num_heads == 0,
              "o must be f32 or bf16 [T, {} heads x Dv], got {}", spec_.num_heads, o.to_string());
  const ValueType lse{DType::kF32, {spec_.num_heads, o.shape[0]}};
  check_shape(*this, inputs[kLse] == lse, "lse must be {}, got {}", lse.to_string(),
              inputs[kLse].to_string());
  const ValueType sinks{DType::kF32, {spec_.num_sinks}};
  check_shape(*this, inputs[kSinks] == sinks, "sinks must be {}, got {}", sinks.to_string(),
              inputs[kSinks].to_string());
  return {o};
}

void AttentionSink::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<AttentionSinkBackward>(*this),
      {*grad, builder.input(kO), builder.input(kLse), builder.input(kSinks)}, {kSinks});
  if (builder.needs_grad(kO)) builder.set_grad_input(kO, grads[AttentionSinkBackward::kGradO]);
  if (builder.needs_grad(kLse)) {
    builder.set_grad_input(kLse, grads[AttentionSinkBackward::kGradLse]);
  }
}

std::vector<ValueType> AttentionSinkBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes the gradient, o, lse and sinks, got {} inputs",
              inputs.size());
  const ValueType y = forward_.infer(inputs.subspan(1))[AttentionSink::kY];
  check_shape(*this, inputs[kGrad] == y, "the gradient must be {}, got {}", y.to_string(),
              inputs[kGrad].to_string());
  return {inputs[kO], inputs[kLse], inputs[kSinks]};
}

OperatorPtr make_attention_sink(const AttentionSinkSpec& spec) {
  return std::make_shared<AttentionSink>(spec);
}

}  // namespace tessera
