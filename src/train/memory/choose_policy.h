#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/memory/policy_trial.h"
#include "train/setup/settings.h"

namespace tessera {

/// Chosen entries, one or those of values that one node makes, with what they come to beside the
/// others: on the rank where it is most.
struct ChosenEntry {
  bool offloaded = false;  ///< else computed again
  std::string entry;       ///< as in train.offload or train.recompute; several with commas
  int64_t saved_bytes = 0;
  double seconds = 0;  ///< of a step
};

/// What a pipeline stage comes to, on the rank that takes the most.
struct ChosenStage {
  int64_t rank = 0;
  PolicyCost kept;  ///< with what the configuration says alone
  PolicyCost chosen;
};

/// What was chosen for a limit, as a configuration: with these lists in place of its own, and no
/// limit, a run has the same plan.
struct PolicyChoice {
  MemoryLimit limit;
  std::vector<std::string> recompute;  ///< train.recompute, what was given in front
  std::vector<std::string> offload;    ///< train.offload likewise
  std::vector<ChosenEntry> entries;    ///< what was not given
  std::vector<ChosenStage> stages;
};

/// What a run of `num_ranks` ranks computes again or offloads so that each keeps to the limit, as
/// predicted. What train.recompute and train.offload say stays; the rest is chosen for each
/// pipeline stage by itself (search_policy), for the stage's rank that holds the most weights and
/// state. Of a device's own limit, stages that fit as they are stay so, and room is left as far as
/// there is any. A pure function of its arguments. Throws UserError where a stage cannot keep to
/// the limit, with the least bytes found and their parts.
PolicyChoice choose_policy(const Settings& settings, int64_t num_ranks, const Backend& backend,
                           const BatchShape& shape, const MemoryLimit& limit);

/// What train.memory_limit asks for where nothing of a run is there but its settings: for bytes
/// that it names, or those of this machine's GPU where a stage does not fit it; else nothing.
std::optional<PolicyChoice> plan_policy(const Settings& settings, int64_t num_ranks,
                                        const Backend& backend, const BatchShape& shape);

/// Puts the choice into the settings, whose limit stays as it was.
void apply(const PolicyChoice& choice, TrainSettings& train);

/// "612.3 ms", "1300 s".
std::string format_estimate(double seconds);

/// Some lines: the limit, each entry with bytes and milliseconds, the whole, and both lists.
std::string describe(const PolicyChoice& choice);

/// The same as part of a configuration: what it comes to in comments, and the lists.
std::string write_toml(const PolicyChoice& choice);

}  // namespace tessera
