#include "train/setup/replica_groups.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/text/nearest.h"

namespace tessera {
namespace {

/// The stages that have the embedding, in their order: the first, those of multi-token prediction,
/// and, where it is tied, the last.
std::vector<int64_t> embedding_stages(const Settings& settings) {
  const PipelineLayout pipeline =
      make_pipeline_layout(settings.parallel, settings.model.layer_counts());
  std::set<int64_t> stages;
  for (int64_t chunk = 0; chunk < std::ssize(pipeline.chunks); ++chunk) {
    const PipelineChunk& part = pipeline.chunks[chunk];
    if (part.embedding || part.num_mtp > 0 || (part.loss && settings.model.tie_embeddings))
      stages.insert(chunk % pipeline.num_stages);
  }
  return {stages.begin(), stages.end()};
}

/// Ranks of this rank's stage that hold the same part of a dense weight, DP counting slowest.
std::vector<int64_t> dense_replicas(const Layout& layout, int64_t rank, int64_t tp_copies) {
  const std::array axes = {Axis::kTp, Axis::kCp, Axis::kDp};
  const int64_t share = layout.coordinate(rank, Axis::kTp) / tp_copies;
  std::vector<int64_t> ranks = layout.group(rank, axes);
  std::erase_if(ranks, [&](int64_t other) {
    return layout.coordinate(other, Axis::kTp) / tp_copies != share;
  });
  return ranks;
}

/// Of each group of such ranks within the stage one, this rank of its own.
std::vector<int64_t> dense_parts(const Layout& layout, int64_t rank, int64_t tp_copies) {
  const int64_t copy = layout.coordinate(rank, Axis::kTp) % tp_copies;
  std::vector<int64_t> ranks = layout.group(rank, Axis::kTp);
  std::erase_if(ranks, [&](int64_t other) {
    return layout.coordinate(other, Axis::kTp) % tp_copies != copy;
  });
  return ranks;
}

/// Their counterparts in each of the stages.
std::vector<int64_t> at_stages(const Layout& layout, const std::vector<int64_t>& ranks,
                               const std::vector<int64_t>& stages) {
  std::vector<int64_t> result;
  for (const int64_t stage : stages) {
    for (const int64_t rank : ranks) result.push_back(layout.group(rank, Axis::kPp)[stage]);
  }
  return result;
}

/// All groups of a rank, of one level.
std::vector<ReplicaRanks> list_flat(const Settings& settings, const Layout& layout, int64_t rank) {
  std::vector<ReplicaRanks> groups;
  const int64_t tp = layout.degree(Axis::kTp);
  const auto kv_copies = [&](LayerKind kind) {
    return std::clamp<int64_t>(tp / settings.model.of_layer(kind).kv_heads(), 1, tp);
  };
  for (const int64_t copies :
       std::set<int64_t>{1, kv_copies({}), kv_copies({.window = true}), tp}) {
    groups.push_back({.name = fmt::format("dense_replicas_{}", copies),
                      .placement = {.tp_copies = copies},
                      .ranks = dense_replicas(layout, rank, copies),
                      .parts = dense_parts(layout, rank, copies)});
  }
  const auto stages = embedding_stages(settings);
  const int64_t stage = layout.coordinate(rank, Axis::kPp);
  if (stages.size() > 1 && std::ranges::find(stages, stage) != stages.end()) {
    groups.push_back({.name = "embedding_replicas",
                      .placement = {},
                      .num_stages = std::ssize(stages),
                      .ranks = at_stages(layout, dense_replicas(layout, rank, 1), stages),
                      .parts = dense_parts(layout, rank, 1)});
  }
  groups.push_back({.name = "expert_replicas",
                    .placement = {.expert = true},
                    .ranks = layout.group(rank, Axis::kEdp),
                    .parts = layout.group(rank, Axis::kEtp)});
  return groups;
}

/// How many copies of the dense weights full sharding keeps in a stage.
int64_t count_copies(const Settings& settings, const Layout& layout) {
  const int64_t dp = layout.degree(Axis::kDp);
  return settings.shard.group == 0 ? 1 : dp / settings.shard.group;
}

/// The group's ranks, those of each stage by themselves.
std::vector<std::span<int64_t>> by_stage(ReplicaRanks& group) {
  const std::span<int64_t> all = group.ranks;
  const size_t of_stage = all.size() / static_cast<size_t>(group.num_stages);
  std::vector<std::span<int64_t>> stages;
  for (size_t first = 0; first < all.size(); first += of_stage)
    stages.push_back(all.subspan(first, of_stage));
  return stages;
}

/// Experts have as many copies as their own data parallelism can be cut into.
int64_t count_sharing(ReplicaRanks& group, int64_t copies) {
  const int64_t of_stage = std::ssize(by_stage(group)[0]);
  return of_stage / (group.placement.expert ? std::gcd(copies, of_stage) : copies);
}

/// How many of the ranks are in the same run of `reduce_group` neighbouring ranks; 0 where that
/// differs from run to run.
int64_t count_near(std::span<const int64_t> ranks, int64_t reduce_group) {
  std::map<int64_t, int64_t> counts;
  for (const int64_t rank : ranks) ++counts[rank / reduce_group];
  const int64_t first = counts.begin()->second;
  const bool even = std::ranges::all_of(counts, [&](const auto& c) { return c.second == first; });
  return even ? first : 0;
}

/// The same for a group, whose stages must agree.
int64_t count_near(ReplicaRanks& group, int64_t reduce_group) {
  const auto stages = by_stage(group);
  const int64_t first = count_near(stages.front(), reduce_group);
  const bool even = std::ranges::all_of(
      stages, [&](const auto& stage) { return count_near(stage, reduce_group) == first; });
  return even ? first : 0;
}

bool cuts_evenly(const Settings& settings, const Layout& layout, int64_t reduce_group) {
  for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
    for (ReplicaRanks& group : list_flat(settings, layout, rank)) {
      const bool seen = std::ranges::min(group.ranks) < rank;
      if (!seen && count_near(group, reduce_group) == 0) return false;
    }
  }
  return true;
}

[[noreturn]] void refuse_reduce_group(const Settings& settings, const Layout& layout) {
  std::vector<int64_t> choices;
  for (int64_t size = 1; size <= layout.num_ranks(); ++size) {
    if (cuts_evenly(settings, layout, size)) choices.push_back(size);
  }
  user_error(
      "optim.reduce_group {}: of the ranks that hold a weight alike, some such run of neighbouring "
      "ranks would have more than another in this layout ({}); the nearest that fits is {}",
      settings.shard.reduce_group, describe_degrees(layout),
      nearest_choices(std::move(choices), settings.shard.reduce_group));
}

/// Whether all ranks that have parts of the same matrices own the same of them: their groups are of
/// as many near ranks.
bool parts_match(const Settings& settings, const Layout& layout) {
  std::vector<std::vector<ReplicaRanks>> groups;
  for (int64_t rank = 0; rank < layout.num_ranks(); ++rank)
    groups.push_back(list_replica_ranks(settings, layout, rank));
  for (const std::vector<ReplicaRanks>& own : groups) {
    for (size_t i = 0; i < own.size(); ++i) {
      const bool match = std::ranges::all_of(
          own[i].parts, [&](int64_t other) { return groups[other][i].inner == own[i].inner; });
      if (!match) return false;
    }
  }
  return true;
}

/// A layer's gradients are reduced into shares, which are updated, before others of its memory
/// come; and the layers of a stage have all micro-batches' gradients in turn, for which stages
/// would wait.
void check_release(const Settings& settings, const Layout& layout) {
  if (!settings.shard.release_gradients || layout.num_ranks() == 1) return;
  require(settings.shard.scope == ShardScope::kState,
          "optim.release_gradients on {} ranks is for optim.shard = \"state\", with which each "
          "updates a share of a layer; set that, or leave optim.release_gradients out",
          layout.num_ranks());
  require(layout.degree(Axis::kPp) == 1,
          "optim.release_gradients takes the micro-batches backward layer by layer, for which {} "
          "pipeline stages would wait; set parallel.pp = 1, or leave it out",
          layout.degree(Axis::kPp));
}

}  // namespace

