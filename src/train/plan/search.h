#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/plan/candidates.h"
#include "train/plan/simulated_step.h"

namespace tessera {

/// A configuration and what a step of it comes to.
struct PlannedLayout {
  Settings settings;
  SimulatedStep step;
  /// Whether every rank keeps to its device's memory, and its node's hosts to theirs.
  bool fits = false;
};

struct PlanResult {
  std::vector<PlannedLayout> layouts;  ///< that fit, the fastest first
  /// Where none fits: the one whose fullest rank takes the least.
  std::optional<PlannedLayout> least;
  int64_t num_judged = 0;   ///< configurations that the program takes
  int64_t num_refused = 0;  ///< that it does not
  double model_flops = 0;   ///< of a sequence
};

/// Told how far a search is, in [0, 1].
using PlanProgress = std::function<void(double share)>;

/// Called by the thread that asked for the search now and then; what it throws ends the search.
using PlanPause = std::function<void()>;

/// The fastest ways to train on hardware, as simulated: layouts with one sequence at a time are
/// judged by few of their stages; the best of them with other micro-batches and chunks; of all
/// these the best with stages cut by time, where even ones are unequal; the best of these with
/// merged passes; the best of all are simulated with every stage, and where activations do not fit
/// the memory, values are chosen that all layers compute again or offload (search_policy).
/// Deterministic. Throws UserError where nothing at all can be trained so.
PlanResult search_plan(const SearchSpace& space, const StepWork& work,
                       const PlanProgress& progress = {}, const PlanPause& pause = {});

/// One configuration as it is, with a policy for its memory where it leaves that open.
PlannedLayout plan_layout(const Settings& settings, int64_t num_ranks, const StepWork& work,
                          double flops, bool may_choose, const PlanPause& pause = {});

/// Bytes that a rank may take: train.memory_limit, or else what the hardware has less what no
/// prediction knows.
int64_t memory_of(const Settings& settings, const Hardware& hardware);

}  // namespace tessera
