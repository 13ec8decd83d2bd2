#include "train/run_layout.h"

#include <algorithm>
#include <set>

namespace tessera {
namespace {

/// Micro-batches of a step for each data-parallel rank.
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

std::vector<PipelineChunk> stage_chunks(const PipelineLayout& pipeline, int64_t stage) {
  std::vector<PipelineChunk> chunks;
  for (size_t i = static_cast<size_t>(stage); i < pipeline.chunks.size();
       i += static_cast<size_t>(pipeline.num_stages))
    chunks.push_back(pipeline.chunks[i]);
  return chunks;
}

PipelinePlace join_pipeline(World& world, const Layout& layout, int64_t num_chunks) {
  const auto ranks = layout.group(world.rank(), Axis::kPp);
  return {.activations = world.make_group("pp", ranks),
          .gradients = world.make_group("pp_gradients", ranks),
          .num_chunks = num_chunks};
}

/// The tied embedding is in the first and in the last stage.
bool shares_ends(const Settings& settings) {
  return settings.model.tie_embeddings && settings.parallel.layout.pp > 1;
}

/// Ranks of this rank's stage that hold the same part of a dense weight.
std::vector<int64_t> dense_replicas(const Layout& layout, int64_t rank, int64_t tp_copies) {
  const std::array axes = {Axis::kTp, Axis::kCp, Axis::kDp};
  const int64_t share = layout.coordinate(rank, Axis::kTp) / tp_copies;
  std::vector<int64_t> ranks = layout.group(rank, axes);
  std::erase_if(ranks, [&](int64_t other) {
    return layout.coordinate(other, Axis::kTp) / tp_copies != share;
  });
  return ranks;
}

/// Their counterparts in the first and in the last stage.
std::vector<int64_t> at_both_ends(const Layout& layout, const std::vector<int64_t>& stage) {
  std::vector<int64_t> ranks;
  for (const int64_t rank : stage) {
    const auto stages = layout.group(rank, Axis::kPp);
    ranks.push_back(stages.front());
    ranks.push_back(stages.back());
  }
  std::ranges::sort(ranks);
  return ranks;
}

bool is_end(const Layout& layout, int64_t rank) {
  const int64_t stage = layout.coordinate(rank, Axis::kPp);
  return stage == 0 || stage == layout.degree(Axis::kPp) - 1;
}

}  // namespace

RunLayout make_run_layout(const Settings& settings, World& world) {
  const ParallelSpec& parallel = settings.parallel;
  const Layout layout(parallel.layout, world.size());
  const PipelineLayout pipeline = make_pipeline_layout(parallel, settings.model.num_layers);
  const int64_t stage = layout.coordinate(world.rank(), Axis::kPp);
  RunLayout run{.layout = layout,
                .world = world.make_world_group(),
                .part = {.groups = join_stage_groups(world, layout, parallel),
                         .chunks = stage_chunks(pipeline, stage),
                         .split_weights = parallel.split_weights},
                .pipeline = join_pipeline(world, layout, pipeline.chunks_per_stage()),
                .num_micro_batches = count_micro_batches(settings, layout)};
  run.schedule = pipeline_spec(parallel, pipeline, run.num_micro_batches);
  run.steps = make_pipeline_schedule(run.schedule)[static_cast<size_t>(stage)];
  run.part.in_flight = count_in_flight(run.steps, run.pipeline.num_chunks);
  return run;
}

ReplicaGroups::ReplicaGroups(const Settings& settings, const RunLayout& run, World& world)
    : shares_ends_(shares_ends(settings)) {
  const Layout& layout = run.layout;
  const int64_t tp = layout.degree(Axis::kTp);
  const int64_t kv_copies = std::clamp<int64_t>(tp / settings.model.kv_heads(), 1, tp);
  for (const int64_t copies : std::set<int64_t>{1, kv_copies, tp}) {
    const auto ranks = dense_replicas(layout, run.rank(), copies);
    groups_.push_back(
        {world.make_group(fmt::format("dense_replicas_{}", copies), ranks), {.tp_copies = copies}});
  }
  if (shares_ends_ && is_end(layout, run.rank())) {
    const auto ranks = at_both_ends(layout, dense_replicas(layout, run.rank(), 1));
    groups_.push_back({world.make_group("tied_replicas", ranks), {}, true});
  }
  groups_.push_back({world.make_group("expert_replicas", layout.group(run.rank(), Axis::kEdp)),
                     {.expert = true}});
}

size_t ReplicaGroups::find(const ParameterSpec& spec) const {
  const WeightPlacement& placement = spec.placement;
  const bool both_ends = shares_ends_ && spec.name == "embedding.weight";
  const auto found = std::ranges::find_if(groups_, [&](const Group& group) {
    if (group.both_ends || both_ends) return group.both_ends == both_ends;
    return group.placement.expert == placement.expert &&
           (placement.expert || group.placement.tp_copies == placement.tp_copies);
  });
  ensure(found != groups_.end(), "no group of ranks holds '{}' alike", spec.name);
  return static_cast<size_t>(found - groups_.begin());
}

}  // namespace tessera
