#include "ops/hash_experts/hash_experts.h"

namespace tessera {

HashExperts::HashExperts(int64_t num_experts) : num_experts_(num_experts) {
  ensure(num_experts >= 1, "hash_experts: {} experts", num_experts);
}

std::string HashExperts::attributes() const {
  return fmt::format("experts={}", num_experts_);
}

std::vector<ValueType> HashExperts::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes tokens and table, got {} inputs", inputs.size());
  const ValueType& tokens = inputs[kTokens];
  const ValueType& table = inputs[kTable];
  check_shape(*this, tokens.dtype == DType::kI32 && tokens.shape.rank() == 1 && !tokens.ragged(),
              "tokens must be i32 [T], got {}", tokens.to_string());
  check_shape(*this,
              table.dtype == DType::kF32 && table.shape.rank() == 2 && !table.ragged() &&
                  table.shape[1] >= 1 && table.shape[1] <= num_experts_,
              "table must be f32 [V, K] with K from 1 to the {} experts, got {}", num_experts_,
              table.to_string());
  return {{DType::kI32, {tokens.shape[0], table.shape[1]}}};
}

/// The rows that are read and written, not the whole table.
Cost HashExperts::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  return {.bytes = static_cast<double>(inputs[kTokens].num_bytes() +
                                       2 * outputs[kExpertIdx].num_bytes())};
}

OperatorPtr make_hash_experts(int64_t num_experts) {
  return std::make_shared<HashExperts>(num_experts);
}

}  // namespace tessera
