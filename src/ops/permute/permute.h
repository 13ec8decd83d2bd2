#pragma once

#include "ops/addend.h"
#include "ops/gather.h"
#include "ops/scaled_rows.h"

namespace tessera {

/// Moves tokens to the rows of their experts and back, by the two maps that route_map makes:
/// row_of_TK I32 [T, K] (the row of each assignment, -1 where it has none) and source_R I32
/// [R ragged] (t·K + k of each row, -1 for padding). T may be ragged, and with K = 1 the maps and
/// probabilities may be [T]. Padding rows are written as zeros. A is F32 or BF16.
///
/// All of them gather: every element of a result is written by one thread, which adds in order of
/// k in F32, so results do not depend on the threads.

/// Tokens to rows: (x A [T, H], source_R, row_of_TK) -> A [R, H]. Its gradient is Unpermute. Rows
/// of FP8 whose scales are of one row each, or of parts of one, take these along; padding then
/// stands for zeros.
class Permute final : public Operator, public GathersRows {
 public:
  static constexpr std::string_view kName = "permute";
  enum Input : int { kX, kSource, kRowOf };
  enum Output : int { kRows };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// Rows to tokens: (y A [R, H], row_of_TK, source_R, and with addend: A [T, H]) -> A [T, H], the
/// sum of each token's rows, plus the addend. Its gradient is Permute.
class Unpermute final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "unpermute";
  enum Input : int { kRows, kRowOf, kSource, kAddend };
  enum Output : int { kY };

  explicit Unpermute(bool addend = false) : addend_(addend) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return addend_ ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  bool addend() const { return addend_; }

 private:
  bool addend_;
};

/// Probabilities to rows: (probs F32 [T, K], source_R, row_of_TK) -> F32 [R], 0 for padding.
/// Its gradient is UnpermuteProbs.
class PermuteProbs final : public Operator {
 public:
  static constexpr std::string_view kName = "permute_probs";
  enum Input : int { kProbs, kSource, kRowOf };
  enum Output : int { kRowProbs };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// One number a row back to its assignment: (probs_R F32 [R], row_of_TK, source_R) -> F32 [T, K],
/// 0 where there is no row. Its gradient is PermuteProbs.
class UnpermuteProbs final : public Operator {
 public:
  static constexpr std::string_view kName = "unpermute_probs";
  enum Input : int { kRowProbs, kRowOf, kSource };
  enum Output : int { kProbs };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// Rows to tokens, weighted: (y A [R, H], probs F32 [T, K], row_of_TK, source_R, and with addend:
/// A [T, H]) -> A [T, H]. The classic combine, which keeps y for the gradient of the probabilities.
class UnpermuteWeighted final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "unpermute_weighted";
  enum Input : int { kRows, kProbs, kRowOf, kSource, kAddend };
  enum Output : int { kY };

  explicit UnpermuteWeighted(bool addend = false) : addend_(addend) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return addend_ ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  bool addend() const { return addend_; }

 private:
  bool addend_;
};

/// (grad A [T, H], y A [R, H], probs F32 [T, K], source_R) ->
/// (dy A [R, H] = p · grad_t, dprobs F32 [T, K] = ⟨y_r, grad_t⟩, 0 without a row).
class UnpermuteWeightedBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "unpermute_weighted_backward";
  enum Input : int { kGrad, kRows, kProbs, kSource };
  enum Output : int { kGradRows, kGradProbs };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

OperatorPtr make_permute();
OperatorPtr make_unpermute();
OperatorPtr make_permute_probs();
OperatorPtr make_unpermute_probs();
OperatorPtr make_unpermute_weighted();

void add_permute_cpu(KernelTable& table);
void add_permute_cuda(KernelTable& table);

}  // namespace tessera
