#pragma once

#include <optional>
#include <vector>

#include "model/run/saved_placement.h"
#include "model/run/stage_programs.h"
#include "optim/sharded/step_exchanges.h"
#include "parallel/pipeline_schedule.h"
#include "parallel/stage_groups.h"
#include "step/step_plan.h"

namespace tessera {

/// What an optimizer exchanges: at most one of the two.
struct StepSharding {
  std::optional<ReplicatedExchanges> replicated = std::nullopt;
  std::optional<ShardedExchanges> sharded = std::nullopt;

  bool updates() const { return replicated || sharded; }
};

/// What a step is built of. Communicators may be planned only.
struct StepRequest {
  const StagePrograms& programs;
  const ParameterSet& parameters;  ///< names alone, in the optimizer's order
  PipelinePlace pipeline;
  std::vector<PipelineStep> steps;  ///< of this rank's stage
  CommunicatorPtr world;
  StepSharding sharding = {};
  /// The model's; null: slabs have memory of their own, and nothing is offloaded.
  const SavedPlacement* placement = nullptr;
};

/// The plan of a training step: micro-batches forward and backward in the order of the schedule,
/// their messages between stages (receives posted a run ahead), and, where something is sharded,
/// what brings weights, takes gradients away and updates. Without sharding the step ends with the
/// micro-batches' results.
StepPlan build_step(const StepRequest& request);

/// The plan of one micro-batch forward through all chunks, for its loss alone.
StepPlan build_evaluation(const StepRequest& request);

/// Moves the starts of receives forward: before the run before the one that they are behind, as far
/// as their buffers are free there. Their order among themselves stays.
StepPlan post_receives_ahead(StepPlan plan);

}  // namespace tessera
