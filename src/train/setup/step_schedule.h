#pragma once

#include "parallel/pipeline_order.h"
#include "train/setup/settings.h"

namespace tessera {

/// In which order a step's passes run: what train.schedule says.
enum class StepSchedule : uint8_t {
  kAsBuilt,  ///< one behind the other, by parallel.pipeline_schedule
  kMerged,   ///< a forward pass beside a backward pass (PipelineSpec::merges_passes)
  kAuto,     ///< one of the two (choose_schedule); as built where nobody chose
  kFile,     ///< as a file has it
};

/// Throws UserError for what is neither a name nor a file.
StepSchedule step_schedule(const TrainSettings& train);

/// Whether any passes are merged. Throws as step_schedule and parse_pipeline do.
bool merges_passes(const TrainSettings& train);

/// The passes of all stages: those of the file, or those of the spec. Throws UserError for a file
/// that is not an order of such passes.
PipelineOrder make_order(const TrainSettings& train, const PipelineSpec& spec);

}  // namespace tessera
