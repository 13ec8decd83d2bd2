#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ops/backend.h"
#include "train/settings.h"
#include "train/trace.h"

namespace tessera {

/// With an even number of values the mean of the middle two.
inline double median_of_sorted(const std::vector<double>& ascending) {
  const size_t half = ascending.size() / 2;
  return ascending.size() % 2 == 1 ? ascending[half] : (ascending[half - 1] + ascending[half]) / 2;
}

struct StepBenchRequest {
  Settings settings;
  int64_t steps = 5;
  int64_t warmup = 2;
  /// Records one step more, the last, in which operators are timed one by one; may be null.
  TraceRecorder* trace = nullptr;
};

/// What whole training steps took, on one rank and random tokens.
struct StepBenchResult {
  std::string device;
  std::vector<double> seconds;  ///< of each step, ascending
  int64_t tokens = 0;           ///< of a step
  double flops = 0;             ///< model FLOPs of a step
  double matrix_peak = 0;       ///< FLOP/s of a large product, measured in the same run
  int64_t memory_used = 0;
  int64_t memory_predicted = 0;
  int64_t parameters = 0;
  /// Seconds in one step by operator, ascending by name, and of the update.
  std::map<std::string, double> operators;

  double median() const { return median_of_sorted(seconds); }
};

/// Times whole steps (all micro-batches, gradient norm, AdamW) of a configuration on random tokens
/// and initial weights; reads and writes no files. Throws UserError as training would.
StepBenchResult bench_step(const StepBenchRequest& request);

}  // namespace tessera
