#include "ops/balance/balance.h"

#include <algorithm>

#include "ops/balance/balance_workspace.h"

namespace tessera {
namespace {

bool is_f32_matrix(const ValueType& type) {
  return type.dtype == DType::kF32 && type.shape.rank() == 2 && !type.ragged();
}

ValueType f32(const Shape& shape) {
  return {.dtype = DType::kF32, .shape = shape};
}

}  // namespace

BalanceStatistics::BalanceStatistics(const BalanceStatisticsSpec& spec) : spec_(spec) {
  require(spec.num_experts >= 1 && spec.top_k >= 1 && spec.num_segments >= 1,
          "balance_statistics: {} experts, top_k {} and {} segments; expected at least 1 of each",
          spec.num_experts, spec.top_k, spec.num_segments);
}

std::string BalanceStatistics::attributes() const {
  return fmt::format("experts={} score={} segments={}", spec_.num_experts, score_name(spec_.score),
                     spec_.num_segments);
}

std::vector<ValueType> BalanceStatistics::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes logits, expert_idx and segments, got {} inputs",
              inputs.size());
  check_shape(*this,
              is_f32_matrix(inputs[kLogits]) && inputs[kLogits].shape[1] == spec_.num_experts,
              "logits must be f32 [T, {}], got {}", spec_.num_experts, inputs[kLogits].to_string());
  const int64_t num_tokens = inputs[kLogits].shape[0];
  const ValueType expert_idx{.dtype = DType::kI32, .shape = {num_tokens, spec_.top_k}};
  check_shape(*this, inputs[kExpertIdx] == expert_idx, "expert_idx must be {}, got {}",
              expert_idx.to_string(), inputs[kExpertIdx].to_string());
  const ValueType segments{.dtype = DType::kI32, .shape = {num_tokens}};
  check_shape(*this, inputs[kSegments] == segments, "segments must be {}, got {}",
              segments.to_string(), inputs[kSegments].to_string());
  const ValueType sums = f32({spec_.num_segments, spec_.num_experts});
  return {sums, sums};
}

void BalanceStatistics::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(BalanceStatistics::kScoreSums);
  if (!grad || !builder.needs_grad(kLogits)) return;
  builder.set_grad_input(
      kLogits, builder.emit(std::make_shared<BalanceStatisticsBackward>(spec_),
                            {*grad, builder.input(kLogits),
                             builder.input(kSegments)})[BalanceStatisticsBackward::kGradLogits]);
}

std::vector<ValueType> BalanceStatisticsBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes 3 inputs, got {}", inputs.size());
  return {inputs[kLogits]};
}

double balance_loss_scale(const BalanceLossSpec& spec, int64_t num_experts) {
  const int64_t num_groups = num_experts / spec.group_size;
  return static_cast<double>(num_groups) /
         static_cast<double>(std::max<int64_t>(spec.total_tokens, 1));
}

BalanceLoss::BalanceLoss(const BalanceLossSpec& spec) : spec_(spec) {
  require(spec.total_tokens >= 0, "balance_loss: {} tokens in all", spec.total_tokens);
  require(spec.group_size >= 1, "balance_loss: groups of {} experts", spec.group_size);
}

std::string BalanceLoss::attributes() const {
  std::string text = fmt::format("tokens={}", spec_.total_tokens);
  if (spec_.group_size > 1) text += fmt::format(" group={}", spec_.group_size);
  if (spec_.has_prior_counts) text += " prior_counts";
  return text;
}

std::vector<ValueType> BalanceLoss::infer(std::span<const ValueType> inputs) const {
  const size_t expected = spec_.has_prior_counts ? 3 : 2;
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  check_shape(*this, is_f32_matrix(inputs[kCounts]) && inputs[kCounts] == inputs[kScoreSums],
              "counts and score_sums must both be f32 [G, E], got {} and {}",
              inputs[kCounts].to_string(), inputs[kScoreSums].to_string());
  const Shape& shape = inputs[kCounts].shape;
  check_shape(*this, shape[1] % spec_.group_size == 0, "{} experts do not fall into groups of {}",
              shape[1], spec_.group_size);
  if (spec_.has_prior_counts) {
    check_shape(*this, shape[0] == 1 && inputs[kPriorCounts] == f32({shape[1]}),
                "prior_counts must be f32 [{}] beside one segment, got {} beside {}", shape[1],
                inputs[kPriorCounts].to_string(), shape[0]);
  }
  return {f32({1})};
}

void BalanceLoss::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kLoss);
  if (!grad || !builder.needs_grad(kScoreSums)) return;
  std::vector<ValueId> inputs = {*grad, builder.input(kCounts)};
  if (spec_.has_prior_counts) inputs.push_back(builder.input(kPriorCounts));
  builder.set_grad_input(kScoreSums, builder.emit(std::make_shared<BalanceLossBackward>(spec_),
                                                  inputs)[BalanceLossBackward::kGradScoreSums]);
}

std::vector<ValueType> BalanceLossBackward::infer(std::span<const ValueType> inputs) const {
  const size_t expected = spec_.has_prior_counts ? 3 : 2;
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  return {inputs[kCounts]};
}

RunningCounts::RunningCounts(int64_t rank) : rank_(rank) {
  require(rank >= 0, "running_counts: rank {}", rank);
}

std::string RunningCounts::attributes() const {
  return fmt::format("rank={}", rank_);
}

std::vector<ValueType> RunningCounts::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes 2 inputs, got {}", inputs.size());
  check_shape(*this, is_f32_matrix(inputs[kCounts]) && inputs[kCounts].shape[0] > rank_,
              "counts must be f32 [P, E] with a row for rank {}, got {}", rank_,
              inputs[kCounts].to_string());
  const ValueType earlier = f32({inputs[kCounts].shape[1]});
  check_shape(*this, inputs[kEarlier] == earlier, "earlier must be {}, got {}", earlier.to_string(),
              inputs[kEarlier].to_string());
  return {earlier, earlier};
}

OperatorPtr make_balance_statistics(const BalanceStatisticsSpec& spec) {
  return std::make_shared<BalanceStatistics>(spec);
}
OperatorPtr make_balance_loss(const BalanceLossSpec& spec) {
  return std::make_shared<BalanceLoss>(spec);
}
OperatorPtr make_running_counts(int64_t rank) {
  return std::make_shared<RunningCounts>(rank);
}

}  // namespace tessera
