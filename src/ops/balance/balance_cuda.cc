#include "ops/balance/balance.h"
#include "ops/balance/balance_kernels.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using namespace cuda;

/// Where the parts of BalanceStatistics' scratch memory start, in bytes.
struct SumsWorkspace {
  int num_runs;
  WorkspaceLayout layout;
  int64_t sums;    ///< f64 [runs, G, E]
  int64_t counts;  ///< i32 [runs, G, E]

  SumsWorkspace(int64_t num_tokens, const BalanceStatisticsSpec& spec)
      : num_runs(balance_runs(num_tokens, spec.num_segments)),
        sums(layout.add<double>(num_runs * spec.num_segments * spec.num_experts)),
        counts(layout.add<int32_t>(num_runs * spec.num_segments * spec.num_experts)) {}
};

void balance_statistics(const Operator& base, const KernelArgs& args) {
  const auto& spec = static_cast<const BalanceStatistics&>(base).spec();
  const int64_t num_tokens = args.in(0).shape[0];
  const SumsWorkspace parts(num_tokens, spec);
  launch_balance_sums({.num_experts = static_cast<int>(spec.num_experts),
                       .top_k = static_cast<int>(spec.top_k),
                       .sigmoid = spec.score == ScoreFunction::kSigmoid,
                       .num_tokens = num_tokens,
                       .num_segments = spec.num_segments,
                       .num_runs = parts.num_runs,
                       .logits_TE = args.in(0).as<float>(),
                       .expert_idx_TK = args.in(1).as<int32_t>(),
                       .segments_T = args.in(2).as<int32_t>(),
                       .partial_sums = workspace_part<double>(args.workspace, parts.sums),
                       .partial_counts = workspace_part<int32_t>(args.workspace, parts.counts),
                       .counts_GE = args.out(BalanceOutput::kCounts).as<float>(),
                       .score_sums_GE = args.out(BalanceOutput::kScoreSums).as<float>()},
                      stream_of(args));
  check(cudaGetLastError());
}

int64_t statistics_workspace(const Operator& base, std::span<const ValueType> inputs) {
  const auto& spec = static_cast<const BalanceStatistics&>(base).spec();
  check_limit(base, spec.num_experts, kBalanceMaxExperts, "experts");
  return SumsWorkspace(inputs[0].shape[0], spec).layout.num_bytes();
}

void balance_statistics_backward(const Operator& base, const KernelArgs& args) {
  const auto& spec = static_cast<const BalanceStatisticsBackward&>(base).spec();
  launch_balance_sums_backward({.num_experts = static_cast<int>(spec.num_experts),
                                .sigmoid = spec.score == ScoreFunction::kSigmoid,
                                .num_tokens = args.in(1).shape[0],
                                .grad_sums_GE = args.in(0).as<float>(),
                                .logits_TE = args.in(1).as<float>(),
                                .segments_T = args.in(2).as<int32_t>(),
                                .grad_logits_TE = args.out(0).as<float>()},
                               stream_of(args));
  check(cudaGetLastError());
}

BalanceFractions fractions_of(const BalanceLossSpec& spec, const Tensor& counts,
                              const KernelArgs& args) {
  return {.num_experts = static_cast<int>(counts.shape[1]),
          .group_size = static_cast<int>(spec.group_size),
          .num_segments = counts.shape[0],
          .counts_GE = counts.as<float>(),
          .prior_counts_E = spec.has_prior_counts ? args.in(2).as<float>() : nullptr,
          .grad = nullptr,
          .scale = balance_loss_scale(spec, counts.shape[1]),
          .fractions_GE = nullptr};
}

void balance_loss(const Operator& base, const KernelArgs& args) {
  const auto& spec = static_cast<const BalanceLoss&>(base).spec();
  const Tensor& counts = args.in(0);
  BalanceFractions fractions = fractions_of(spec, counts, args);
  fractions.fractions_GE = workspace_part<float>(args.workspace, 0);
  if (counts.shape[0] > 0) launch_balance_fractions(fractions, stream_of(args));
  launch_balance_dot({.count = counts.num_elements(),
                      .scale = fractions.scale,
                      .fractions_GE = fractions.fractions_GE,
                      .score_sums_GE = args.in(1).as<float>(),
                      .loss = args.out(0).as<float>()},
                     stream_of(args));
  check(cudaGetLastError());
}

int64_t loss_workspace(const Operator& op, std::span<const ValueType> inputs) {
  check_limit(op, inputs[0].shape[1], kBalanceMaxExperts, "experts");
  return inputs[0].num_bytes();
}

void balance_loss_backward(const Operator& base, const KernelArgs& args) {
  const auto& spec = static_cast<const BalanceLossBackward&>(base).spec();
  BalanceFractions fractions = fractions_of(spec, args.in(1), args);
  fractions.grad = args.in(0).as<float>();
  fractions.fractions_GE = args.out(0).as<float>();
  if (args.in(1).shape[0] > 0) launch_balance_fractions(fractions, stream_of(args));
  check(cudaGetLastError());
}

void running_counts(const Operator& base, const KernelArgs& args) {
  const Tensor& counts = args.in(0);
  const Tensor& earlier = args.in(1);
  const int64_t num_experts = earlier.num_elements();
  if (num_experts == 0) return;
  launch_running_counts({.num_experts = static_cast<int>(num_experts),
                         .num_ranks = static_cast<int>(counts.num_elements() / num_experts),
                         .rank = static_cast<int>(static_cast<const RunningCounts&>(base).rank()),
                         .counts_RE = counts.as<float>(),
                         .earlier_E = earlier.as<float>(),
                         .before_E = args.out(RunningCountsOutput::kBefore).as<float>(),
                         .after_E = args.out(RunningCountsOutput::kAfter).as<float>()},
                        stream_of(args));
  check(cudaGetLastError());
}

}  // namespace

void add_balance_cuda(KernelTable& table) {
  table["balance_statistics"] = Kernel(balance_statistics, statistics_workspace);
  table["balance_statistics_backward"] = balance_statistics_backward;
  table["balance_loss"] = Kernel(balance_loss, loss_workspace);
  table["balance_loss_backward"] = balance_loss_backward;
  table["running_counts"] = running_counts;
}

}  // namespace tessera
