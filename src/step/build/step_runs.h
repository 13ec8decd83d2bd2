#pragma once

#include <vector>

#include "model/run/pass_order.h"
#include "model/weights/parameters.h"
#include "model/weights/weight_store.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

/// A program's run in a step, or a part of it.
struct StepRun {
  ProgramRef ref;
  RunPart part;
  const Executable* executable = nullptr;
  ProgramParameters parameters;
  int64_t chunk = 0;  ///< of this rank
  int64_t place = 0;
  int64_t micro_batch = 0;
};

/// A pass of a step, or a part of it, with its place and its runs [first_run, last_run). Of passes
/// that are merged (PipelineStep::merged) the forward one has the runs of both, cut into parts.
struct StepPass {
  PipelineStep step;
  int64_t place = 0;
  bool begins = false;  ///< the first of its micro-batch in its chunk: takes the place
  bool ends = false;    ///< the end of the last: gives it back
  size_t first_run = 0;
  size_t last_run = 0;
};

struct StepPasses {
  std::vector<StepPass> passes;
  std::vector<StepRun> runs;  ///< of all passes, in order
};

/// Expands a stage's schedule into runs of programs, and gives each micro-batch the lowest free
/// place of its chunk. Where layers take turns (StagePart::layers_in_turn), a layer's backward runs
/// of all micro-batches follow one another; passes that are merged run as merge_runs has it. Of
/// `parameters` only names are read; where it is null, the runs have none.
StepPasses list_step_passes(const StagePrograms& programs, const ParameterSet* parameters,
                            const std::vector<PipelineStep>& steps);
/// The same for one micro-batch through all chunks whose loss is all that is wanted.
StepPasses list_evaluation_passes(const StagePrograms& programs, const ParameterSet& parameters);

}  // namespace tessera
