#include "ops/max_logits/max_logits.h"

#include <cmath>

#include "ops/storage.h"

namespace tessera {

MaxLogits::MaxLogits(const MaxLogitsSpec& spec)
    : AttentionOperator(spec.attention),
      limit_(spec.limit),
      tokens_(spec.tokens),
      rank_(spec.rank) {
  require(!std::isnan(spec.limit), "max_logits: the limit is not a number");
  require(tokens_.ring > 0 && tokens_.divides() && rank_ >= 0 && rank_ < tokens_.ring,
          "max_logits: place {} of a ring of {} that shares rows of {} tokens", rank_, tokens_.ring,
          tokens_.row_length);
}

std::string MaxLogits::attributes() const {
  std::string text = fmt::format("{} limit={:.6g}", AttentionOperator::attributes(), limit_);
  if (tokens_.ring > 1) text += fmt::format(" ring={}", tokens_.ring);
  return text;
}

std::vector<ValueType> MaxLogits::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes q, k, lse and cu_seqlens, found {} inputs",
              inputs.size());
  const ValueType& q = inputs[kQ];
  const ValueType& k = inputs[kK];
  const int64_t heads = spec().num_heads;
  const int64_t kv_heads = spec().num_kv_heads;
  check_shape(*this,
              is_storage(q.dtype) && q.shape.rank() == 2 && !q.ragged() &&
                  q.shape[1] == heads * spec().head_size,
              "queries are {}, expected f32 or bf16 [T, {} heads x {}]", q.to_string(), heads,
              spec().head_size);
  const int64_t tokens = q.shape[0];
  const ValueType keys{q.dtype, {tokens * tokens_.ring, kv_heads * spec().head_size}};
  check_shape(*this, k == keys, "keys are {}, expected {}", k.to_string(), keys.to_string());
  const ValueType statistics{DType::kF32, {heads, tokens}};
  check_shape(*this, inputs[kLse] == statistics, "lse is {}, expected {}", inputs[kLse].to_string(),
              statistics.to_string());
  check_shape(*this, tokens_.ring == 1 || tokens == tokens_.tokens_per_rank(),
              "{} queries of a rank that has {} tokens", tokens, tokens_.tokens_per_rank());
  const ValueType& ends = inputs[kCuSeqlens];
  check_shape(*this, ends.dtype == DType::kI32 && ends.shape.rank() == 1 && ends.shape[0] >= 1,
              "cu_seqlens is {}, expected i32 [num_seqs + 1]", ends.to_string());
  return {{DType::kF32, {heads}}};
}

/// Most often the statistics alone are read.
Cost MaxLogits::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  return Operator::cost(inputs.subspan(kLse), outputs);
}

OperatorPtr make_max_logits(const MaxLogitsSpec& spec) {
  return std::make_shared<MaxLogits>(spec);
}

}  // namespace tessera
