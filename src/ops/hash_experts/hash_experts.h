#pragma once

#include <string>

#include "ops/operator.h"

namespace tessera {

/// Looks up the experts of tokens by their ids, as Hash Layers do (Roller et al., 2021) and the
/// first layers of DeepSeek-V4 (section 2.1):
///   (tokens I32 [T], table F32 [V, K]) -> expert_idx I32 [T, K]
/// The table's numbers are whole, which F32 holds exactly, from 0 to num_experts - 1, those of a
/// row distinct; nothing trains it. Throws UserError for an id outside the table, or an expert that
/// there is not; a GPU stops.
class HashExperts final : public Operator {
 public:
  static constexpr std::string_view kName = "hash_experts";
  enum Input : int { kTokens, kTable };
  enum Output : int { kExpertIdx };

  explicit HashExperts(int64_t num_experts);
  int64_t num_experts() const { return num_experts_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}

 private:
  int64_t num_experts_;
};

OperatorPtr make_hash_experts(int64_t num_experts);
void add_hash_experts_cpu(KernelTable& table);
void add_hash_experts_cuda(KernelTable& table);

}  // namespace tessera
