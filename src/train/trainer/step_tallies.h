#pragma once

#include <vector>

#include "comm/communicator.h"
#include "model/run/rounding_tables.h"
#include "model/weights/expert_states.h"
#include "train/metrics/step_record.h"

namespace tessera {

/// Gives a rank's layers the scales of the next step.
void set_scales(const RoundingHistory& history, RoundingTables& tables);

/// What roundings by delayed scales saw in a step, a tally for each layer of the history: each rank
/// has tallied what its own layers round, and after this all have what all ranks saw. All call;
/// where the history is empty nothing is exchanged.
std::vector<LayerTally> collect_tallies(const RoundingHistory& history,
                                        const RoundingTables& tables, Communicator& world);

/// The same for a user.
std::vector<RoundingCounts> count_roundings(const RoundingHistory& history,
                                            const std::vector<LayerTally>& tallies);
/// The same for the record of a step, without layers where nothing is beyond its scale.
void add_roundings(const std::vector<RoundingCounts>& layers, StepRecord& record);

/// What an objective tells of a step; its loss takes the place of the sum that the step lowers,
/// which is the objective's in its gradient alone.
void add_objective(std::vector<NamedNumber> numbers, StepRecord& record);

/// The tokens of a step that came to each expert, by layer.
std::vector<std::vector<int64_t>> list_loads(const std::vector<ExpertState>& experts);
/// The same for the record of a step; `loads` are those of all MoE layers.
std::vector<ExpertLoad> loads_by_layer(std::vector<std::vector<int64_t>> loads,
                                       const ModelConfig& model);

}  // namespace tessera
