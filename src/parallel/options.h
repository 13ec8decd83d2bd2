#pragma once

#include <string>

#include "core/config.h"
#include "parallel/layout.h"
#include "parallel/pipeline_layout.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

/// How a model is spread over ranks, as configured.
struct ParallelSpec {
  LayoutSpec layout;
  PipelineKind schedule = PipelineKind::kOneFOneB;
  int64_t chunks_per_stage = 1;
  std::string pipeline_layout;  ///< see parse_pipeline_layout; empty: even
  bool split_weights = false;
};

/// Binds every key of [parallel].
void add_parallel_options(ConfigSchema& schema, ParallelSpec& parallel);

/// The ranks that the degrees ask for; DP counts 1 where it is left open.
int64_t least_ranks(const ParallelSpec& parallel);

/// What each chunk of the pipeline holds of a model of `num_layers` layers.
PipelineLayout make_pipeline_layout(const ParallelSpec& parallel, int64_t num_layers);

/// The schedule of `num_micro_batches` through that pipeline.
PipelineSpec pipeline_spec(const ParallelSpec& parallel, const PipelineLayout& layout,
                           int64_t num_micro_batches);

}  // namespace tessera
