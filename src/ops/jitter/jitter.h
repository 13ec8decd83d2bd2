#pragma once

#include "ops/noise.h"
#include "ops/operator.h"

namespace tessera {

/// Multiplies each element by a random factor of its own, uniform in [1 - eps, 1 + eps): the noise
/// on what routers read (Switch Transformers: Fedus et al., 2021, section 2.2):
///   (x A [T, H], token_numbers I64 [T], noise I32 [NoiseWord]) -> A [T, H]
///
/// A factor is a pure function of the key in `noise`, the token's number and the column, so that
/// however tokens are spread over ranks, and however often it is computed, it is the same. With an
/// eps of 0 every factor is 1 and x keeps its bits. Computed in F32 and rounded once. The gradient
/// is that of the result, multiplied by the same factors.
class Jitter final : public Operator {
 public:
  static constexpr std::string_view kName = "jitter";
  enum Input : int { kX, kTokenNumbers, kNoise };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_jitter();
void add_jitter_cpu(KernelTable& table);
void add_jitter_cuda(KernelTable& table);

}  // namespace tessera
