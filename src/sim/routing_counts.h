#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace tessera {

/// How many rows came to each expert in steps of a run. Of a step's micro-batches and ranks only
/// the sums are known, which are nearer to balance than each by itself.
class RoutingCounts {
 public:
  /// One layer in one step; those of all steps and layers have as many experts.
  void add(int64_t layer, const std::vector<int64_t>& rows);

  bool empty() const { return layers_.empty(); }
  int64_t num_experts() const;
  /// Rows of the fullest of so many ranks, which hold equally many experts in their order, in those
  /// of balanced routing: the mean of the steps. Of a layer that was not counted, the mean of those
  /// that were; 1 where nothing was counted.
  double skew(int64_t layer, int64_t num_ranks) const;

 private:
  using Steps = std::vector<std::vector<int64_t>>;  // rows of each expert
  static double skew_of(const Steps& steps, int64_t num_ranks);

  std::map<int64_t, Steps> layers_;
};

}  // namespace tessera
