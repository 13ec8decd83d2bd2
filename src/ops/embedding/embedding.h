#pragma once

#include "ops/operator.h"

namespace tessera {

/// Rows of a table: (tokens I32 [T], table A [V, H]) -> A [T, H]. The kernel throws UserError for a
/// token id outside [0, V), naming its position.
class Embedding final : public Operator {
 public:
  /// The row of `padding_token` takes no gradient, as with PyTorch's padding_idx; -1: none.
  explicit Embedding(int64_t padding_token) : padding_token_(padding_token) {}

  std::string_view name() const override { return "embedding"; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  int64_t padding_token_;
};

/// (tokens I32 [T], grad A [T, H]) -> F32 [V, H], accumulated. A token that occurs several times
/// has its gradients added in the order of its positions.
class EmbeddingBackward final : public Operator {
 public:
  EmbeddingBackward(int64_t vocab_size, int64_t padding_token)
      : vocab_size_(vocab_size), padding_token_(padding_token) {}
  int64_t padding_token() const { return padding_token_; }

  std::string_view name() const override { return "embedding_backward"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }

 private:
  int64_t vocab_size_;
  int64_t padding_token_;
};

OperatorPtr make_embedding(int64_t padding_token = -1);
void add_embedding_cpu(KernelTable& table);

}  // namespace tessera
