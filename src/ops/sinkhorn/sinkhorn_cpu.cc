#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/noise.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

/// One call.
struct Iteration {
  int64_t num_tokens;
  int64_t num_experts;
  const float* logits_TE;
  float* scores_TE;
  double* factors_E;
  double* partials;

  void start() const {
    std::fill_n(factors_E, num_experts, 1.0);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < num_tokens; ++t) {
      const float* const logits = logits_TE + t * num_experts;
      const float largest = *std::max_element(logits, logits + num_experts);
      for (int64_t e = 0; e < num_experts; ++e)
        scores_TE[t * num_experts + e] = std::exp(logits[e] - largest);
    }
  }

  /// A block's sums over its tokens of their scores times their factors.
  void sum_block(int64_t block) const {
    double* const sums = partials + block * num_experts;
    std::fill_n(sums, num_experts, 0.0);
    const int64_t end = std::min(num_tokens, (block + 1) * kSinkhornBlock);
    for (int64_t t = block * kSinkhornBlock; t < end; ++t) {
      const float* const scores = scores_TE + t * num_experts;
      double of_token = 0;
      for (int64_t e = 0; e < num_experts; ++e)
        of_token += factors_E[e] * static_cast<double>(scores[e]);
      const double factor = 1 / (static_cast<double>(num_tokens) * (of_token + kSinkhornEpsilon));
      for (int64_t e = 0; e < num_experts; ++e) sums[e] += factor * static_cast<double>(scores[e]);
    }
  }

  /// A step; returns how much the factors changed on average.
  double step() const {
    const int64_t num_blocks = sinkhorn_blocks(num_tokens);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < num_blocks; ++block) sum_block(block);
    const auto count = static_cast<double>(num_experts);
    double change = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      double sum = 0;
      for (int64_t block = 0; block < num_blocks; ++block) sum += partials[block * num_experts + e];
      const double factor = 1 / (count * (sum + kSinkhornEpsilon));
      change += std::abs(factor - factors_E[e]);
      factors_E[e] = factor;
    }
    return change / count;
  }
};

/// The best first.
void choose(const Iteration& iteration, int64_t token, int64_t top_k, int32_t* expert_idx) {
  const float* const scores = iteration.scores_TE + token * iteration.num_experts;
  const auto key = [&](int32_t e) {
    const double value = iteration.factors_E[e] * static_cast<double>(scores[e]);
    return std::isnan(value) ? -std::numeric_limits<double>::infinity() : value;
  };
  int64_t size = 0;
  for (int32_t e = 0; e < iteration.num_experts; ++e) {
    int64_t at = size;
    while (at > 0 && key(e) > key(expert_idx[at - 1])) --at;
    if (at == top_k) continue;
    size = std::min(size + 1, top_k);
    for (int64_t i = size - 1; i > at; --i) expert_idx[i] = expert_idx[i - 1];
    expert_idx[at] = e;
  }
}

void sinkhorn(const Sinkhorn& op, const Args<Sinkhorn>& args) {
  const Tensor& logits = args.in(Sinkhorn::kLogits);
  const IndexRange& own = op.spec().tokens;
  const int64_t top_k = op.spec().top_k;
  auto* const expert_idx = args.out(Sinkhorn::kExpertIdx).as<int32_t>();
  if (args.in(Sinkhorn::kNoise).as<int32_t>()[kNoiseTraining] == 0) {
    std::fill_n(expert_idx, own.count * top_k, -1);
    return;
  }
  const SinkhornWorkspace layout(logits.shape);
  const Iteration iteration{.num_tokens = logits.shape[0],
                            .num_experts = logits.shape[1],
                            .logits_TE = logits.as<float>(),
                            .scores_TE = workspace_part<float>(args.workspace, layout.scores),
                            .factors_E = workspace_part<double>(args.workspace, layout.factors),
                            .partials = workspace_part<double>(args.workspace, layout.partials)};
  iteration.start();
  for (int step = 0; step < kSinkhornSteps; ++step) {
    if (iteration.step() <= kSinkhornTolerance) break;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < own.count; ++i)
    choose(iteration, own.begin + i, top_k, expert_idx + i * top_k);
}

int64_t sinkhorn_workspace(const Sinkhorn& /*op*/, std::span<const ValueType> inputs) {
  return SinkhornWorkspace(inputs[Sinkhorn::kLogits].shape).num_bytes;
}

}  // namespace

void add_sinkhorn_cpu(KernelTable& table) {
  add_kernel<Sinkhorn>(table, sinkhorn, {.workspace = sinkhorn_workspace});
}

}  // namespace tessera
