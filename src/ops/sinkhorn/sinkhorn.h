#pragma once

#include <string>

#include "core/slice.h"
#include "ops/operator.h"
#include "ops/sinkhorn/sinkhorn_rule.h"

namespace tessera {

struct SinkhornSpec {
  int64_t top_k = 1;
  /// The input rows that are this rank's own tokens.
  IndexRange tokens = {};
};

/// Chooses experts so that all get about as many tokens, by Sinkhorn's iteration (BASE layers:
/// Lewis et al., 2021, approximately; S-BASE: Clark et al., 2022, section 3.1, as Megatron-Core
/// routes by it):
///   (logits F32 [T, E], noise I32 [NoiseWord]) -> expert_idx I32 [tokens, K]
/// exp(logits) gets a factor for each token and one for each expert, until tokens sum to 1 / T and
/// experts to 1 / E. A token takes the K experts that are largest then, best first; of equal ones
/// the lower comes first, and NaN ranks with minus infinity. The rows are all the tokens among
/// which loads are evened out, those of other ranks too. Where the noise says that this is no
/// training (kNoiseTraining), every index is -1: the router is to choose by itself, as its
/// kReplayed has it. Sums are F64 and in one order. No gradient; never recomputed.
class Sinkhorn final : public Operator {
 public:
  static constexpr std::string_view kName = "sinkhorn";
  enum Input : int { kLogits, kNoise };
  enum Output : int { kExpertIdx };

  /// Throws UserError for a top_k below 1.
  explicit Sinkhorn(const SinkhornSpec& spec);
  const SinkhornSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  SinkhornSpec spec_;
};

/// Where the parts of a kernel's scratch memory start, in bytes.
struct SinkhornWorkspace {
  int64_t scores = 0;    ///< f32 [T, E], exp(logits) of each token divided by the largest
  int64_t factors = 0;   ///< f64 [E]
  int64_t partials = 0;  ///< f64 [blocks, E]
  int64_t done = 0;      ///< i32 [1]
  int64_t num_bytes = 0;

  explicit SinkhornWorkspace(const Shape& logits);
};

OperatorPtr make_sinkhorn(const SinkhornSpec& spec);
void add_sinkhorn_cpu(KernelTable& table);
/// Up to 1024 experts.
void add_sinkhorn_cuda(KernelTable& table);

}  // namespace tessera
