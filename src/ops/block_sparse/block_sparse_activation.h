#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/activation_kind.h"
#include "ops/operator.h"

namespace tessera {

struct BlockSparseActivationSpec {
  ActivationFunction activation = Activation::kSwiGLU;
  int64_t block_size = 128;
};

/// The nonlinearity between an expert's two layers, times the probability of each row, on sparse
/// values:
///
///     (pre [nnz1, B, B], probs_R F32 [R], row_offsets, col_indices) -> [nnz2, B, B] in pre's type
///
/// `row_offsets` and `col_indices` are of the *second* layer's topology. Gated, `pre` has twice its
/// blocks, in each row the gate half, then the up half; else as many.
///
/// The probability enters here, before the second layer, so that its gradient comes from the saved
/// pre-activation and no expert output is kept (memory-efficient permutation, Megatron-Core MoE,
/// section 4.1.2). A row of probability 0, padding say, gives zeros.
class BlockSparseActivation final : public Operator {
 public:
  static constexpr std::string_view kName = "block_sparse_activation";
  enum Input : int { kPre, kProbs, kRowOffsets, kColIndices };
  enum Output : int { kOut };

  explicit BlockSparseActivation(const BlockSparseActivationSpec& spec);

  const BlockSparseActivationSpec& spec() const { return spec_; }
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  BlockSparseActivationSpec spec_;
};

/// (grad [nnz2, B, B], pre, probs_R, row_offsets) -> (grad_pre as pre, grad_probs_R F32 [R]).
class BlockSparseActivationBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "block_sparse_activation_backward";
  enum Input : int { kGrad, kPre, kProbs, kRowOffsets };
  enum Output : int { kGradPre, kGradProbs };

  explicit BlockSparseActivationBackward(const BlockSparseActivationSpec& spec) : spec_(spec) {}

  const BlockSparseActivationSpec& spec() const { return spec_; }
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  BlockSparseActivationSpec spec_;
};

OperatorPtr make_block_sparse_activation(const BlockSparseActivationSpec& spec);

void add_block_sparse_activation_cpu(KernelTable& table);

}  // namespace tessera
