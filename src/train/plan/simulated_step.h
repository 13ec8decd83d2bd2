#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "sim/step_work.h"
#include "train/memory/memory_prediction.h"
#include "train/memory/planned_rank.h"

namespace tessera {

/// Where a rank's time of a step goes, in seconds; together they are the step.
struct StepShares {
  double computed = 0;
  double exposed = 0;    ///< exchanges and messages on their way, with nothing to compute beside
  double idle = 0;       ///< waits for ranks that come later: a pipeline's bubble, uneven stages
  double copies = 0;     ///< waits for copies from and to the host's memory
  double host = 0;       ///< waits until the host gave the device what comes next
  double exchanged = 0;  ///< exchanges under way, exposed or hidden; no part of the step
  std::map<std::string, double> exposed_by = {};   ///< group's name
  std::map<std::string, double> computed_by = {};  ///< operator's name; the rest is no program's

  double total() const { return computed + exposed + idle + copies + host; }
};

/// The first rank of a pipeline stage, of which all others do as much.
struct SimulatedStage {
  int64_t rank = 0;
  MemoryPrediction memory;
  StepShares shares;
};

/// A training step of a configuration on hardware that need not be there.
struct SimulatedStep {
  double seconds = 0;
  double flops = 0;   ///< model FLOPs of all ranks
  double tokens = 0;  ///< of all ranks
  int64_t num_ranks = 1;
  std::vector<SimulatedStage> stages;

  double tokens_per_second() const { return tokens / seconds; }
  /// Of each device.
  double flops_per_second() const { return flops / seconds / static_cast<double>(num_ranks); }
  /// Of the stage that takes the most.
  const SimulatedStage& fullest() const;
  /// The stage that waits least.
  const SimulatedStage& slowest() const;
};

/// The plans of a step's stages, or of all ranks, with what their tasks take and when they are
/// done.
struct SimulatedPlans {
  std::vector<StepPlan> plans;
  std::vector<PlanWork> works;
  std::vector<RankClock> clocks;
};

/// A step's stages, each by its first rank, that are compiled once: memory can be looked at before
/// the clock is run. Of many micro-batches only some are run: every further one takes the same
/// time. A slow rank slows its whole stage.
class StageSimulation {
 public:
  /// Throws UserError for what training would refuse.
  StageSimulation(const Settings& settings, int64_t num_ranks, std::vector<int64_t> ranks);

  /// Of each of the ranks.
  const std::vector<MemoryPrediction>& memory() const { return memory_; }
  int64_t most_bytes() const;
  /// The rank that takes those.
  int64_t fullest() const;

  /// `flops` are those of a sequence (flops_of).
  SimulatedStep run(const StepWork& work, double flops);
  /// As if no other stage kept these waiting, with fewer micro-batches: without the time in which a
  /// pipeline fills and empties.
  SimulatedStep run_alone(const StepWork& work, double flops);
  /// The plans of so many micro-batches.
  SimulatedPlans run_plans(const StepWork& work, int64_t micro_batches);
  /// What of the model the first of the ranks holds, the second and so on.
  std::span<const PipelineChunk> chunks(size_t which) const {
    return ranks_[which].model.programs().part.chunks;
  }

 private:
  struct MicroBatches;
  MicroBatches split(int64_t least) const;
  SimulatedStep run(const StepWork& work, double flops, const MicroBatches& batches);
  Settings with_micro_batches(int64_t count) const;
  Slowdown slowdown_of(const SimulationOptions& options, int64_t rank) const;

  Settings settings_;
  int64_t num_ranks_;
  Layout layout_;
  std::vector<int64_t> ids_;
  std::vector<PlannedRank> ranks_;
  std::vector<MemoryPrediction> memory_;
};

/// The step of each pipeline stage's first rank by the clock. Throws as StageSimulation does.
SimulatedStep simulate_step(const Settings& settings, int64_t num_ranks, const StepWork& work,
                            double flops);

/// The plans of at most `most_micro_batches` micro-batches.
SimulatedPlans simulate_plans(const Settings& settings, int64_t num_ranks, const StepWork& work,
                              int64_t most_micro_batches);

/// The same of every rank, with as many micro-batches as simulate_plans has.
SimulatedPlans simulate_all_plans(const Settings& settings, int64_t num_ranks, const StepWork& work,
                                  int64_t most_micro_batches);

/// validate(), but the settings need no data.
void validate_without_data(Settings settings);

/// The first rank of each pipeline stage.
std::vector<int64_t> first_ranks(const Settings& settings, int64_t num_ranks);

/// Model FLOPs of a sequence, forward and backward.
double flops_of(const Settings& settings);

}  // namespace tessera
