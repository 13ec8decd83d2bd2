#include "ops/collective/head_exchange.h"

namespace tessera {

HeadExchange::HeadExchange(CommunicatorPtr comm, int64_t num_heads)
    : CollectiveOperator(std::move(comm)), num_heads_(num_heads) {
  require(num_heads >= 1 && num_heads % this->comm().size() == 0,
          "{} heads cannot be spread evenly over the {} ranks of group '{}'; the number of heads "
          "must be a multiple of the ranks (repeat_heads repeats those of keys and values)",
          num_heads, this->comm().size(), this->comm().name());
}

std::string HeadExchange::attributes() const {
  return fmt::format("{} heads={}", CollectiveOperator::attributes(), num_heads_);
}

int64_t HeadExchange::parts_bytes(std::span<const ValueType> inputs) const {
  return comm().size() == 1 ? 0 : inputs[kX].num_bytes();
}

void HeadExchange::check_heads(std::span<const ValueType> inputs, int64_t heads_in_row) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, x.shape.rank() == 2 && !x.ragged() && x.shape[1] % heads_in_row == 0,
              "takes [tokens, {} heads], got {}", heads_in_row, x.to_string());
}

std::vector<ValueType> GatherHeads::infer(std::span<const ValueType> inputs) const {
  check_heads(inputs, num_heads());
  ValueType result = inputs[kX];
  result.shape[0] *= comm().size();
  result.shape[1] /= comm().size();
  return {result};
}

void GatherHeads::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  builder.set_grad_input(
      kX, builder.emit(make_scatter_heads(comm_ptr(), num_heads()), {*grad})[ScatterHeads::kY]);
}

std::vector<ValueType> ScatterHeads::infer(std::span<const ValueType> inputs) const {
  check_heads(inputs, num_heads() / comm().size());
  check_shape(*this, inputs[kX].shape[0] % comm().size() == 0,
              "the {} tokens of {} do not divide over the {} ranks of group '{}'",
              inputs[kX].shape[0], inputs[kX].to_string(), comm().size(), comm().name());
  ValueType result = inputs[kX];
  result.shape[0] /= comm().size();
  result.shape[1] *= comm().size();
  return {result};
}

void ScatterHeads::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  builder.set_grad_input(
      kX, builder.emit(make_gather_heads(comm_ptr(), num_heads()), {*grad})[GatherHeads::kY]);
}

OperatorPtr make_gather_heads(CommunicatorPtr comm, int64_t num_heads) {
  return std::make_shared<GatherHeads>(std::move(comm), num_heads);
}
OperatorPtr make_scatter_heads(CommunicatorPtr comm, int64_t num_heads) {
  return std::make_shared<ScatterHeads>(std::move(comm), num_heads);
}

}  // namespace tessera
