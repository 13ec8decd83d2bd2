#pragma once

#include "ops/operator.h"

namespace tessera {

/// Rows of a table: (tokens I32 [T], table A [V, H]) -> A [T, H]. The kernel throws UserError for a
/// token id outside [0, V), naming its position.
class Embedding final : public Operator {
 public:
  std::string_view name() const override { return "embedding"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (tokens I32 [T], grad A [T, H]) -> F32 [V, H], accumulated. A token that occurs several times
/// has its gradients added in the order of its positions.
class EmbeddingBackward final : public Operator {
 public:
  explicit EmbeddingBackward(int64_t vocab_size) : vocab_size_(vocab_size) {}

  std::string_view name() const override { return "embedding_backward"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }

 private:
  int64_t vocab_size_;
};

OperatorPtr make_embedding();
void add_embedding_cpu(KernelTable& table);

}  // namespace tessera
