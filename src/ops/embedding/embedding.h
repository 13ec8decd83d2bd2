#pragma once

#include "ops/operator.h"

namespace tessera {

/// Which rows of the vocabulary a table holds, and the token without gradient.
struct EmbeddingSpec {
  /// The row of this token takes no gradient, as with PyTorch's padding_idx; -1: none. An id of the
  /// whole vocabulary.
  int64_t padding_token = -1;
  /// The table's first row in the whole vocabulary, where that is spread over ranks.
  int64_t first_row = 0;
  /// Rows of the whole vocabulary; 0: those of the table.
  int64_t vocab_size = 0;
};

/// Rows of a table: (tokens I32 [T], table A [V, H]) -> A [T, H]; zeros for tokens of the
/// vocabulary whose rows are not in this table. V may be 0. The kernel throws UserError for a token
/// id outside the vocabulary, naming its position.
class Embedding final : public Operator {
 public:
  static constexpr std::string_view kName = "embedding";
  enum Input : int { kTokens, kTable };
  enum Output : int { kRows };

  /// Throws UserError where the first row is outside the vocabulary.
  explicit Embedding(const EmbeddingSpec& spec);
  const EmbeddingSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  EmbeddingSpec spec_;
};

/// (tokens I32 [T], grad A [T, H]) -> F32 [V, H], accumulated. A token that occurs several times
/// has its gradients added in the order of its positions; tokens of other tables' rows add nothing.
class EmbeddingBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "embedding_backward";
  enum Input : int { kTokens, kGrad };
  enum Output : int { kGradTable };

  EmbeddingBackward(int64_t num_rows, const EmbeddingSpec& spec)
      : num_rows_(num_rows), spec_(spec) {}
  const EmbeddingSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }

 private:
  int64_t num_rows_;
  EmbeddingSpec spec_;
};

OperatorPtr make_embedding(const EmbeddingSpec& spec);
OperatorPtr make_embedding(int64_t padding_token = -1);
void add_embedding_cpu(KernelTable& table);
void add_embedding_cuda(KernelTable& table);

}  // namespace tessera
