#include "ops/expert_scale/expert_scale.h"

#include <algorithm>

namespace tessera {
namespace {

/// The choices of all tokens.
struct Choices {
  const float* probs;
  const int32_t* experts;
  std::span<const float> scale;
  int64_t count;

  template <typename Op>
  Choices(const Op& op, const Args<Op>& args)
      : probs(args.in(Op::kProbs).template as<float>()),
        experts(args.in(Op::kExpertIdx).template as<int32_t>()),
        scale(args.in(Op::kScale).template span<float>()),
        count(args.in(Op::kProbs).num_elements()) {
    int32_t last = -1;
#pragma omp parallel for schedule(static) reduction(max : last)
    for (int64_t i = 0; i < count; ++i) last = std::max(last, experts[i]);
    ensure(last < std::ssize(scale), "{}: expert {} of {}", op.name(), last, scale.size());
  }
  float factor(int64_t i) const {
    return experts[i] < 0 ? 1.0F : scale[experts[i]];
  }
};

void expert_scale(const ExpertScale& op, const Args<ExpertScale>& args) {
  const Choices choices(op, args);
  auto* const scaled = args.out(ExpertScale::kScaled).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < choices.count; ++i) scaled[i] = choices.probs[i] * choices.factor(i);
}

void expert_scale_backward(const ExpertScaleBackward& op, const Args<ExpertScaleBackward>& args) {
  using Op = ExpertScaleBackward;
  const Choices choices(op, args);
  const auto* const grad = args.in(Op::kGrad).as<float>();
  auto* const grad_probs = args.out(Op::kGradProbs).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < choices.count; ++i) grad_probs[i] = grad[i] * choices.factor(i);
  if (!args.out(Op::kGradScale)) return;
  std::vector<double> sums(choices.scale.size());
  for (int64_t i = 0; i < choices.count; ++i) {
    if (choices.experts[i] >= 0) sums[choices.experts[i]] += double{grad[i]} * choices.probs[i];
  }
  auto* const grad_scale = args.out(Op::kGradScale).as<float>();
  for (size_t e = 0; e < sums.size(); ++e) grad_scale[e] += static_cast<float>(sums[e]);
}

}  // namespace

void add_expert_scale_cpu(KernelTable& table) {
  add_kernel<ExpertScale>(table, expert_scale);
  add_kernel<ExpertScaleBackward>(table, expert_scale_backward);
}

}  // namespace tessera
