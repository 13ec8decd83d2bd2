#pragma once

#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace tessera {

/// FC1 and the activation of its result (GroupedMatmul on side kOut, then ExpertActivation):
///   (a, weight, offsets, [source_R, row_of_TK with the product's gather], [probs_R], offsets)
///   -> (act A [R, max F_e], [pre A [R, W]])
/// with the bits of the two. It stands in programs that are not differentiated any more
/// (program/fusion/fuse_producers.h).
class ActivatedProduct final : public Operator {
 public:
  static constexpr std::string_view kName = "activated_product";
  enum Input : int { kA, kWeight, kOffsets, kSource, kRowOf, kProbs, kActivationOffsets };
  enum Output : int { kAct, kPre };

  /// Throws UserError where the product's columns are not those that the activation takes.
  ActivatedProduct(const GroupedMatmul& product, const ExpertActivation& activation,
                   bool keeps_pre);

  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kA, kWeight, kOffsets, kActivationOffsets}
        .add(kSource, product_.gather())
        .add(kRowOf, product_.gather())
        .add(kProbs, activation_.apply_prob());
  }
  OperandSet<Output> output_set() const { return OperandSet<Output>{kAct}.add(kPre, keeps_pre_); }
  const GroupedMatmul& product() const { return product_; }
  const ExpertActivation& activation() const { return activation_; }
  bool keeps_pre() const { return keeps_pre_; }
  /// The first inputs are the product's, the others the activation's behind the pre-activation.
  int num_product_inputs() const {
    return product_.gather() ? GroupedMatmul::kRowOf + 1 : GroupedMatmul::kOffsets + 1;
  }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  GroupedMatmul product_;
  ExpertActivation activation_;
  bool keeps_pre_;
};

/// The gradient of FC2's input and that of the activation before it (GroupedMatmul on side kOut,
/// then ExpertActivationBackward), and the activation itself once more where the weight's gradient
/// wants it and it was not kept:
///   (grad A [R, H], weight [Σ F_e, H], offsets, pre A [R, W], [probs_R F32 [R]], offsets)
///   -> (dpre A [R, W], [dprobs_R F32 [R]], [act A [R, max F_e]])
/// with the bits of those, but for dprobs' order of summation.
class ActivationGradProduct final : public Operator, public GivesMore {
 public:
  static constexpr std::string_view kName = "activation_grad_product";
  enum Input : int { kGrad, kWeight, kOffsets, kPre, kProbs, kActivationOffsets };
  enum Output : int { kGradPre, kGradProbs, kAct };

  ActivationGradProduct(const GroupedMatmul& product, const ExpertActivation& activation,
                        bool gives_act = false);

  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kGrad, kWeight, kOffsets, kPre, kActivationOffsets}.add(
        kProbs, activation_.apply_prob());
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kGradPre}
        .add(kGradProbs, activation_.apply_prob())
        .add(kAct, gives_act_);
  }
  const GroupedMatmul& product() const { return product_; }
  const ExpertActivation& activation() const { return activation_; }
  bool gives_act() const { return gives_act_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  OperatorPtr giving_also(std::span<const ValueId> inputs, const Operator& other,
                          std::span<const ValueId> other_inputs) const override;

 private:
  GroupedMatmul product_;
  ExpertActivation activation_;
  bool gives_act_;
};

/// The steps of which the operators above consist, one after the other, by the kernels of a back
/// end: what the host does, and a GPU where no kernel does both. `workspace` holds what lies
/// between them, and the scratch memory that the product's kernel asks for.
void run_activated_product(const ActivatedProduct& op, const Args<ActivatedProduct>& args,
                           const KernelTable& kernels);
void run_activation_grad_product(const ActivationGradProduct& op,
                                 const Args<ActivationGradProduct>& args,
                                 const KernelTable& kernels);
int64_t activated_product_bytes(const ActivatedProduct& op, std::span<const ValueType> inputs,
                                int64_t product_bytes);
int64_t activation_grad_product_bytes(const ActivationGradProduct& op,
                                      std::span<const ValueType> inputs, int64_t product_bytes);

void add_activated_product_cpu(KernelTable& table);
void add_activated_product_cuda(KernelTable& table);

}  // namespace tessera
