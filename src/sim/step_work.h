#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/run/stage_programs.h"
#include "sim/hardware.h"
#include "sim/kernel_times.h"
#include "sim/link_times.h"
#include "sim/routing_counts.h"
#include "sim/software.h"
#include "step/plan_clock.h"

namespace tessera {

/// How many times longer than on its equals something takes on a rank.
struct Slowdown {
  double computing = 1;
  double links = 1;  ///< of all that it exchanges
};

/// What a simulation assumes of a step beside its plan.
struct SimulationOptions {
  /// How many times the rows of balanced routing come to the ranks' experts; those of all ranks
  /// then wait for the fullest.
  double skew = 1;
  /// What came to experts in a run, by layer, in place of `skew`.
  RoutingCounts routing = {};
  /// Ranks that are slower than others.
  std::map<int64_t, Slowdown> slow_ranks = {};
  /// Groups beside whose exchanges nothing is computed (ClockOptions::exposed), of
  /// exposable_groups.
  std::vector<std::string> exposed = {};
  /// How the software runs its steps, where it is not this program.
  Software software = {};
};

/// What SimulationOptions::exposed may name.
std::span<const std::string_view> exposable_groups();

/// What tasks of steps take on some hardware. Programs are walked through node by node, as the
/// interpreter runs them: kernels one behind the other, exchanges beside what stands between their
/// start and their first use.
class StepWork {
 public:
  explicit StepWork(const Hardware& hardware, const SimulationOptions& options = {});

  /// Of a plan and the programs that it runs, of a step of so many ranks, on one that may be slow.
  PlanWork find(const StepPlan& plan, const StagePrograms& programs, int64_t num_ranks,
                const Slowdown& slowdown = {}) const;
  /// Of one program, or a part of its run, with `skew` times the rows of balanced routing.
  ProgramTimes find(const Executable& executable, const RunPart& part, double skew) const;
  /// Of a step of so many ranks.
  ClockOptions clock_options(int64_t num_ranks) const;
  const Hardware& hardware() const { return hardware_; }
  const SimulationOptions& options() const { return options_; }

 private:
  double skew_of(const Task& task, const StagePrograms& programs, double processor_share) const;
  double node_seconds(const Executable& executable, const Node& node, double skew,
                      int64_t pieces) const;
  double exchange_seconds(const Executable& executable, const Node& node, const Communicator& group,
                          double skew) const;
  double memory_seconds(const Task& task) const;
  double host_update_seconds(const Task& task, int64_t num_ranks) const;
  TaskWork exchange_of(const StepPlan& plan, const Task& task) const;
  TaskWork other_of(const StepPlan& plan, const Task& task, int64_t num_ranks) const;

  Hardware hardware_;
  SimulationOptions options_;
  KernelTimes kernels_;
  LinkTimes links_;
};

}  // namespace tessera
