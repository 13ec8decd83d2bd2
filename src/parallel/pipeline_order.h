#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "parallel/pipeline_schedule.h"

namespace tessera {

/// Each stage's passes in the order in which it takes them.
using PipelineOrder = std::vector<std::vector<PipelineStep>>;

/// Reads what list_pipeline writes: a line a stage, "stage 0 F0.0 F0.1|B0.0", stages counted up
/// from 0; empty lines and what stands behind a "#" are left out. `name` stands for the text in
/// messages. Throws UserError for what is not of that form.
PipelineOrder parse_pipeline(std::string_view text, const std::string& name);

/// Proves that an order gives the gradients of make_pipeline_schedule(spec), to the bit where no
/// head and embedding of one stage share a weight: each stage does every pass once, none before
/// what it needs, those of a chunk by growing micro-batches; what two stages send each other is
/// received in the order in which it is sent; passes that are merged are a forward and a backward
/// one that do not need each other; and no stage waits forever. Throws UserError with the stage and
/// the pass. Which kind of schedule the spec names, and whether that merges passes, does not
/// matter.
void check_pipeline(const PipelineSpec& spec, const PipelineOrder& order, const std::string& name);

bool merges_passes(const PipelineOrder& order);

}  // namespace tessera
