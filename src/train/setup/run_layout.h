#pragma once

#include <vector>

#include "comm/communicator.h"
#include "model/run/training_model.h"
#include "parallel/layout.h"
#include "parallel/pipeline_schedule.h"
#include "train/setup/settings.h"

namespace tessera {

/// What one rank is to do in a run: its place in the layout, its groups, its part of the model and
/// of each step's micro-batches.
struct RunLayout {
  Layout layout;
  CommunicatorPtr world;
  ModelPart part;
  PipelinePlace pipeline;
  PipelineSpec schedule;
  std::vector<PipelineStep> steps;  ///< this stage's
  int64_t num_micro_batches = 1;    ///< of a step, for each data-parallel rank

  int64_t rank() const { return world->rank(); }
  int64_t num_ranks() const { return world->size(); }
  /// The data-parallel ranks, each with micro-batches of its own, and this rank's place among them.
  int64_t data_ranks() const { return part.groups.dp->size(); }
  int64_t data_rank() const { return part.groups.dp->rank(); }
  /// The number in the step of this rank's micro-batch `i`.
  int64_t micro_batch(int64_t i) const { return i * data_ranks() + data_rank(); }
};

/// Lays a run out over the ranks of the world. All ranks must call. Throws UserError, the same on
/// all ranks, for what does not fit.
RunLayout make_run_layout(const Settings& settings, World& world);

/// Parts by which the losses that are means over a micro-batch count in a step of
/// `num_micro_batches` a rank: the micro-batches, or with dynamic context parallelism a rank's
/// tokens of a micro-batch.
int64_t count_loss_parts(const Settings& settings, int64_t num_micro_batches, const RunLayout& run);

/// Micro-batches of a step for each data-parallel rank. Throws UserError where the global batch
/// cannot be cut so.
int64_t count_micro_batches(const Settings& settings, const Layout& layout);

/// Gives the layout the passes of as many micro-batches as the settings have, which may differ from
/// those that it was made for in nothing else.
void schedule_micro_batches(RunLayout& run, const Settings& settings);

/// A micro-batch of the settings, whose sequences are not packed of several documents.
BatchShape batch_shape(const Settings& settings);

}  // namespace tessera
