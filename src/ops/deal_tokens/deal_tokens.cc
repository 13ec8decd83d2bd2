#include "ops/deal_tokens/deal_tokens.h"

#include <memory>

namespace tessera {

TokenDeal::TokenDeal(const Zigzag& deal) : deal_(deal) {
  ensure(!deal.by_sequence, "deal_tokens: sequences are dealt out one by one");
  require(deal.num_rows >= 0 && deal.row_length >= 1 && deal.ring >= 1 && deal.divides(),
          "deal_tokens: {} rows of {} tokens do not divide into the chunks of a ring of {}",
          deal.num_rows, deal.row_length, deal.ring);
}

std::string TokenDeal::attributes() const {
  return fmt::format("rows={}x{} ring={}", deal_.num_rows, deal_.row_length, deal_.ring);
}

std::vector<ValueType> TokenDeal::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(
      *this,
      is_storage(x.dtype) && x.shape.rank() >= 1 && !x.ragged() && x.shape[0] == deal_.num_tokens(),
      "takes f32 or bf16 of {} tokens, got {}", deal_.num_tokens(), x.to_string());
  return {x};
}

void DealTokens::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  builder.set_grad_input(kX, builder.emit(make_collect_tokens(deal()), {*grad})[kY]);
}

void CollectTokens::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  builder.set_grad_input(kX, builder.emit(make_deal_tokens(deal()), {*grad})[kY]);
}

OperatorPtr make_deal_tokens(const Zigzag& deal) {
  return std::make_shared<DealTokens>(deal);
}
OperatorPtr make_collect_tokens(const Zigzag& deal) {
  return std::make_shared<CollectTokens>(deal);
}

}  // namespace tessera
