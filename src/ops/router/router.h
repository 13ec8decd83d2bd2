#pragma once

#include <string>

#include "ops/addend.h"
#include "ops/router/score_function.h"

namespace tessera {

/// When scores become probabilities.
enum class ScoreOrder {
  kBeforeTopK,  ///< scores over all experts, the chosen ones are the probabilities (DeepSeek, Qwen)
  kAfterTopK,   ///< top-k of the logits, then a softmax over the chosen alone (Mixtral)
};

/// How a group of experts is ranked when only some groups may be chosen from.
enum class GroupScore {
  kMax,        ///< its best expert (DeepSeek-V2)
  kTopTwoSum,  ///< the sum of its two best (DeepSeek-V3)
};

/// The tokens over which a router's own balance loss compares experts.
enum class BalanceScope { kMicroBatch, kSequence };

struct RouterSpec {
  int64_t num_experts = 1;
  int64_t top_k = 1;
  ScoreFunction score = ScoreFunction::kSoftmax;
  ScoreOrder order = ScoreOrder::kBeforeTopK;
  /// Divide the chosen scores by their sum (+ 1e-20). Without effect after top-k, where they sum
  /// to 1.
  bool normalize_top_k = false;
  /// Multiplies the probabilities at last.
  double scaling_factor = 1.0;
  /// A learnt bias is added to the logits (gpt-oss).
  bool logit_bias = false;
  /// A bias input is added to what is compared when choosing, never to a probability (DeepSeek-V3).
  bool expert_bias = false;
  /// Experts in num_groups equal groups; a token chooses among its best top_groups groups.
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  GroupScore group_score = GroupScore::kMax;
  BalanceScope balance_scope = BalanceScope::kMicroBatch;
  /// The balance loss compares groups of this many consecutive experts (those of one device, say)
  /// instead of experts: the device-level loss of DeepSeek-V2 (section 2.1.4).
  int64_t balance_group_size = 1;
  /// For benchmarks: token t takes experts (t·K + k) mod E, whatever its scores; all else is as
  /// ever.
  bool force_balanced = false;
  /// The choice of tokens is given (router replay), and all else is as ever.
  bool replay = false;
  /// Some tokens only fill the micro-batch, as their segments say: they have no experts.
  bool padding = false;
};

/// Chooses top_k experts for every token:
///   (x A [T, H], weight F32 [E, H], [bias F32 [E]], [expert_bias F32 [E]],
///    [cu_seqlens I32 [num_seqs + 1]], [replayed I32 [T, K]], [segments I32 [T]]) ->
///   probs F32 [T, K], expert_idx I32 [T, K], logits F32 [T, E], counts F32 [E],
///   balance_loss F32 [1], z_loss F32 [1], score_means F32 [E]
/// bias and expert_bias are there when the spec says so; cu_seqlens for BalanceScope::kSequence,
/// from 0 to T. `replayed` is there with RouterSpec::replay: the experts of each token, distinct
/// and in the order of a choice, or a first entry below 0 where the router is to choose. The CPU's
/// kernel throws UserError for experts that there are not; a GPU's must not be given any.
/// `segments` is there with RouterSpec::padding, on the CPU alone: a token with one below 0 has -1
/// for experts, probabilities of 0 and no part in counts, sums and gradients; means still are over
/// T.
///
/// Logits are x · weightᵀ + bias. Logits, scores and losses are F32 even for BF16 x, which is
/// widened, not rounded. A token's experts come best first. Of equal ones the lower expert (or
/// group) index wins; NaN ranks with minus infinity, so that indices are valid and distinct
/// whatever the logits.
///
/// balance_loss = E · Σ_e f_e · P_e, 1 when balanced: f_e is the expert's fraction of the
/// assignments, P_e the mean over tokens of its score, scores taken over all experts and summing to
/// 1 (Switch Transformer, 2021; DeepSeek-V3 for other scores). By sequence, it is the mean of the
/// sequences' losses weighted by their tokens. With groups of experts it is D · Σ_d f_d · P_d over
/// the D groups, f_d and P_d being their experts' sums. score_means is P_e over the micro-batch,
/// for losses that span more than one router. z_loss is the mean of logsumexp(logits)² (ST-MoE,
/// 2022). All three are 0 where T is 0.
///
/// Gradients of probs, logits, both losses and score_means reach x, weight and bias; the choice,
/// counts and f_e are constants. Never recomputed: routing is decided once.
///
/// Where the tokens of a micro-batch are spread over ranks, a rank's router sees its own T_r of T
/// tokens. z_loss and score_means are means over those: the micro-batch's are the sums over ranks
/// of T_r/T times a rank's, so the caller puts that factor into the gradient that it gives them
/// (and into the value that it reports). balance_loss is no such sum, nor can it span a step's
/// micro-batches: see BalanceStatistics and BalanceLoss (ops/balance), whose gradient arrives at
/// the logits.
class Router final : public Operator {
 public:
  static constexpr std::string_view kName = "router";
  enum Input : int { kX, kWeight, kBias, kExpertBias, kCuSeqlens, kReplayed, kSegments };
  enum Output : int { kProbs, kExpertIdx, kLogits, kCounts, kBalanceLoss, kZLoss, kScoreMeans };

