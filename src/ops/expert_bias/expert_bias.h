#pragma once

#include <cstdint>
#include <vector>

#include "ops/expert_sizes.h"
#include "ops/gradient_value.h"
#include "ops/operator.h"

namespace tessera {

struct ExpertBiasSpec {
  /// b_e: elements of each expert's bias.
  std::vector<int64_t> sizes;
  /// The column of an expert's rows that the first of them is added to; the rest of a row stays.
  int64_t first_column = 0;
  /// Multiply the bias by the routed row's probability, for rows that already have it as a factor.
  bool apply_prob = false;
  /// B: x is block-sparse values, an expert's rows b_e wide; 0: x is a matrix.
  int64_t block_size = 0;
};

/// Adds to every routed row the bias of its expert:
///   (x A [R, W], bias F32 [Σ b_e], [probs_R F32 [R] with apply_prob], offsets I64 [E + 1])
///   -> A as x, rounded once
/// Rows offsets[e] to offsets[e + 1] belong to expert e. A is F32 or BF16. With a block size x is
/// block-sparse values [nnz, B, B] (BlockSparseProduct), and the topology's row_offsets I32
/// [R / B + 1] is a last input.
///
/// Where ranks hold parts of every expert, each adds to its own columns of a sum over ranks: the
/// bias of a whole row is then spread, and nobody adds it twice.
class ExpertBias final : public Operator {
 public:
  static constexpr std::string_view kName = "expert_bias";
  enum Input : int { kX, kBias, kProbs, kOffsets, kRowOffsets };
  enum Output : int { kY };

  /// Throws UserError for experts without size and impossible columns.
  explicit ExpertBias(const ExpertBiasSpec& spec);

  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kBias, kOffsets}
        .add(kProbs, apply_prob_)
        .add(kRowOffsets, is_sparse());
  }
  const ExpertSizes& sizes() const { return sizes_; }
  ValueType bias_type() const { return {DType::kF32, {sizes_.total()}}; }
  int64_t first_column() const { return first_column_; }
  bool apply_prob() const { return apply_prob_; }
  int64_t block_size() const { return block_size_; }
  bool is_sparse() const { return block_size_ > 0; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  ExpertSizes sizes_;
  int64_t first_column_;
  bool apply_prob_;
  int64_t block_size_;
};

/// (grad as x, [bias and probs_R with apply_prob], offsets, [row_offsets]) -> ([grad_probs F32
/// [R]], grad_bias F32 accumulated, or written where the bias is a value). The gradient of x is
/// that of the result. Rows are added up in a fixed order, the same for any number of threads.
class ExpertBiasBackward final : public Operator, public AccumulatesGradient {
 public:
  static constexpr std::string_view kName = "expert_bias_backward";
  static constexpr std::string_view kOfValue = "expert_bias_backward_of_value";
  enum Input : int { kGrad, kBias, kProbs, kOffsets, kRowOffsets };
  enum Output : int { kGradProbs, kGradBias };

  explicit ExpertBiasBackward(const ExpertBias& forward, bool of_value = false)
      : forward_(forward), of_value_(of_value) {}

  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kGrad, kOffsets}
        .add(kBias, forward_.apply_prob())
        .add(kProbs, forward_.apply_prob())
        .add(kRowOffsets, forward_.is_sparse());
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kGradBias}.add(kGradProbs, forward_.apply_prob());
  }
  const ExpertBias& forward() const { return forward_; }
  bool of_value() const { return of_value_; }

  std::string_view name() const override { return of_value_ ? kOfValue : kName; }
  std::string attributes() const override { return forward_.attributes(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override {
    return !of_value_ && output == output_set().position(kGradBias);
  }
  OperatorPtr with_value() const override;
  int gradient_output() const override { return output_set().position(kGradBias); }

 private:
  ExpertBias forward_;
  bool of_value_;
};

OperatorPtr make_expert_bias(const ExpertBiasSpec& spec);

void add_expert_bias_cpu(KernelTable& table);
/// Up to 1024 experts of different sizes.
void add_expert_bias_cuda(KernelTable& table);

}  // namespace tessera
