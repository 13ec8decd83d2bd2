#include <algorithm>

#include "ops/balance/balance.h"
#include "ops/balance/balance_workspace.h"
#include "ops/cpu_dispatch.h"
#include "ops/router/router_balance.h"
#include "ops/router/router_scores.h"

namespace tessera {
namespace {

/// Experts whose sums one thread takes: neighbours share a cache line of doubles.
constexpr int64_t kExpertsAtOnce = 8;

void check_segments(std::span<const int32_t> segments, int64_t num_segments) {
  const auto bad = std::ranges::find_if(
      segments, [&](int32_t segment) { return segment < -1 || segment >= num_segments; });
  ensure(bad == segments.end(), "balance_statistics: segment {} is not among the {}", *bad,
         num_segments);
}

void count_by_segment(const Tensor& expert_idx, std::span<const int32_t> segments,
                      const Tensor& counts) {
  const int64_t top_k = expert_idx.shape[1];
  const int64_t num_experts = counts.shape[1];
  const auto* idx = expert_idx.as<int32_t>();
  auto* count = counts.as<float>();
  std::fill_n(count, counts.num_elements(), 0.0F);
  for (int64_t i = 0; i < expert_idx.num_elements(); ++i) {
    ensure(idx[i] >= -1 && idx[i] < num_experts, "balance_statistics: expert {} of {}", idx[i],
           num_experts);
    const int64_t segment = segments[i / top_k];
    if (idx[i] >= 0 && segment >= 0) count[segment * num_experts + idx[i]] += 1.0F;
  }
}

/// sums[g] += shares[t] over the tokens t of each segment g, in order of t, for some experts.
void sum_shares(const float* shares_TE, std::span<const int32_t> segments, int64_t num_experts,
                int64_t first_expert, double* sums_GE) {
  const int64_t last_expert = std::min(first_expert + kExpertsAtOnce, num_experts);
  for (size_t t = 0; t < segments.size(); ++t) {
    if (segments[t] < 0) continue;
    const float* shares = shares_TE + static_cast<int64_t>(t) * num_experts;
    double* sums = sums_GE + segments[t] * num_experts;
    for (int64_t e = first_expert; e < last_expert; ++e) sums[e] += static_cast<double>(shares[e]);
  }
}

void balance_statistics(const BalanceStatistics& op, const Args<BalanceStatistics>& args) {
  using Op = BalanceStatistics;
  const auto& spec = op.spec();
  const float* logits = args.in(Op::kLogits).as<float>();
  const int64_t num_tokens = args.in(Op::kLogits).shape[0];
  const int64_t num_experts = spec.num_experts;
  const auto segments = args.in(Op::kSegments).span<int32_t>();
  check_segments(segments, spec.num_segments);
  count_by_segment(args.in(Op::kExpertIdx), segments, args.out(BalanceStatistics::kCounts));

  const StatisticsWorkspace layout(num_tokens, spec);
  auto* shares = workspace_part<float>(args.workspace, layout.shares);
  auto* sums = workspace_part<double>(args.workspace, layout.sums);
  std::fill_n(sums, spec.num_segments * num_experts, 0.0);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    balance_shares(spec.score, logits + t * num_experts, num_experts, shares + t * num_experts);
  }
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < num_experts; first += kExpertsAtOnce) {
    sum_shares(shares, segments, num_experts, first, sums);
  }
  const auto result = args.out(BalanceStatistics::kScoreSums).span<float>();
  std::copy_n(sums, result.size(), result.begin());
}

/// The gradient of Σ_e w_e·q_e for one token's logits, q being its shares.
void share_gradient(ScoreFunction score, const float* logits, const float* weights, int64_t n,
                    float* grad) {
  const float sum = balance_shares(score, logits, n, grad);
  float mean = 0;
  for (int64_t e = 0; e < n; ++e) mean += grad[e] * weights[e];
  for (int64_t e = 0; e < n; ++e) {
    // Scores of one logit each are s = q · sum.
    const float slope =
        score == ScoreFunction::kSoftmax ? 1.0F : relative_slope(score, grad[e] * sum);
    grad[e] *= slope * (weights[e] - mean);
  }
}

void balance_statistics_backward(const BalanceStatisticsBackward& op,
                                 const Args<BalanceStatisticsBackward>& args) {
  using Op = BalanceStatisticsBackward;
  const auto& spec = op.spec();
  const int64_t n = spec.num_experts;
  const float* grad_sums = args.in(Op::kGradScoreSums).as<float>();
  const float* logits = args.in(Op::kLogits).as<float>();
  const auto* segments = args.in(Op::kSegments).as<int32_t>();
  float* grad_logits = args.out(Op::kGradLogits).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < args.in(Op::kLogits).shape[0]; ++t) {
    if (segments[t] < 0) {
      std::fill_n(grad_logits + t * n, n, 0.0F);
      continue;
    }
    share_gradient(spec.score, logits + t * n, grad_sums + segments[t] * n, n, grad_logits + t * n);
  }
}

