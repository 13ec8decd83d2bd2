#pragma once

#include <functional>
#include <ostream>

#include "train/run/train_loop.h"
#include "train/tune/answers.h"

namespace tessera {

/// What a step is given, and what is told of it; a number called "loss" is the step's loss.
struct TunedStep {
  std::vector<Batch> batches;
  std::vector<NamedNumber> numbers;
};

/// Runs a training whose steps are given by `next`, to the last or to a signal, which is looked for
/// before steps that are multiples of `interval`: a run continues there.
void run_tuned_steps(TrainingRun& run, int64_t interval, const std::function<TunedStep()>& next,
                     std::ostream& out);

}  // namespace tessera
