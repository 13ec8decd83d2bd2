#include "ops/ring_attention/ring_attention.h"

namespace tessera {

RingAttentionOperator::RingAttentionOperator(const AttentionSpec& spec, const Zigzag& tokens,
                                             CommunicatorPtr comm)
    : AttentionOperator(spec), tokens_(tokens), comm_(std::move(comm)) {
  ensure(comm_ != nullptr, "ring attention without a communicator");
  tokens_.ring = comm_->size();
  const int64_t num_rows = tokens_.num_rows;
  const int64_t row_length = tokens_.row_length;
  require(num_rows >= 0 && row_length >= 0,
          "ring attention: {} rows of {} tokens; neither may be negative", num_rows, row_length);
  require(tokens_.divides(),
          "ring attention: a ring of {} ranks cuts each row into {} equal chunks, but rows have {} "
          "tokens; take a multiple of {}",
          tokens_.ring, 2 * tokens_.ring, row_length, 2 * tokens_.ring);
}

std::string RingAttentionOperator::attributes() const {
  return fmt::format("{} rows={}x{}{} group={} size={}", AttentionOperator::attributes(),
                     tokens_.num_rows, tokens_.row_length,
                     tokens_.by_sequence ? " by_sequence" : "", comm_->name(), tokens_.ring);
}

void RingAttentionOperator::check_tokens(const ValueType& q) const {
  check_shape(*this, q.shape[0] == tokens_.tokens_per_rank() && !q.ragged(),
              "queries are {}, expected the {} tokens of one of {} ranks", q.to_string(),
              tokens_.tokens_per_rank(), tokens_.ring);
}

double RingAttentionOperator::rank_flops() const {
  return packed_flops(tokens_.num_tokens()) / static_cast<double>(tokens_.ring);
}

std::vector<ValueType> RingAttention::infer(std::span<const ValueType> inputs) const {
  std::vector<ValueType> outputs = infer_forward(inputs);
  check_tokens(inputs[attention::kQ]);
  return outputs;
}

Cost RingAttention::cost(std::span<const ValueType> inputs,
                         std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = rank_flops();
  return cost;
}

void RingAttention::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, [this](bool with_grad_lse) {
    return std::make_shared<RingAttentionBackward>(spec(), tokens(), comm_ptr(), with_grad_lse);
  });
}

RingAttentionBackward::RingAttentionBackward(const AttentionSpec& spec, const Zigzag& tokens,
                                             CommunicatorPtr comm, bool with_grad_lse)
    : RingAttentionOperator(spec, tokens, std::move(comm)), with_grad_lse_(with_grad_lse) {}

std::vector<ValueType> RingAttentionBackward::infer(std::span<const ValueType> inputs) const {
  std::vector<ValueType> outputs = infer_backward(inputs, with_grad_lse_);
  check_tokens(inputs[attention::kQ]);
  return outputs;
}

Cost RingAttentionBackward::cost(std::span<const ValueType> inputs,
                                 std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2 * rank_flops();
  return cost;
}

OperatorPtr make_ring_attention(const AttentionSpec& spec, int64_t num_rows, int64_t row_length,
                                CommunicatorPtr comm) {
  const Zigzag tokens{.num_rows = num_rows, .row_length = row_length};
  return std::make_shared<RingAttention>(spec, tokens, std::move(comm));
}

OperatorPtr make_ring_attention_by_sequence(const AttentionSpec& spec, int64_t num_tokens,
                                            CommunicatorPtr comm) {
  const Zigzag tokens{.row_length = num_tokens, .by_sequence = true};
  return std::make_shared<RingAttention>(spec, tokens, std::move(comm));
}

OperatorPtr make_ring_attention_backward(const AttentionSpec& spec, int64_t num_rows,
                                         int64_t row_length, CommunicatorPtr comm,
                                         bool with_grad_lse) {
  const Zigzag tokens{.num_rows = num_rows, .row_length = row_length};
  return std::make_shared<RingAttentionBackward>(spec, tokens, std::move(comm), with_grad_lse);
}

}  // namespace tessera
