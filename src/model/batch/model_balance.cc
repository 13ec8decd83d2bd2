#include "model/batch/model_balance.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tessera {
namespace {

/// Each value becomes the sum of its group of `group_size` neighbours.
void sum_groups(std::vector<double>& values, int64_t group_size) {
  for (auto group = values.begin(); group != values.end(); group += group_size)
    std::fill_n(group, group_size, std::reduce(group, group + group_size));
}

}  // namespace

bool balances_whole_model(const ModelConfig& config) {
  return config.moe.balance_scope == BalanceTokens::kModel && config.num_balanced_layers() > 0;
}

ModelBalance::ModelBalance(const ModelConfig& config, const StageGroups& groups, Device& device)
    : num_experts_(config.moe.router_outputs()),
      group_size_(config.moe.balance_group_size),
      per_layer_(static_cast<double>(num_experts_ / group_size_) /
                 static_cast<double>(std::max<int64_t>(config.num_balanced_layers(), 1) *
                                     groups.token_ranks())),
      ranks_(groups.micro_batch),
      sums_(DType::kF64, {2, num_experts_}),
      grad_score_means_(DType::kF32, {num_experts_}, device) {}

void ModelBalance::clear() {
  std::ranges::fill(sums_.get().span<double>(), 0.0);
}

void ModelBalance::add_layer(std::span<const float> counts, std::span<const float> score_means) {
  const auto sums = sums_.get().span<double>();
  const size_t num_experts = counts.size();
  for (size_t e = 0; e < num_experts; ++e) {
    sums[e] += counts[e];
    sums[num_experts + e] += score_means[e];
  }
}

double ModelBalance::finish(float scale) {
  const auto sums = sums_.get().span<double>();
  const auto means = sums.last(sums.size() / 2);
  std::vector<double> counts(sums.begin(), sums.begin() + std::ssize(means));
  const Tensor all_counts = view(std::span(counts), {std::ssize(counts)});
  ranks_->all_reduce(all_counts, all_counts).wait();
  const double assignments = std::max(std::reduce(counts.begin(), counts.end()), 1.0);
  sum_groups(counts, group_size_);
  const auto gradient = grad_score_means_.get().span<float>();
  double loss = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    const double fraction = counts[e] / assignments;
    loss += per_layer_ * fraction * means[e];
    gradient[e] = static_cast<float>(scale * per_layer_ * fraction);
  }
  grad_score_means_.upload();
  return loss;
}

}  // namespace tessera
