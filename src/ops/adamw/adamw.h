#pragma once

#include "ops/adamw/adamw_factors.h"
#include "ops/adamw/state_formats.h"
#include "ops/operator.h"

namespace tessera {

struct AdamWSpec {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  /// Whether the weight is BF16; an F32 one is its own master.
  bool bf16_weight = false;
  /// Whether the gradients are BF16.
  bool bf16_grad = false;
  StateFormats formats = {};

  /// What is kept beside a BF16 weight.
  MasterKind master() const { return bf16_weight ? formats.master : MasterKind::kNone; }
};

// clang-format off
/// One step of Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019),
/// element by element over N flat slices, in the order of operations of torch.optim.AdamW:
///   g = grad · scale
///   p = p · (1 - lr · weight_decay)
///   m = m + (1 - beta1) · (g - m)
///   v = beta2 · v + (1 - beta2) · g²
///   p = p - lr / bias1 · m / (sqrt(v) / sqrt(bias2) + eps)
/// Inputs: of each slice grad F32, or BF16, [n]; then factors F32 [8], an AdamWFactors, and grad_scale F32 [2] = {scale, found_inf},
/// an AdamWGradScale, both in the device's memory; where found_inf is not 0 nothing changes. Outputs, updated in place,
/// slice by slice: what a BF16 weight has beside it, if anything (F32 master [n], or U16 or U8 remainder [n]), or else the
/// weight F32 or BF16 [n]; m [n] and v [n], of moment_dtype; and where something is beside it, the weight BF16 [n].
/// Where a moment has scales, all of a slice is [rows, columns] in place of [n], and last come the scales of m, then of v,
/// of those that have some: U8 [rows, count_moment_blocks(columns)].
/// What is kept in fewer bits is rounded as state_rounding.h and moment_code.h say.
// clang-format on
class AdamW final : public Operator {
 public:
  static constexpr std::string_view kName = "adamw";

  /// Throws UserError where a rate is out of range.
  explicit AdamW(const AdamWSpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  bool recomputable() const override { return false; }
  const AdamWSpec& spec() const { return spec_; }
  /// Inputs behind the gradients, counted from the first.
  enum Trailing : int { kFactors, kGradScale, kNumTrailing };
  /// Outputs of one slice, in this order; kWeight is there beside a master or remainder alone.
  enum Output : int { kMaster, kFirstMoment, kSecondMoment, kWeight };
  bool has_weight() const { return spec_.master() != MasterKind::kNone; }
  /// Places of the scales, where there are some; behind the last, the number of outputs.
  int first_scales() const { return has_weight() ? 4 : 3; }
  int second_scales() const {
    return first_scales() + (has_scales(spec_.formats.first_moment) ? 1 : 0);
  }
  size_t num_outputs() const {
    return second_scales() + (has_scales(spec_.formats.second_moment) ? 1 : 0);
  }

 private:
  DType master_type() const;
  std::vector<ValueType> outputs_of(const ValueType& grad) const;

  AdamWSpec spec_;
};

OperatorPtr make_adamw(const AdamWSpec& spec);

/// The operator's input `factors` for update number `update`, counted from 1. The rate and
/// bias = 1 - beta^update are rounded to floats first.
AdamWFactors make_adamw_factors(const AdamWSpec& spec, double lr, int64_t update);

/// The operator's inputs behind the gradients, as tensors of this memory.
Tensor view_of(AdamWFactors& factors);
Tensor view_of(AdamWGradScale& grad_scale);

void add_adamw_cpu(KernelTable& table);
void add_adamw_cuda(KernelTable& table);

}  // namespace tessera
