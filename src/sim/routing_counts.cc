#include "sim/routing_counts.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace tessera {
namespace {

/// Of one layer in one step.
double fullest_share(const std::vector<int64_t>& rows, int64_t num_ranks) {
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (all == 0) return 1;
  int64_t most = 0;
  const int64_t each = std::ssize(rows) / num_ranks;
  for (auto first = rows.begin(); first != rows.end(); first += each)
    most = std::max(most, std::accumulate(first, first + each, int64_t{0}));
  return static_cast<double>(most) * static_cast<double>(num_ranks) / static_cast<double>(all);
}

}  // namespace

void RoutingCounts::add(int64_t layer, const std::vector<int64_t>& rows) {
  ensure(empty() || std::ssize(rows) == num_experts(), "routing counts of {} and {} experts",
         num_experts(), rows.size());
  layers_[layer].push_back(rows);
}

int64_t RoutingCounts::num_experts() const {
  return empty() ? 0 : std::ssize(layers_.begin()->second.front());
}

double RoutingCounts::skew(int64_t layer, int64_t num_ranks) const {
  if (empty() || num_ranks == 1 || num_experts() % num_ranks != 0) return 1;
  const auto found = layers_.find(layer);
  if (found != layers_.end()) return skew_of(found->second, num_ranks);
  double sum = 0;
  for (const auto& [known, steps] : layers_) sum += skew_of(steps, num_ranks);
  return sum / static_cast<double>(layers_.size());
}

double RoutingCounts::skew_of(const Steps& steps, int64_t num_ranks) {
  double sum = 0;
  for (const std::vector<int64_t>& rows : steps) sum += fullest_share(rows, num_ranks);
  return sum / static_cast<double>(steps.size());
}

}  // namespace tessera
