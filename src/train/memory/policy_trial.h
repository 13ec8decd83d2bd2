#pragma once

#include <map>
#include <string>
#include <vector>

#include "step/simulate_plan.h"
#include "train/memory/memory_limit.h"
#include "train/memory/memory_prediction.h"
#include "train/memory/planned_rank.h"

namespace tessera {

/// What a policy comes to on one rank, by prediction.
struct PolicyCost {
  MemoryPrediction memory;  ///< of what the rank takes itself, as `inspect --memory` shows it
  double seconds = 0;       ///< of its passes in a step (estimate_passes)
  int64_t skewed = 0;       ///< bytes that kExpectedSkew adds, where the limit leaves room for that

  int64_t bytes() const { return memory.total(); }
  /// Whether they are within a limit, with all that it leaves room for.
  bool fits(const MemoryLimit& limit) const {
    const bool host_has_room =
        memory.activations.offloaded == 0 || memory.beside() <= limit.host_bytes;
    return host_has_room && bytes() + skewed <= limit.bytes - limit.spare;
  }
};

/// Seconds of a planned rank's passes in a step, by estimate.
double estimate_passes(const Settings& settings, const PlannedRank& rank);

/// What one layer comes to.
struct LayerCost {
  int64_t bytes = 0;      ///< kept from the forward to the backward pass, routing being balanced
  int64_t transient = 0;  ///< of the working memory that all layers share
  double seconds = 0;     ///< of all its passes for a micro-batch
};

/// Judges policies on one planned rank by the compiler's own programs, their placement and the
/// prediction of memory. Programs are compiled once, so a trial takes about a millisecond. All
/// references must outlive it; not thread-safe.
class PolicyTrial {
 public:
  /// Costs have `skewed` where `leaves_room`.
  PolicyTrial(const Settings& settings, const PlannedRank& rank, const ModelState::Bytes& state,
              bool leaves_room = false);

  const StagePrograms& programs() const { return rank_.model.programs(); }
  const PlannedRank& rank() const { return rank_; }
  const MachineRates& rates() const { return rates_; }
  /// The model's layers that this rank has, ascending.
  std::vector<int64_t> layers() const;
  /// Of layers that nothing is offloaded of.
  LayerCost judge_layer(const LayerProgramKey& key) const;
  /// With the names that `policy` has for layers of this rank; they are not checked.
  PolicyCost judge(const SavedPolicy& policy) const;
  /// The layers of this rank with copies in a step.
  std::vector<int64_t> find_offloading(const SavedPolicy& policy) const;

 private:
  TrainingModel make_model(const SavedPolicy& policy) const;

  const Settings& settings_;
  const PlannedRank& rank_;
  MachineRates rates_;
  ModelState::Bytes state_;
  int64_t snapshot_ = 0;
  bool leaves_room_ = false;
  mutable std::map<LayerProgramKey, LayerCost> judged_;  // layers, each once
};

}  // namespace tessera
