#pragma once

#include "ops/operator.h"

namespace tessera {

/// LayerNorm with weight and bias: y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias over each
/// row, as the keys of DeepSeek Sparse Attention's indexer are normed. (x A [T, D], weight F32 [D],
/// bias F32 [D]) -> (y A [T, D]). Computed in F32 and rounded once. No gradient: nothing trains an
/// indexer.
class LayerNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "layer_norm";
  enum Input : int { kX, kWeight, kBias };
  enum Output : int { kY };

  /// Throws UserError unless eps >= 0.
  explicit LayerNorm(double eps);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  float eps() const { return static_cast<float>(eps_); }

 private:
  double eps_;
};

OperatorPtr make_layer_norm(double eps);
void add_layer_norm_cpu(KernelTable& table);
void add_layer_norm_cuda(KernelTable& table);

}  // namespace tessera
