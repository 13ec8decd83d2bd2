#pragma once

#include <map>
#include <string>

#include "comm/communicator.h"

namespace tessera {

/// What a rank sends in its training steps, by group and kind. What it sends between them, for
/// validation or checkpoints, is not counted. Used from one thread.
class StepTraffic {
 public:
  using Counts = std::map<CommStatistics::Key, CommCount>;

  /// Adds a step that took the rank's counts from `before` to `after`.
  void add_step(const Counts& before, const Counts& after);
  int64_t num_steps() const { return num_steps_; }
  /// Of all steps; what moved no bytes is left out.
  const Counts& totals() const { return totals_; }

 private:
  Counts totals_;
  int64_t num_steps_ = 0;
};

/// The totals of all ranks together at rank 0; nothing elsewhere. All ranks must call.
StepTraffic::Counts sum_over_ranks(const StepTraffic& traffic, Communicator& world);

/// The mean of `num_steps` steps with those totals as a table for a person, one row a group and
/// kind, without a newline at its end.
std::string describe_traffic(const StepTraffic::Counts& totals, int64_t num_steps);

}  // namespace tessera
