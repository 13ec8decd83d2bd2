#include "ops/sparse_attention/sparse_attention.h"

#include <algorithm>
#include <memory>

namespace tessera {
namespace {

/// Model FLOPs of attention of tokens to at most `most` of those before them: of packed sequences
/// (as many keys as queries), or of new tokens to those of caches.
double sparse_flops(const AttentionSpec& spec, int64_t num_queries, int64_t num_keys,
                    int64_t most) {
  const auto queries = static_cast<double>(num_queries);
  const int64_t longest =
      spec.sequence_length > 0 ? std::min(spec.sequence_length, num_keys) : num_keys;
  if (longest == 0) return 0;
  const auto length = static_cast<double>(longest);
  const auto full = static_cast<double>(std::min(longest, most));
  const double pairs =
      num_queries == num_keys ? (full * (full + 1) / 2 + (length - full) * full) / length : full;
  return 2 * static_cast<double>((spec.head_size + spec.head_size_v) * spec.num_heads) * pairs *
         queries;
}

}  // namespace

SparseAttention::SparseAttention(const AttentionSpec& spec) : AttentionOperator(spec) {
  require(spec.window == 0 && spec.chunk == 0,
          "sparse_attention: window = {} and chunk = {}, but what tokens see is chosen",
          spec.window, spec.chunk);
}

std::vector<ValueType> SparseAttention::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes q, k, v and chosen rows, found {} inputs",
              inputs.size());
  const ValueType& q = inputs[kQ];
  check_qkv(q, inputs[kK], inputs[kV]);
  const ValueType& chosen = inputs[kChosen];
  check_shape(*this,
              chosen.dtype == DType::kI32 && chosen.shape.rank() == 2 &&
                  chosen.shape[0] == q.shape[0] && !q.ragged(),
              "chosen rows are {}, expected i32 [{}, K]", chosen.to_string(), q.shape[0]);
  return {with_last_dim(q, spec().num_heads * spec().head_size_v),
          {DType::kF32, {spec().num_heads, q.shape[0]}}};
}

Cost SparseAttention::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops =
      sparse_flops(spec(), inputs[kQ].shape[0], inputs[kK].shape[0], inputs[kChosen].shape[1]);
  return cost;
}

void SparseAttention::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, [this](bool with_grad_lse) {
    return std::make_shared<SparseAttentionBackward>(spec(), with_grad_lse);
  });
}

std::vector<ValueType> SparseAttentionBackward::infer(std::span<const ValueType> inputs) const {
  const int expected = with_grad_lse_ ? kGradLse + 1 : kChosen + 1;
  check_shape(*this, std::ssize(inputs) == expected, "takes {} inputs, found {}", expected,
              inputs.size());
  const std::vector<ValueType> forward = SparseAttention(spec()).infer(
      std::vector{inputs[kQ], inputs[kK], inputs[kV], inputs[kChosen]});
  check_shape(*this, inputs[kK].shape[0] == inputs[kQ].shape[0], "{} queries but {} keys",
              inputs[kQ].shape[0], inputs[kK].shape[0]);
  const ValueType& o = forward[attention::kO];
  const ValueType& lse = forward[attention::kLse];
  check_shape(*this, inputs[kSavedO] == o && inputs[kGradO] == o,
              "o is {} and its gradient {}, expected {}", inputs[kSavedO].to_string(),
              inputs[kGradO].to_string(), o.to_string());
  check_shape(*this, inputs[kSavedLse] == lse && (!with_grad_lse_ || inputs[kGradLse] == lse),
              "lse is {}, expected {}", inputs[kSavedLse].to_string(), lse.to_string());
  return {inputs[kQ], inputs[kK], inputs[kV]};
}

Cost SparseAttentionBackward::cost(std::span<const ValueType> inputs,
                                   std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops =
      2 * sparse_flops(spec(), inputs[kQ].shape[0], inputs[kK].shape[0], inputs[kChosen].shape[1]);
  return cost;
}

OperatorPtr make_sparse_attention(const AttentionSpec& spec) {
  return std::make_shared<SparseAttention>(spec);
}

}  // namespace tessera
