#pragma once

#include <optional>

#include "ops/operator.h"

namespace tessera {

/// The type of a bias of the logits that a weight [V, H] gives: F32 [V].
inline ValueType head_bias_type(const ValueType& weight) {
  return {.dtype = DType::kF32, .shape = {weight.shape[0]}};
}

/// How many threads share out the fused operator's work on the CPU: blocks of the vocabulary, each
/// computed by one thread, in place of products that all threads compute together and wait for.
struct CrossEntropyParts {
  int64_t chunk_tokens = 1024;
  int64_t block_vocab = 512;
  int64_t num_parts = 32;  ///< of the vocabulary, each with a sum of its own for dx

  bool operator==(const CrossEntropyParts&) const = default;
};

/// The head's product fused with softmax cross-entropy. Logits exist for one chunk of tokens at a
/// time, in the kernel's workspace, in F32, cut into blocks of the vocabulary that stay in cache
/// between the product and the softmax. Neither number changes what is computed, beyond rounding.
struct CrossEntropySpec {
  int64_t chunk_tokens = 512;
  int64_t block_vocab = default_block_vocab();
  std::optional<CrossEntropyParts> parts = default_parts();  ///< of the fused operator
  /// c: logits become c · tanh(logit / c), as Gemma caps them; 0: they stay.
  float softcap = 0;
  bool weighted = false;  ///< each token's loss counts by a weight, kTokenWeights
  bool biased = false;    ///< logits have a bias F32 [V], the last input
  bool frozen = false;    ///< nobody wants dweight, which is then bound to nothing; for costs alone

  /// 512, or 4096 on a CPU with tile registers, whose products of smaller blocks end too soon.
  static int64_t default_block_vocab();
  /// None with fewer than 8 threads, which lose little time by waiting for each other.
  static std::optional<CrossEntropyParts> default_parts();
};

/// The label of a token that has none: it adds nothing to the loss and gets no gradient.
inline constexpr int32_t kIgnoredLabel = -100;

/// The first inputs of every operator with the head's product.
struct HeadOperands {
  enum Input : int { kX, kWeight, kLabels };
};

/// What the three operators have in common.
class CrossEntropyOperator : public Operator {
 public:
  /// The first inputs of all three.
  enum Input : int { kX = HeadOperands::kX, kWeight, kLabels, kScale };

  /// Throws UserError where a size is below 1.
  explicit CrossEntropyOperator(const CrossEntropySpec& spec);
  std::string attributes() const override;
  const CrossEntropySpec& spec() const { return spec_; }

 protected:
  /// Checks x A [T, H], weight A [V, H], labels I32 [T] and scale F32 [1], the first four inputs,
  /// and those that `num_inputs` does not count: behind them token weights and bias, where the
  /// specification has these.
  void check_inputs(std::span<const ValueType> inputs, size_t num_inputs) const;
  /// `num_products` products of T·H·V multiply-adds, and the bytes of all inputs and outputs.
  Cost product_cost(int num_products, std::span<const ValueType> inputs,
                    std::span<const ValueType> outputs) const;

 private:
  CrossEntropySpec spec_;
};

/// (x A [T, H], weight A [V, H], labels I32 [T], scale F32 [1]) -> (loss F32 [1], token_loss F32
/// [T], lse F32 [T]). logits = x · weightᵀ + bias, capped (CrossEntropySpec::softcap); lse = log Σ
/// exp(logits); token_loss = lse - logits[label], 0 where the label is kIgnoredLabel; loss = scale
/// · Σ token_loss, summed in double from the first token to the last. The kernel throws UserError
/// for any other label outside [0, V). A gradient can reach the loss only.
///
/// Of biased ones (CrossEntropySpec) the last input is the bias F32 [V], of all three operators;
/// its gradient is another accumulator.
///
/// Of weighted ones (CrossEntropySpec) there is an input token_weights F32 [T], of any sign, and
/// loss = scale · Σ token_weight · token_loss; token_loss is the same. With weights that do not
/// depend on the model's own, the gradient is that of a policy: -Σ token_weight · ∇ log p(label).
class LinearCrossEntropy final : public CrossEntropyOperator {
 public:
  static constexpr std::string_view kName = "linear_cross_entropy";
  enum Input : int { kX, kWeight, kLabels, kScale, kTokenWeights, kBias };
  enum Output : int { kLoss, kTokenLoss, kLse };
  using CrossEntropyOperator::CrossEntropyOperator;
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kWeight, kLabels, kScale}
        .add(kTokenWeights, spec().weighted)
        .add(kBias, spec().biased);
  }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x, weight, labels, scale, lse F32 [T], grad_loss F32 [1], [token_weights]) -> (dx A [T, H],
/// dweight F32 [V, H] added to). The logits are computed again; their gradients are rounded to A
/// for the two products.
class LinearCrossEntropyBackward final : public CrossEntropyOperator {
 public:
  static constexpr std::string_view kName = "linear_cross_entropy_backward";
  enum Input : int { kX, kWeight, kLabels, kScale, kForwardLse, kGradLoss, kTokenWeights, kBias };
  enum Output : int { kGradX, kGradWeight, kGradBias };
  using CrossEntropyOperator::CrossEntropyOperator;
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kWeight, kLabels, kScale, kForwardLse, kGradLoss}
        .add(kTokenWeights, spec().weighted)
        .add(kBias, spec().biased);
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kGradX, kGradWeight}.add(kGradBias, spec().biased);
  }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output >= kGradWeight; }
};

/// (x, weight, labels, scale, [token_weights]) -> (loss F32 [1], token_loss F32 [T], dx A [T, H],
/// dweight F32 [V, H] added to): the loss and its gradients in one run of three products instead of
/// four. Loss and token_loss are bitwise those of LinearCrossEntropy, its executable specification;
/// the gradients agree to rounding.
class LinearCrossEntropyFused final : public CrossEntropyOperator {
 public:
  static constexpr std::string_view kName = "linear_cross_entropy_fused";
  enum Input : int { kX, kWeight, kLabels, kScale, kTokenWeights, kBias };
  enum Output : int { kLoss, kTokenLoss, kGradX, kGradWeight, kGradBias };
  using CrossEntropyOperator::CrossEntropyOperator;
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kWeight, kLabels, kScale}
        .add(kTokenWeights, spec().weighted)
        .add(kBias, spec().biased);
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kLoss, kTokenLoss, kGradX, kGradWeight}.add(kGradBias, spec().biased);
  }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  /// dx is the gradient already: the gradient that reaches the loss must be 1.
  void differentiate(GradientBuilder& builder) const override;
  bool accumulates(int output) const override { return output >= kGradWeight; }
  bool recomputable() const override { return false; }
};

OperatorPtr make_linear_cross_entropy(const CrossEntropySpec& spec = {});
OperatorPtr make_linear_cross_entropy_fused(const CrossEntropySpec& spec = {});

/// The kernels of these and of vocab_lse.h.
void add_linear_cross_entropy_cpu(KernelTable& table);
/// On a GPU a label outside the vocabulary gives a NaN loss and gradient: kernels there cannot
/// throw.
void add_linear_cross_entropy_cuda(KernelTable& table);

}  // namespace tessera
