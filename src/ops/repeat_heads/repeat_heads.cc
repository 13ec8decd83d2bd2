#include "ops/repeat_heads/repeat_heads.h"

#include "ops/storage.h"

namespace tessera {

HeadRepetition::HeadRepetition(int64_t num_heads, int64_t times)
    : num_heads_(num_heads), times_(times) {
  require(num_heads >= 1 && times >= 1, "repeat_heads: {} heads, {} times; both must be at least 1",
          num_heads, times);
}

std::string HeadRepetition::attributes() const {
  return fmt::format("heads={} times={}", num_heads_, times_);
}

void HeadRepetition::check_heads(std::span<const ValueType> inputs, int64_t heads_in_row) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this,
              is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0 &&
                  x.shape[1] % heads_in_row == 0,
              "takes f32 or bf16 [tokens, {} heads], got {}", heads_in_row, x.to_string());
}

std::vector<ValueType> RepeatHeads::infer(std::span<const ValueType> inputs) const {
  check_heads(inputs, num_heads());
  return {with_last_dim(inputs[kX], inputs[kX].shape[1] * times())};
}

void RepeatHeads::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  builder.set_grad_input(kX,
                         builder.emit(make_sum_heads(num_heads(), times()), {*grad})[SumHeads::kY]);
}

std::vector<ValueType> SumHeads::infer(std::span<const ValueType> inputs) const {
  check_heads(inputs, num_heads() * times());
  return {with_last_dim(inputs[kX], inputs[kX].shape[1] / times())};
}

Cost SumHeads::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops =
      static_cast<double>(inputs[kX].shape.num_elements() - outputs[kY].shape.num_elements());
  return cost;
}

void SumHeads::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  builder.set_grad_input(
      kX, builder.emit(make_repeat_heads(num_heads(), times()), {*grad})[RepeatHeads::kY]);
}

OperatorPtr make_repeat_heads(int64_t num_heads, int64_t times) {
  return std::make_shared<RepeatHeads>(num_heads, times);
}
OperatorPtr make_sum_heads(int64_t num_heads, int64_t times) {
  return std::make_shared<SumHeads>(num_heads, times);
}

}  // namespace tessera
