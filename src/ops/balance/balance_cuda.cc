#include "ops/balance/balance.h"
#include "ops/balance/balance_kernels.h"
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

void balance_statistics(const BalanceStatistics& op, const Args<BalanceStatistics>& args) {
  using Op = BalanceStatistics;
  const auto& spec = op.spec();
  const int64_t num_tokens = args.in(Op::kLogits).shape[0];
  const SumsWorkspace parts(num_tokens, spec);
  launch_balance_sums({.num_experts = static_cast<int>(spec.num_experts),
                       .top_k = static_cast<int>(spec.top_k),
                       .score = spec.score,
                       .num_tokens = num_tokens,
                       .num_segments = spec.num_segments,
                       .num_runs = parts.num_runs,
                       .logits_TE = args.in(Op::kLogits).as<float>(),
                       .expert_idx_TK = args.in(Op::kExpertIdx).as<int32_t>(),
                       .segments_T = args.in(Op::kSegments).as<int32_t>(),
                       .partial_sums = workspace_part<double>(args.workspace, parts.sums),
                       .partial_counts = workspace_part<int32_t>(args.workspace, parts.counts),
                       .counts_GE = args.out(BalanceStatistics::kCounts).as<float>(),
                       .score_sums_GE = args.out(BalanceStatistics::kScoreSums).as<float>()},
                      stream_of(args));
}

int64_t statistics_workspace(const BalanceStatistics& op, std::span<const ValueType> inputs) {
  const auto& spec = op.spec();
  check_limit(op, spec.num_experts, kBalanceMaxExperts, "experts");
  return SumsWorkspace(inputs[BalanceStatistics::kLogits].shape[0], spec).layout.num_bytes();
}

void balance_statistics_backward(const BalanceStatisticsBackward& op,
                                 const Args<BalanceStatisticsBackward>& args) {
  using Op = BalanceStatisticsBackward;
  const auto& spec = op.spec();
  launch_balance_sums_backward({.num_experts = static_cast<int>(spec.num_experts),
                                .score = spec.score,
                                .num_tokens = args.in(Op::kLogits).shape[0],
                                .grad_sums_GE = args.in(Op::kGradScoreSums).as<float>(),
                                .logits_TE = args.in(Op::kLogits).as<float>(),
                                .segments_T = args.in(Op::kSegments).as<int32_t>(),
                                .grad_logits_TE = args.out(Op::kGradLogits).as<float>()},
                               stream_of(args));
}

template <typename Op>
BalanceFractions fractions_of(const BalanceLossSpec& spec, const Args<Op>& args) {
  const Tensor& counts = args.in(Op::kCounts);
  return {.num_experts = static_cast<int>(counts.shape[1]),
          .group_size = static_cast<int>(spec.group_size),
          .num_segments = counts.shape[0],
          .counts_GE = counts.as<float>(),
          .prior_counts_E =
              spec.has_prior_counts ? args.in(Op::kPriorCounts).template as<float>() : nullptr,
          .grad = nullptr,
          .scale = balance_loss_scale(spec, counts.shape[1]),
          .fractions_GE = nullptr};
}

void balance_loss(const BalanceLoss& op, const Args<BalanceLoss>& args) {
  using Op = BalanceLoss;
  const auto& spec = op.spec();
  const Tensor& counts = args.in(Op::kCounts);
  BalanceFractions fractions = fractions_of(spec, args);
  fractions.fractions_GE = workspace_part<float>(args.workspace, 0);
  if (counts.shape[0] > 0) launch_balance_fractions(fractions, stream_of(args));
  launch_balance_dot({.count = counts.num_elements(),
                      .scale = fractions.scale,
                      .fractions_GE = fractions.fractions_GE,
                      .score_sums_GE = args.in(Op::kScoreSums).as<float>(),
                      .loss = args.out(Op::kLoss).as<float>()},
                     stream_of(args));
}

int64_t loss_workspace(const BalanceLoss& op, std::span<const ValueType> inputs) {
  check_limit(op, inputs[BalanceLoss::kCounts].shape[1], kBalanceMaxExperts, "experts");
  return inputs[BalanceLoss::kCounts].num_bytes();
}

void balance_loss_backward(const BalanceLossBackward& op, const Args<BalanceLossBackward>& args) {
  using Op = BalanceLossBackward;
  const auto& spec = op.spec();
  BalanceFractions fractions = fractions_of(spec, args);
  fractions.grad = args.in(Op::kGradLoss).as<float>();
  fractions.fractions_GE = args.out(Op::kGradScoreSums).as<float>();
  if (args.in(Op::kCounts).shape[0] > 0) launch_balance_fractions(fractions, stream_of(args));
}

void running_counts(const RunningCounts& op, const Args<RunningCounts>& args) {
  const Tensor& counts = args.in(RunningCounts::kCounts);
  const Tensor& earlier = args.in(RunningCounts::kEarlier);
  const int64_t num_experts = earlier.num_elements();
  if (num_experts == 0) return;
  launch_running_counts({.num_experts = static_cast<int>(num_experts),
                         .num_ranks = static_cast<int>(counts.num_elements() / num_experts),
                         .rank = static_cast<int>(op.rank()),
                         .counts_RE = counts.as<float>(),
                         .earlier_E = earlier.as<float>(),
                         .before_E = args.out(RunningCounts::kBefore).as<float>(),
                         .after_E = args.out(RunningCounts::kAfter).as<float>()},
                        stream_of(args));
}

}  // namespace

void add_balance_cuda(KernelTable& table) {
  add_kernel<BalanceStatistics>(table, balance_statistics, {.workspace = statistics_workspace});
  add_kernel<BalanceStatisticsBackward>(table, balance_statistics_backward);
  add_kernel<BalanceLoss>(table, balance_loss, {.workspace = loss_workspace});
  add_kernel<BalanceLossBackward>(table, balance_loss_backward);
  add_kernel<RunningCounts>(table, running_counts);
}

}  // namespace tessera
