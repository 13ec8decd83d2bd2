#pragma once

#include "step/step_plan.h"
#include "train/setup/run_layout.h"

namespace tessera {

/// One rank's part of a training run, of ranks that are not there: nothing is allocated and the
/// model cannot be bound. All of its programs are built, and so refused where they cannot be.
struct PlannedRank {
  Backend backend;
  RunLayout layout;
  TrainingModel model;

  /// Makes it that of steps with as many micro-batches as the settings have, which may differ from
  /// those that it was planned for in nothing else. The programs stay.
  void set_micro_batches(const Settings& settings);
};

/// With the kernels of the device that such a run would have. REQUIRES that the settings have a
/// vocabulary.
PlannedRank plan_rank(const Settings& settings, int64_t rank, int64_t num_ranks);
/// The same on a given back end, of micro-batches of that shape.
PlannedRank plan_rank(const Settings& settings, int64_t rank, int64_t num_ranks, Backend backend,
                      const BatchShape& shape);

/// What a training step of that rank is, as a plan.
StepPlan plan_step(const Settings& settings, const PlannedRank& rank);

}  // namespace tessera