  /// Throws UserError for an impossible combination.
  explicit Router(const RouterSpec& spec);

  const RouterSpec& spec() const { return spec_; }
  OperandSet<Input> input_set() const;

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  bool recomputable() const override { return false; }

 private:
  RouterSpec spec_;
};

/// For those who want its outputs alone.
using RouterOutput = Router;

/// Which gradients reach the router and which are wanted of it.
struct RouterGradients {
  bool probs = false;
  bool balance_loss = false;
  bool z_loss = false;
  bool score_means = false;
  bool logits = false;
  bool x = true;
  bool weight = true;   ///< and the bias, where there is one
  bool addend = false;  ///< something is added to the gradient of x
};

/// (x, weight, logits, expert_idx, counts or cu_seqlens for the balance loss where there is its,
///  then the gradients that there are: probs F32 [T, K], balance_loss F32 [1], z_loss F32 [1],
///  score_means F32 [E], logits F32 [T, E], at last the addend A [T, H] if there is one) ->
/// (dx A [T, H], plus the addend, if wanted; accumulated, if wanted, dweight F32 [E, H] and dbias
/// F32 [E]).
class RouterBackward final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "router_backward";
  enum Input : int {
    kX,
    kWeight,
    kLogits,
    kExpertIdx,
    kCounts,
    kCuSeqlens,
    kGradProbs,
    kGradBalanceLoss,
    kGradZLoss,
    kGradScoreMeans,
    kGradLogits,
    kAddend
  };
  enum Output : int { kGradX, kGradWeight, kGradBias };

  RouterBackward(const RouterSpec& spec, const RouterGradients& gradients)
      : spec_(spec), gradients_(gradients) {}

  const RouterSpec& spec() const { return spec_; }
  const RouterGradients& gradients() const { return gradients_; }
  OperandSet<Input> input_set() const;
  OperandSet<Output> output_set() const {
    return OperandSet<Output>()
        .add(kGradX, gradients_.x)
        .add(kGradWeight, gradients_.weight)
        .add(kGradBias, makes_grad_bias());
  }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return gradients_.addend ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool makes_grad_bias() const { return gradients_.weight && spec_.logit_bias; }
  bool accumulates(int output) const override {
    return gradients_.weight && output >= output_set().position(kGradWeight);
  }
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;

 private:
  RouterSpec spec_;
  RouterGradients gradients_;
};

OperatorPtr make_router(const RouterSpec& spec);

void add_router_cpu(KernelTable& table);
/// Router alone, with logits by gemm_of_rows.
void add_router_of_rows_cpu(KernelTable& table);
/// Up to 1024 experts.
void add_router_cuda(KernelTable& table);

}  // namespace tessera
