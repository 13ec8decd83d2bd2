#pragma once

#include "ops/operator.h"

namespace tessera {

/// Groups of a gated group norm.
struct GroupNormSpec {
  int64_t num_groups = 1;
  double eps = 1e-5;
};

/// y = RMSNorm(x · SiLU(z)) · weight, each of G groups of neighbouring elements by itself: the norm
/// behind a Mamba-2 mixer (Transformers are SSMs: Dao and Gu, 2024, section 7.1), whose gate comes
/// before it. (x A [T,C], z A [T,C], weight F32 [C]) -> y A [T,C].
class GatedGroupNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "gated_group_norm";
  enum Input : int { kX, kZ, kWeight };
  enum Output : int { kY };

  /// Throws UserError unless there is a group and eps >= 0.
  explicit GatedGroupNorm(const GroupNormSpec& spec);
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const GroupNormSpec& spec() const { return spec_; }

 private:
  GroupNormSpec spec_;
};

/// (x, z, weight, grad of y A [T,C]) -> (grads of x and z A [T,C], grad of weight F32 [C],
/// accumulated in a fixed order). Statistics are computed again.
class GatedGroupNormBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "gated_group_norm_backward";
  enum Input : int { kX, kZ, kWeight, kGrad };
  enum Output : int { kGradX, kGradZ, kGradWeight };

  explicit GatedGroupNormBackward(const GroupNormSpec& spec) : spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
  const GroupNormSpec& spec() const { return spec_; }

 private:
  GroupNormSpec spec_;
};

OperatorPtr make_gated_group_norm(const GroupNormSpec& spec);
void add_gated_group_norm_cpu(KernelTable& table);
void add_gated_group_norm_cuda(KernelTable& table);

}  // namespace tessera
