#include "ops/sparse_attention/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace tessera {
namespace {

/// FLOPs of a pair of a query and a row, of all heads.
double pair_flops(const AttentionSpec& spec) {
  return 2 * static_cast<double>((spec.head_size + spec.head_size_v) * spec.num_heads);
}

/// Sum over the first `length` whole numbers n from 1 on of min(n, most).
double sum_up_to(double length, double most) {
  const double full = std::min(length, most);
  return full * (full + 1) / 2 + (length - full) * full;
}

/// Model FLOPs of attention to windows and entries.
double sight_flops(const AttentionSpec& spec, const SparseSight& sight, int64_t num_queries) {
  if (num_queries == 0) return 0;
  const auto length = static_cast<double>(
      spec.sequence_length > 0 ? std::min(spec.sequence_length, num_queries) : num_queries);
  // Each number of entries is seen by `rate` tokens, the last by those that are left.
  const auto rate = static_cast<double>(sight.rate);
  const double whole = std::floor(length / rate);
  const double entries =
      rate * sum_up_to(whole, static_cast<double>(sight.entries)) -
      (rate - 1 - (length - whole * rate)) * std::min(whole, static_cast<double>(sight.entries));
  const double pairs = sum_up_to(length, static_cast<double>(sight.window)) + entries;
  return pair_flops(spec) * pairs / length * static_cast<double>(num_queries);
}

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
  const double pairs = num_queries == num_keys ? sum_up_to(length, full) / length : full;
  return pair_flops(spec) * pairs * queries;
}

double sparse_flops(const AttentionSpec& spec, const SparseSight& sight, const ValueType& queries,
                    const ValueType& keys, const ValueType& chosen) {
  if (sight.window > 0) return sight_flops(spec, sight, queries.shape[0]);
  return sparse_flops(spec, queries.shape[0], keys.shape[0], chosen.shape[1]);
}

}  // namespace

SparseAttention::SparseAttention(const AttentionSpec& spec, const SparseSight& sight)
    : AttentionOperator(spec), sight_(sight) {
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
  cost.flops = sparse_flops(spec(), sight_, inputs[kQ], inputs[kK], inputs[kChosen]);
  return cost;
}

void SparseAttention::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, [this](bool with_grad_lse) {
    return std::make_shared<SparseAttentionBackward>(spec(), with_grad_lse, sight_);
  });
}

std::vector<ValueType> SparseAttentionBackward::infer(std::span<const ValueType> inputs) const {
  const int expected = with_grad_lse_ ? kGradLse + 1 : kChosen + 1;
  check_shape(*this, std::ssize(inputs) == expected, "takes {} inputs, found {}", expected,
              inputs.size());
  const std::vector<ValueType> forward = SparseAttention(spec()).infer(
      std::vector{inputs[kQ], inputs[kK], inputs[kV], inputs[kChosen]});
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
  cost.flops = 2 * sparse_flops(spec(), sight_, inputs[kQ], inputs[kK], inputs[kChosen]);
  return cost;
}

OperatorPtr make_sparse_attention(const AttentionSpec& spec, const SparseSight& sight) {
  return std::make_shared<SparseAttention>(spec, sight);
}

}  // namespace tessera
