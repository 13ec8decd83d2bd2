#pragma once

#include <string>

#include "ops/operator.h"
#include "ops/router/router.h"

namespace tessera {

struct BalanceStatisticsSpec {
  int64_t num_experts = 1;
  int64_t top_k = 1;
  ScoreFunction score = ScoreFunction::kSoftmax;
  int64_t num_segments = 1;
};

/// What the balance loss needs of a rank's own tokens, by *segment*, the tokens whose loss is taken
/// together (one sequence, or with G = 1 the micro-batch):
///   (logits F32 [T, E], expert_idx I32 [T, K], segments I32 [T]) ->
///   counts F32 [G, E], score_sums F32 [G, E]
/// counts are assignments by expert (absent ones, -1, left out), constants to the gradient;
/// score_sums are sums over tokens of the router's scores, taken over all experts and made to sum
/// to 1, as its own loss takes them. Their gradient reaches the logits. Sums are in token order,
/// whatever the number of threads. Tokens of segment -1 are left out; on GPUs there are none.
/// Throws InternalError for another segment outside [0, G).
class BalanceStatistics final : public Operator {
 public:
  static constexpr std::string_view kName = "balance_statistics";
  enum Input : int { kLogits, kExpertIdx, kSegments };
  enum Output : int { kCounts, kScoreSums };

  /// Throws UserError for sizes below 1.
  explicit BalanceStatistics(const BalanceStatisticsSpec& spec);
  const BalanceStatisticsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  BalanceStatisticsSpec spec_;
};

/// (grad of score_sums F32 [G, E], logits F32 [T, E], segments I32 [T]) -> dlogits F32 [T, E].
class BalanceStatisticsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "balance_statistics_backward";
  enum Input : int { kGradScoreSums, kLogits, kSegments };
  enum Output : int { kGradLogits };

  explicit BalanceStatisticsBackward(const BalanceStatisticsSpec& spec) : spec_(spec) {}
  const BalanceStatisticsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  BalanceStatisticsSpec spec_;
};

struct BalanceLossSpec {
  /// Tokens of the micro-batch on all ranks that share it.
  int64_t total_tokens = 0;
  /// Compare groups of this many consecutive experts, as RouterSpec::balance_group_size.
  int64_t group_size = 1;
  /// Whether counts of this step's earlier micro-batches count too (BalanceTokens::kGlobalBatch).
  bool has_prior_counts = false;
};

/// The factor before Σ_g Σ_e f_ge · score_sum_ge in a balance loss over so many experts.
double balance_loss_scale(const BalanceLossSpec& spec, int64_t num_experts);

/// A rank's part of the balance loss of a micro-batch whose tokens are spread over ranks:
///   (counts F32 [G, E], score_sums F32 [G, E], [prior_counts F32 [E]]) -> F32 [1]
/// counts are of all ranks that share the micro-batch (AllReduceConstant over them), score_sums of
/// this rank's tokens alone. The sum of the parts over those ranks is what one router with all the
/// tokens gives as balance_loss: E · Σ_e f_e · P_e for G = 1, and for segments the mean of their
/// losses weighted by tokens, which is E/T · Σ_g Σ_e f_ge · score_sum_ge. With groups of experts f
/// and the sums are the groups', and their number takes the place of E. prior_counts need G = 1.
/// The gradient reaches score_sums; counts are constants. 0 where there are no tokens.
class BalanceLoss final : public Operator {
 public:
  static constexpr std::string_view kName = "balance_loss";
  enum Input : int { kCounts, kScoreSums, kPriorCounts };
  enum Output : int { kLoss };

  /// Throws UserError for impossible sizes.
  explicit BalanceLoss(const BalanceLossSpec& spec);
  const BalanceLossSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  BalanceLossSpec spec_;
};

/// (grad F32 [1], counts F32 [G, E], [prior_counts F32 [E]]) -> gradient of score_sums F32 [G, E].
class BalanceLossBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "balance_loss_backward";
  enum Input : int { kGradLoss, kCounts, kPriorCounts };
  enum Output : int { kGradScoreSums };

  explicit BalanceLossBackward(const BalanceLossSpec& spec) : spec_(spec) {}
  const BalanceLossSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  BalanceLossSpec spec_;
};

/// The running counts of a step whose micro-batches ranks work on side by side, rank r on number
/// i·P + r as its i-th: as if one rank had them all one after the other.
///   (counts F32 [P, E], earlier F32 [E]) -> before F32 [E], after F32 [E]
/// counts are of the ranks' micro-batches in hand, in order; earlier is of all before them. before
/// adds the counts of the ranks below `rank`, after those of all, which is the next call's earlier
/// and may be the same memory. Exact up to 2^24 assignments to an expert in a step. Constants to
/// the gradient. Never recomputed, since earlier has moved on by then.
class RunningCounts final : public Operator {
 public:
  static constexpr std::string_view kName = "running_counts";
  enum Input : int { kCounts, kEarlier };
  enum Output : int { kBefore, kAfter };

  /// Throws UserError for a rank below 0.
  explicit RunningCounts(int64_t rank);
  int64_t rank() const { return rank_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  int64_t rank_;
};

/// For those who want their outputs alone.
using RunningCountsOutput = RunningCounts;
using BalanceOutput = BalanceStatistics;

OperatorPtr make_balance_statistics(const BalanceStatisticsSpec& spec);
OperatorPtr make_balance_loss(const BalanceLossSpec& spec);
OperatorPtr make_running_counts(int64_t rank);

void add_balance_cpu(KernelTable& table);
/// Up to 1024 experts.
void add_balance_cuda(KernelTable& table);

}  // namespace tessera
