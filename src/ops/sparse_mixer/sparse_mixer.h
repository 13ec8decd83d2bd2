#pragma once

#include <string>

#include "ops/noise.h"
#include "ops/operator.h"

namespace tessera {

struct SparseMixerSpec {
  double jitter = 0.01;  ///< eps, above 0
  /// In training, experts are drawn instead of taken in the order of their logits.
  bool samples = false;
};

/// The probabilities of a token's experts by SparseMixer-v2 (GRIN: Liu et al., 2024, section 2.1,
/// as transformers' phimoe has it):
///   (logits F32 [T, E], expert_idx I32 [T, K], [token_numbers I64 [T], noise I32 [NoiseWord]]) ->
///   probs F32 [T, K], [drawn_idx I32 [T, K], counts F32 [E]]
/// The choices of a token are made one after the other among those experts that are left. With m
/// the largest of their logits, an expert of logit l counts where (m - l) / max(|l|, m) <= 2 · eps;
/// the probability is the chosen one's of a softmax over those, and 0 where it is none of them. A
/// token whose first expert is below 0 has probabilities of 0 and no gradient.
///
/// With SparseMixerSpec::samples, and where the noise says that this is training (kNoiseTraining),
/// each choice is drawn with these probabilities, which then are 0.3333 of themselves unless the
/// expert is the best or, once in four times, by chance (Heun's third-order method). Random numbers
/// are a pure function of the noise's key, the token's number, the expert and the choice's number.
/// Elsewhere drawn_idx are those given. counts says how many tokens each expert has.
///
/// The gradient that reaches logits is that of the softmaxes: of a choice with probability p_c by
/// the logit of expert e, p_c · ([e is c] - p_e). It takes no part in factors of 0.3333, so that it
/// is what the sampled one estimates; choices and which experts count are constants to it. Never
/// recomputed.
class SparseMixer final : public Operator {
 public:
  static constexpr std::string_view kName = "sparse_mixer";
  enum Input : int { kLogits, kExpertIdx, kTokenNumbers, kNoise };
  enum Output : int { kProbs, kDrawnIdx, kCounts };

  /// Throws UserError unless the jitter is above 0 and finite.
  explicit SparseMixer(const SparseMixerSpec& spec);
  const SparseMixerSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  bool recomputable() const override { return false; }

 private:
  SparseMixerSpec spec_;
};

/// (logits F32 [T, E], the drawn or given expert_idx I32 [T, K], grad of probs F32 [T, K]) ->
/// dlogits F32 [T, E].
class SparseMixerBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "sparse_mixer_backward";
  enum Input : int { kLogits, kExpertIdx, kGrad };
  enum Output : int { kGradLogits };

  explicit SparseMixerBackward(const SparseMixerSpec& spec) : spec_(spec) {}
  const SparseMixerSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return fmt::format("eps={}", spec_.jitter); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  SparseMixerSpec spec_;
};

OperatorPtr make_sparse_mixer(const SparseMixerSpec& spec);
void add_sparse_mixer_cpu(KernelTable& table);
void add_sparse_mixer_cuda(KernelTable& table);

}  // namespace tessera
