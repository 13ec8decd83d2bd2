#include <algorithm>

#include "ops/sparse_mixer/sparse_mixer.h"
#include "ops/sparse_mixer/sparse_mixer_token.h"

namespace tessera {
namespace {

SparseMixerToken rule_of(const SparseMixerSpec& spec, const Tensor& logits, const Tensor& idx) {
  return {.num_experts = static_cast<int>(logits.shape[1]),
          .top_k = static_cast<int>(idx.shape[1]),
          .threshold = static_cast<float>(2 * spec.jitter)};
}

/// The tokens with the experts that were given, or drawn ones, and how many each expert has.
void draw_tokens(const SparseMixerToken& rule, const Args<SparseMixer>& args) {
  using Op = SparseMixer;
  const Tensor& idx = args.in(Op::kExpertIdx);
  const auto* const logits = args.in(Op::kLogits).as<float>();
  const auto* const numbers = args.in(Op::kTokenNumbers).as<int64_t>();
  const auto* const noise = args.in(Op::kNoise).as<int32_t>();
  auto* const drawn = args.out(Op::kDrawnIdx).as<int32_t>();
  auto* const probs = args.out(Op::kProbs).as<float>();
  std::copy_n(idx.as<int32_t>(), idx.num_elements(), drawn);
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < idx.shape[0]; ++token) {
    const float* const own = logits + token * rule.num_experts;
    const int64_t at = token * rule.top_k;
    if (noise[kNoiseTraining] == 0 || drawn[at] < 0) {
      rule.find_probs(own, drawn + at, probs + at);
      continue;
    }
    rule.draw(own,
              {.key_low = static_cast<uint32_t>(noise[kNoiseKeyLow]),
               .key_high = static_cast<uint32_t>(noise[kNoiseKeyHigh]),
               .token = numbers[token]},
              drawn + at, probs + at);
  }
  const auto counts = args.out(Op::kCounts).span<float>();
  std::ranges::fill(counts, 0.0F);
  for (int64_t i = 0; i < idx.num_elements(); ++i) {
    if (drawn[i] >= 0) counts[drawn[i]] += 1.0F;
  }
}

void check_experts(const Tensor& idx, int64_t num_experts) {
  for (const int32_t expert : idx.span<int32_t>())
    ensure(expert < num_experts, "sparse_mixer: expert {} of {}", expert, num_experts);
}

void sparse_mixer(const SparseMixer& op, const Args<SparseMixer>& args) {
  using Op = SparseMixer;
  const Tensor& logits = args.in(Op::kLogits);
  const Tensor& idx = args.in(Op::kExpertIdx);
  const SparseMixerToken rule = rule_of(op.spec(), logits, idx);
  check_experts(idx, rule.num_experts);
  if (op.spec().samples) return draw_tokens(rule, args);
  auto* const probs = args.out(Op::kProbs).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < idx.shape[0]; ++token) {
    const int64_t at = token * rule.top_k;
    rule.find_probs(logits.as<float>() + token * rule.num_experts, idx.as<int32_t>() + at,
                    probs + at);
  }
}

void sparse_mixer_backward(const SparseMixerBackward& op, const Args<SparseMixerBackward>& args) {
  using Op = SparseMixerBackward;
  const Tensor& logits = args.in(Op::kLogits);
  const Tensor& idx = args.in(Op::kExpertIdx);
  const SparseMixerToken rule = rule_of(op.spec(), logits, idx);
  check_experts(idx, rule.num_experts);
  const auto* const grad = args.in(Op::kGrad).as<float>();
  auto* const grad_logits = args.out(Op::kGradLogits).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < idx.shape[0]; ++token) {
    const int64_t at = token * rule.top_k;
    rule.gradient(logits.as<float>() + token * rule.num_experts, idx.as<int32_t>() + at, grad + at,
                  grad_logits + token * rule.num_experts);
  }
}

}  // namespace

void add_sparse_mixer_cpu(KernelTable& table) {
  add_kernel<SparseMixer>(table, sparse_mixer);
  add_kernel<SparseMixerBackward>(table, sparse_mixer_backward);
}

}  // namespace tessera
