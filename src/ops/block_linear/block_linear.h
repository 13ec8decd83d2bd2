#pragma once

#include "ops/operator.h"

namespace tessera {

/// A linear layer of a block-diagonal weight, as DeepSeek-V4 projects groups of attention's heads
/// (DeepSeek-V4: DeepSeek-AI, 2026, section 2.3.1, "Grouped Output Projection"): a row of x is
/// `num_blocks` equal parts, and block g of y is that of x times the g-th equal run of the weight's
/// rows, transposed. (x A [T, G·C], weight A [G·R, C]) -> (y A [T, G·R]). With `shared` all blocks
/// have one weight A [R, C], as residual streams have (model/layers/residual_blocks.h). Sums are
/// F32, rounded once.
class BlockLinear final : public Operator {
 public:
  static constexpr std::string_view kName = "block_linear";
  enum Input : int { kX, kWeight };
  enum Output : int { kY };

  /// Throws UserError unless num_blocks >= 1.
  explicit BlockLinear(int64_t num_blocks, bool shared = false);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  int64_t num_blocks() const { return num_blocks_; }
  bool shared() const { return shared_; }

 private:
  int64_t num_blocks_;
  bool shared_;
};

/// The gradient of x: (grad A [T, G·R], weight A [G·R, C], or [R, C]) -> A [T, G·C].
class BlockLinearDgrad final : public Operator {
 public:
  static constexpr std::string_view kName = "block_linear_dgrad";
  enum Input : int { kGrad, kWeight };
  enum Output : int { kGradX };

  explicit BlockLinearDgrad(int64_t num_blocks, bool shared = false)
      : num_blocks_(num_blocks), shared_(shared) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  int64_t num_blocks() const { return num_blocks_; }
  bool shared() const { return shared_; }

 private:
  int64_t num_blocks_;
  bool shared_;
};

/// The gradient of the weight: (x A [T, G·C], grad A [T, G·R]) -> F32 [G·R, C], or
/// [R, C], accumulated.
class BlockLinearWgrad final : public Operator {
 public:
  static constexpr std::string_view kName = "block_linear_wgrad";
  enum Input : int { kX, kGrad };
  enum Output : int { kGradWeight };

  explicit BlockLinearWgrad(int64_t num_blocks, bool shared = false)
      : num_blocks_(num_blocks), shared_(shared) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  int64_t num_blocks() const { return num_blocks_; }
  bool shared() const { return shared_; }

 private:
  int64_t num_blocks_;
  bool shared_;
};

OperatorPtr make_block_linear(int64_t num_blocks, bool shared = false);
void add_block_linear_cpu(KernelTable& table);
/// BlockLinear alone, by gemm_of_rows.
void add_block_linear_of_rows_cpu(KernelTable& table);
void add_block_linear_cuda(KernelTable& table);

}  // namespace tessera