/// The f of one segment, from its counts and those before (empty but for the global batch).
void make_fractions(std::span<const float> counts_E, std::span<const float> prior_E,
                    int64_t group_size, std::span<float> fractions_E) {
  std::ranges::copy(counts_E, fractions_E.begin());
  for (size_t e = 0; e < prior_E.size(); ++e) fractions_E[e] += prior_E[e];
  counts_to_fractions(fractions_E, group_size);
}

std::span<const float> row_of(const Tensor& matrix, int64_t row) {
  return {matrix.as<float>() + row * matrix.shape[1], static_cast<size_t>(matrix.shape[1])};
}

template <typename Op>
std::span<const float> prior_counts(const BalanceLossSpec& spec, const Args<Op>& args) {
  if (!spec.has_prior_counts) return {};
  return args.in(Op::kPriorCounts).template span<float>();
}

void balance_loss(const BalanceLoss& op, const Args<BalanceLoss>& args) {
  using Op = BalanceLoss;
  const auto& spec = op.spec();
  const Tensor& counts = args.in(Op::kCounts);
  const Tensor& score_sums = args.in(Op::kScoreSums);
  const int64_t num_experts = counts.shape[1];
  const std::span fractions(workspace_part<float>(args.workspace, 0), num_experts);
  double sum = 0;
  for (int64_t segment = 0; segment < counts.shape[0]; ++segment) {
    make_fractions(row_of(counts, segment), prior_counts(spec, args), spec.group_size, fractions);
    const auto sums = row_of(score_sums, segment);
    for (size_t e = 0; e < fractions.size(); ++e) {
      sum += static_cast<double>(fractions[e]) * static_cast<double>(sums[e]);
    }
  }
  *args.out(Op::kLoss).as<float>() =
      static_cast<float>(balance_loss_scale(spec, num_experts) * sum);
}

void balance_loss_backward(const BalanceLossBackward& op, const Args<BalanceLossBackward>& args) {
  using Op = BalanceLossBackward;
  const auto& spec = op.spec();
  const Tensor& counts = args.in(Op::kCounts);
  const int64_t num_experts = counts.shape[1];
  const auto scale = static_cast<float>(static_cast<double>(*args.in(Op::kGradLoss).as<float>()) *
                                        balance_loss_scale(spec, num_experts));
  const auto grad = args.out(Op::kGradScoreSums).span<float>();
  for (int64_t segment = 0; segment < counts.shape[0]; ++segment) {
    const auto row = grad.subspan(segment * num_experts, num_experts);
    make_fractions(row_of(counts, segment), prior_counts(spec, args), spec.group_size, row);
    for (float& value : row) value *= scale;
  }
}

void running_counts(const RunningCounts& op, const Args<RunningCounts>& args) {
  const int64_t rank = op.rank();
  const Tensor& counts = args.in(RunningCounts::kCounts);
  const auto earlier = args.in(RunningCounts::kEarlier).span<float>();
  const auto before = args.out(RunningCounts::kBefore).span<float>();
  const auto after = args.out(RunningCounts::kAfter).span<float>();
  for (size_t e = 0; e < earlier.size(); ++e) {
    float sum = earlier[e];
    for (int64_t r = 0; r < counts.shape[0]; ++r) {
      if (r == rank) before[e] = sum;
      sum += row_of(counts, r)[e];
    }
    after[e] = sum;
  }
}

int64_t balance_statistics_workspace(const BalanceStatistics& op,
                                     std::span<const ValueType> inputs) {
  return StatisticsWorkspace(inputs[BalanceStatistics::kLogits].shape[0], op.spec()).num_bytes;
}

int64_t balance_loss_workspace(const BalanceLoss& /*op*/, std::span<const ValueType> inputs) {
  return inputs[BalanceLoss::kCounts].shape[1] * int64_t{sizeof(float)};
}

}  // namespace

TESSERA_CPU_KERNELS(add_balance_cpu, table) {
  add_kernel<BalanceStatistics>(table, balance_statistics,
                                {.workspace = balance_statistics_workspace});
  add_kernel<BalanceStatisticsBackward>(table, balance_statistics_backward);
  add_kernel<BalanceLoss>(table, balance_loss, {.workspace = balance_loss_workspace});
  add_kernel<BalanceLossBackward>(table, balance_loss_backward);
  add_kernel<RunningCounts>(table, running_counts);
}

}  // namespace tessera