std::vector<int64_t> ReplicaRanks::inner_ranks(int64_t rank) const {
  const int64_t place = std::ranges::find(ranks, rank) - ranks.begin();
  const auto first = ranks.begin() + place / inner * inner;
  return {first, first + inner};
}

std::vector<int64_t> ReplicaRanks::outer_ranks(int64_t rank) const {
  const int64_t place = std::ranges::find(ranks, rank) - ranks.begin();
  std::vector<int64_t> outer;
  for (int64_t i = place % inner; i < std::ssize(ranks); i += inner) outer.push_back(ranks[i]);
  return outer;
}

std::vector<ReplicaRanks> list_replica_ranks(const Settings& settings, const Layout& layout,
                                             int64_t rank) {
  std::vector<ReplicaRanks> groups = list_flat(settings, layout, rank);
  const int64_t reduce_group = settings.shard.reduce_group;
  for (ReplicaRanks& group : groups) {
    if (settings.shard.scope == ShardScope::kFull) {
      group.inner = count_sharing(group, count_copies(settings, layout));
    } else if (reduce_group > 1) {
      for (const std::span<int64_t> stage : by_stage(group)) std::ranges::sort(stage);
      group.inner = count_near(group, reduce_group);
    }
  }
  return groups;
}

void check_sharding(const Settings& settings, const Layout& layout) {
  const ShardSettings& shard = settings.shard;
  const bool full = shard.scope == ShardScope::kFull;
  check_release(settings, layout);
  const bool rounds = shard.gradients != DType::kF32;
  require(!rounds || !full || layout.num_ranks() == 1,
          "optim.gradients = \"bf16\" does not go with optim.shard = \"full\" on {} ranks, whose "
          "gradients of a module are reduced as they come; choose state or none, or leave it out",
          layout.num_ranks());
  require(
      !rounds || shard.reduce_group == 1,
      "optim.gradients = \"bf16\" does not go with optim.reduce_group {}, whose first sums would "
      "be rounded on their way; leave one of them out",
      shard.reduce_group);
  require(!shard.state_on_host || !full || layout.num_ranks() == 1,
          "optim.offload does not go with optim.shard = \"full\" on {} ranks; choose state or "
          "none, or leave it out",
          layout.num_ranks());
  require(full || shard.group == 0,
          "optim.shard_group is {}, but it says how far optim.shard = \"full\" goes; leave it at 0 "
          "or choose full",
          shard.group);
  require(!full || shard.reduce_group == 1,
          "optim.reduce_group is {}, but with optim.shard = \"full\" gradients are summed within "
          "the shard group first; set optim.shard_group instead and leave optim.reduce_group at 1",
          shard.reduce_group);
  const int64_t dp = layout.degree(Axis::kDp);
  require(shard.group == 0 || dp % shard.group == 0,
          "optim.shard_group {} does not divide the {} data-parallel ranks; the nearest is {}, and "
          "0 stands for all",
          shard.group, dp, nearest_divisors(dp, shard.group));
  if (shard.reduce_group > 1 && !cuts_evenly(settings, layout, shard.reduce_group))
    refuse_reduce_group(settings, layout);
  require(
      settings.optimizer_kind != OptimizerKind::kMuon || shard.reduce_group == 1 ||
          parts_match(settings, layout),
      "optim.reduce_group {} makes runs of neighbouring ranks that hold parts of the same "
      "matrices in different numbers in this layout ({}), and optim.name = \"muon\" joins these "
      "parts; set it to 1, or to the ranks of a node",
      shard.reduce_group, describe_degrees(layout));
}

