#pragma once

#include <span>

#include "train/plan/simulated_step.h"

namespace tessera {

/// What a micro-batch computes in both passes, in seconds, by what pipelines cut.
struct ModelTimes {
  std::vector<double> layers;  ///< decoder layers
  double first = 0;            ///< before them: the embedding
  double last = 0;             ///< behind them: multi-token prediction, head and loss

  /// Of a chunk.
  double of(const PipelineChunk& chunk) const;
};

/// Of a rank's plan of one step: seconds of its runs go to what they compute.
struct RankTimes {
  const StepPlan& plan;
  const PlanWork& work;
  std::span<const PipelineChunk> chunks;  ///< of the rank
};

/// The sums over ranks' plans of one micro-batch. Layers that none of them has take the mean of
/// those of their kind.
ModelTimes sum_times(const ModelConfig& config, std::span<const RankTimes> ranks);

/// The busiest stage's seconds for a micro-batch.
double busiest_stage(const ModelTimes& times, const PipelineLayout& layout);

/// Layers in contiguous chunks, of which the longest is as short as can be and, of such, the
/// squares add up to the least. Each chunk has a layer; that of the loss may have none. There are
/// at least as many layers as chunks.
PipelineLayout balance_stages(const ModelTimes& times, int64_t num_stages, int64_t chunks_per_stage,
                              const LayerCounts& layers);

}  // namespace tessera
