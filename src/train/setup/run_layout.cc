#include "train/setup/run_layout.h"

#include <algorithm>

#include "train/setup/context_batches.h"
#include "train/setup/replica_groups.h"
#include "train/setup/size_check.h"
#include "train/setup/step_schedule.h"

namespace tessera {
namespace {

std::vector<PipelineChunk> stage_chunks(const PipelineLayout& pipeline, int64_t stage) {
  std::vector<PipelineChunk> chunks;
  for (size_t i = stage; i < pipeline.chunks.size(); i += pipeline.num_stages)
    chunks.push_back(pipeline.chunks[i]);
  return chunks;
}

PipelinePlace join_pipeline(World& world, const Layout& layout, int64_t num_chunks) {
  const auto ranks = layout.group(world.rank(), Axis::kPp);
  return {.activations = world.make_group("pp", ranks),
          .gradients = world.make_group("pp_gradients", ranks),
          .num_chunks = num_chunks};
}

}  // namespace

int64_t count_micro_batches(const Settings& settings, const Layout& layout) {
  const TrainSettings& train = settings.train;
  const int64_t dp = layout.degree(Axis::kDp);
  const int64_t wave = train.micro_batch * dp;
  require(
      train.global_batch % wave == 0,
      "train.global_batch {} is not a multiple of train.micro_batch {} x {} data-parallel ranks; "
      "the nearest is {}",
      train.global_batch, train.micro_batch, dp,
      std::max<int64_t>((train.global_batch + wave / 2) / wave, 1) * wave);
  return train.global_batch / wave;
}

int64_t count_loss_parts(const Settings& settings, int64_t num_micro_batches,
                         const RunLayout& run) {
  if (!settings.parallel.dynamic_cp) return num_micro_batches * run.data_ranks();
  return settings.train.num_micro_batches() * run.layout.degree(Axis::kCp);
}

void schedule_micro_batches(RunLayout& run, const Settings& settings) {
  const PipelineLayout pipeline =
      make_pipeline_layout(settings.parallel, settings.model.layer_counts());
  run.num_micro_batches = count_micro_batches(settings, run.layout);
  run.schedule = pipeline_spec(settings.parallel, pipeline, run.num_micro_batches);
  if (settings.shard.release_gradients) run.schedule.kind = PipelineKind::kGpipe;
  run.schedule.merges_passes = run.part.merges_passes;
  check_schedule(run.schedule);
  run.steps =
      make_order(settings.train, run.schedule)[run.layout.coordinate(run.rank(), Axis::kPp)];
}

RunLayout make_run_layout(const Settings& settings, World& world) {
  const ParallelSpec& parallel = settings.parallel;
  const Layout layout(parallel.layout, world.size());
  check_sharding(settings, layout);
  check_contexts(settings, layout);
  const PipelineLayout pipeline = make_pipeline_layout(parallel, settings.model.layer_counts());
  const int64_t stage = layout.coordinate(world.rank(), Axis::kPp);
  RunLayout run{.layout = layout,
                .world = world.make_world_group(),
                .part = {.groups = join_stage_groups(world, layout, parallel),
                         .chunks = stage_chunks(pipeline, stage),
                         .split_weights = parallel.split_weights,
                         .layers_in_turn = settings.shard.release_gradients,
                         .merges_passes = merges_passes(settings.train)},
                .pipeline = join_pipeline(world, layout, pipeline.chunks_per_stage())};
  schedule_micro_batches(run, settings);
  run.part.in_flight = count_in_flight(run.steps, run.pipeline.num_chunks);
  return run;
}

BatchShape batch_shape(const Settings& settings) {
  ProductPrecision products = settings.products();
  // They pay where several micro-batches read them, and need weights that stay.
  products.keeps_copies = settings.precision.weight_copies &&
                          settings.train.num_micro_batches() > 1 &&
                          settings.shard.scope != ShardScope::kFull;
  products.fp8_weights = settings.precision.fp8_weights;
  return {
      .num_tokens = settings.train.micro_batch * settings.data.sequence_length,
      .max_sequences = settings.train.micro_batch,
      .sequence_length = settings.data.sequence_length,
      .dtype = settings.train.dtype(),
      .products = products,
      .qk_clip = settings.qk_clip,
      .weighted_tokens = settings.train.objective != Objective::kNextToken,
      .replays_routing = settings.train.objective == Objective::kGrpo && settings.rl.router_replay,
      .trains = true};
}

}  // namespace tessera
