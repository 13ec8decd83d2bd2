#include <algorithm>

#include "ops/top_p/top_p.h"
#include "ops/top_p/top_p_token.h"

namespace tessera {
namespace {

TopPToken rule_of(const TopPSpec& spec, const Tensor& choices) {
  return {.top_k = static_cast<int>(choices.shape[1]),
          .share = static_cast<float>(spec.share),
          .normalize = spec.normalize,
          .scale = static_cast<float>(spec.scaling_factor)};
}

void top_p(const TopP& op, const Args<TopP>& args) {
  using Op = TopP;
  const Tensor& choices = args.in(Op::kExpertIdx);
  const TopPToken rule = rule_of(op.spec(), choices);
  const auto* const probs = args.in(Op::kProbs).as<float>();
  const auto* const experts = choices.as<int32_t>();
  auto* const kept_probs = args.out(Op::kKeptProbs).as<float>();
  auto* const kept = args.out(Op::kKeptIdx).as<int32_t>();
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < choices.shape[0]; ++token) {
    const int64_t at = token * rule.top_k;
    rule.keep(probs + at, experts + at, kept_probs + at, kept + at);
  }
  const auto counts = args.out(Op::kCounts).span<float>();
  std::ranges::fill(counts, 0.0F);
  for (int64_t i = 0; i < choices.num_elements(); ++i) {
    ensure(kept[i] < std::ssize(counts), "top_p: expert {} of {}", kept[i], counts.size());
    if (kept[i] >= 0) counts[kept[i]] += 1.0F;
  }
}

void top_p_backward(const TopPBackward& op, const Args<TopPBackward>& args) {
  using Op = TopPBackward;
  const Tensor& choices = args.in(Op::kKeptIdx);
  const TopPToken rule = rule_of(op.spec(), choices);
  const auto* const probs = args.in(Op::kProbs).as<float>();
  const auto* const kept = choices.as<int32_t>();
  const auto* const grad = args.in(Op::kGrad).as<float>();
  auto* const grad_probs = args.out(Op::kGradProbs).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < choices.shape[0]; ++token) {
    const int64_t at = token * rule.top_k;
    rule.gradient(probs + at, kept + at, grad + at, grad_probs + at);
  }
}

}  // namespace

void add_top_p_cpu(KernelTable& table) {
  add_kernel<TopP>(table, top_p);
  add_kernel<TopPBackward>(table, top_p_backward);
}

}  // namespace tessera