ReplicaGroups::ReplicaGroups(const Settings& settings, const RunLayout& run, World& world) {
  for (const ReplicaRanks& group : list_replica_ranks(settings, run.layout, run.rank())) {
    const bool joins = settings.optimizer_kind == OptimizerKind::kMuon && group.num_stages == 1;
    groups_.push_back(
        {.inner = world.make_group(group.name + ".inner", group.inner_ranks(run.rank())),
         .outer = world.make_group(group.name, group.outer_ranks(run.rank())),
         .parts = joins ? world.make_group(group.name + ".parts", group.parts) : nullptr,
         .placement = group.placement,
         .embedding = group.num_stages > 1});
  }
}

size_t ReplicaGroups::find(const ParameterSpec& spec) const {
  const WeightPlacement& placement = spec.placement;
  const auto embedding = std::ranges::find_if(groups_, &Group::embedding);
  if (spec.name == "embedding.weight" && embedding != groups_.end())
    return embedding - groups_.begin();
  const auto found = std::ranges::find_if(groups_, [&](const Group& group) {
    return !group.embedding && group.placement.expert == placement.expert &&
           (placement.expert || group.placement.tp_copies == placement.tp_copies);
  });
  ensure(found != groups_.end(), "no group of ranks holds '{}' alike", spec.name);
  return found - groups_.begin();
}

std::vector<ReplicaGroup> ReplicaGroups::for_reduction() const {
  std::vector<ReplicaGroup> result;
  for (const Group& group : groups_) result.push_back({.outer = group.outer, .inner = group.inner});
  return result;
}

std::vector<ShardGroup> ReplicaGroups::for_full_sharding() const {
  std::vector<ShardGroup> result;
  for (const Group& group : groups_)
    result.push_back({.shard = group.inner, .replicas = group.outer});
  return result;
}

}  // namespace tessera
