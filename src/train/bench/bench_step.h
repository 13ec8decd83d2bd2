#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ops/backend.h"
#include "train/memory/choose_policy.h"
#include "train/run/trace.h"
#include "train/setup/settings.h"

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
  /// Leaves out operators, traces and how a GPU is fed.
  bool steps_only = false;
  /// Told of each operator in the step in which they are timed one by one.
  NodeObserver operators = {};
  /// Records one step more, the last, in which operators are timed one by one; may be null.
  TraceRecorder* trace = nullptr;
};

/// What giving a GPU the programs of a step took the host, while the GPU had nothing else to do.
struct LaunchCost {
  int64_t num_operators = 0;
  int64_t num_operations = 0;  ///< kernels, copies and the like that CUDA graphs had; 0 without
  double seconds = 0;

  double per_operator() const {
    return num_operators > 0 ? seconds / static_cast<double>(num_operators) : 0;
  }
};

/// How a GPU was fed in the steps of a bench.
struct GpuFeed {
  LaunchCost one_by_one;
  std::optional<LaunchCost> graphs;  ///< unset where they are switched off
  std::string why_no_graph;          ///< why some program could not be recorded; "" where all were
  int64_t num_waits = 0;             ///< of the host for the GPU in a step
  double host_seconds = 0;           ///< of a step but for these waits, the median
  double idle_share = 0;             ///< of a step in which no operator runs
};

/// What whole training steps took, on one rank and random tokens.
struct StepBenchResult {
  std::string device;
  std::vector<double> seconds;  ///< of each step, ascending
  int64_t tokens = 0;           ///< of a step
  double flops = 0;             ///< model FLOPs of a step
  double matrix_peak = 0;  ///< FLOP/s of large products in the same run (train/setup/matrix_peak.h)
  int64_t memory_used = 0;
  int64_t memory_predicted = 0;
  int64_t saved_bytes = 0;      ///< of the device's memory, for what passes keep
  int64_t offloaded_bytes = 0;  ///< of the host's, for what train.offload brings there
  int64_t parameters = 0;
  int64_t update_bytes = 0;  ///< that the optimizer reads and writes in a step
  double mark_seconds = 0;   ///< what timing an operator takes itself, in `operators` too
  /// Seconds in one step by operator, ascending by name.
  std::map<std::string, double> operators;
  std::optional<GpuFeed> gpu;  ///< unset on the host
  /// For train.memory_limit, or for what the GPU has free.
  std::optional<PolicyChoice> choice;

  double median() const { return median_of_sorted(seconds); }
};

/// Times whole steps (all micro-batches, gradient norm, AdamW) of a configuration on random tokens
/// and initial weights; reads and writes no files. Throws UserError as training would.
StepBenchResult bench_step(const StepBenchRequest& request);

}  // namespace tessera
