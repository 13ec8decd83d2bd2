#pragma once

#include <chrono>
#include <vector>

#include "core/memory.h"
#include "train/metrics/step_record.h"
#include "train/setup/matrix_peak.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// Makes the records of a run's steps on one rank. `trainer` must outlive it.
class StepRecorder {
 public:
  /// `peak`: of one rank.
  StepRecorder(Trainer& trainer, MatrixPeak peak) : trainer_(trainer), peak_(std::move(peak)) {}

  /// Before the first step, from which on time counts.
  void begin();
  /// The step at which the run began.
  int64_t first_step() const { return first_step_; }

  /// Of the step that the trainer did last, in `seconds`.
  StepRecord record(const StepOutcome& outcome, double seconds);
  /// Of the last step.
  std::vector<ExpertLoad> expert_loads() const;

 private:
  void sample_memory();
  void add_experts(const StepOutcome& outcome, StepRecord& record) const;

  Trainer& trainer_;
  MatrixPeak peak_;
  std::chrono::steady_clock::time_point started_;
  int64_t first_step_ = 0;
  PeakMemory host_peak_;
  int64_t most_memory_ = 0;      ///< of the device
  int64_t most_unbalanced_ = 0;  ///< Trainer::unbalanced_bytes()
};

}  // namespace tessera
