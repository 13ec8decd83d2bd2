#pragma once

#include "ops/activation_kind.h"
#include "ops/expert_sizes.h"
#include "ops/joins_producer.h"
#include "ops/quantize/gives_quantized.h"
#include "ops/reads_scaled_rows.h"

namespace tessera {

struct ExpertActivationSpec {
  ActivationFunction function = Activation::kSwiGLU;
  /// F_e: the inner size of each expert.
  std::vector<int64_t> expert_sizes;
  /// Multiply by the routed row's probability, before FC2 instead of after it: then the gradient of
  /// the probability needs only the pre-activation, which is kept anyway, and the experts' outputs
  /// need not be kept (Megatron-Core's memory-efficient permutation).
  bool apply_prob = false;
};

/// The nonlinearity of routed rows, between an expert's two matrices:
///   (pre A [R, W], [probs_R F32 [R] with apply_prob], offsets I64 [E + 1]) -> act A [R, max F_e]
/// Rows offsets[e] to offsets[e + 1] belong to expert e. Gated, a row of pre holds the gate in
/// columns [0, F_e) and the other factor in [F_e, 2 F_e), W is 2 max F_e; else W is max F_e.
/// Columns of an expert's rows beyond its own size are undefined, in inputs, results and gradients
/// alike. With `gives_fp8` it also gives act as Quantize rounds it, act_fp8 E4M3 with scales of
/// 1 × 128; experts are of one size then, a multiple of 128.
class ExpertActivation final : public Operator, public JoinsProducer, public GivesQuantized {
 public:
  static constexpr std::string_view kName = "expert_activation";
  enum Input : int { kPre, kProbs, kOffsets };
  enum Output : int { kAct, kActFp8 };

  /// Throws UserError for experts without size.
  explicit ExpertActivation(const ExpertActivationSpec& spec);

  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kPre, kOffsets}.add(kProbs, apply_prob_);
  }
  const ActivationFunction& function() const { return function_; }
  const ExpertSizes& sizes() const { return sizes_; }
  bool apply_prob() const { return apply_prob_; }
  bool gives_fp8() const { return gives_fp8_; }
  /// Whether rows can be cut into parts of 128 columns, whatever their expert.
  bool has_short_blocks() const;
  /// Columns of the pre-activation.
  int64_t pre_width() const { return (is_gated(function_.kind) ? 2 : 1) * sizes_.largest(); }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  /// ActivatedProduct (activated_product.h).
  OperatorPtr joined_with(const Neighbours& nodes, bool keeps_product) const override;
  OperatorPtr giving_quantized(int output, const Quantize& quantize) const override;

 private:
  ActivationFunction function_;
  ExpertSizes sizes_;
  bool apply_prob_;
  bool gives_fp8_ = false;
};

/// (grad A [R, max F_e], pre, [probs_R], offsets) -> (dpre A [R, W], [dprobs_R F32 [R]],
/// [act A [R, max F_e]]): with `gives_act` also the forward result, which a backward pass that has
/// not kept it would read the same inputs for, or with `gives_fp8` dpre_fp8, dpre as
/// ExpertActivation gives act. Pre may be E4M3 with scales of its rows, of which columns beyond an
/// expert's size are a part, so these must be defined then.
class ExpertActivationBackward final : public Operator,
                                       public JoinsProducer,
                                       public GivesMore,
                                       public GivesQuantized,
                                       public ReadsScaledRows {
 public:
  static constexpr std::string_view kName = "expert_activation_backward";
  enum Input : int { kGrad, kPre, kProbs, kOffsets };
  enum Output : int { kGradPre, kGradProbs, kAct, kGradPreFp8 };

  explicit ExpertActivationBackward(const ExpertActivation& forward, bool gives_act = false,
                                    RowFormat pre_format = RowFormat::kValues,
                                    bool gives_fp8 = false)
      : forward_(forward), gives_act_(gives_act), gives_fp8_(gives_fp8), pre_format_(pre_format) {}
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kGrad, kPre, kOffsets}.add(kProbs, forward_.apply_prob());
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kGradPre}
        .add(kGradProbs, forward_.apply_prob())
        .add(kAct, gives_act_)
        .add(kGradPreFp8, gives_fp8_);
  }
  const ExpertActivation& forward() const { return forward_; }
  bool gives_act() const { return gives_act_; }
  bool gives_fp8() const { return gives_fp8_; }
  RowFormat pre_format() const { return pre_format_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  /// ActivationGradProduct (activated_product.h), of pre-activations in values.
  OperatorPtr joined_with(const Neighbours& nodes, bool keeps_product) const override;
  /// The activation of the same pre-activations.
  OperatorPtr giving_also(std::span<const ValueId> inputs, const Operator& other,
                          std::span<const ValueId> other_inputs) const override;
  OperatorPtr reading_scaled_rows(int input) const override;
  OperatorPtr giving_quantized(int output, const Quantize& quantize) const override;

 private:
  ExpertActivation forward_;
  bool gives_act_;
  bool gives_fp8_;
  RowFormat pre_format_;
};

OperatorPtr make_expert_activation(const ExpertActivationSpec& spec);

void add_expert_activation_cpu(KernelTable& table);
void add_expert_activation_cuda(KernelTable& table);

}  // namespace tessera
