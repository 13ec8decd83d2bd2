#include "train/verify/verify_static.h"

#include <chrono>
#include <set>

#include "comm/planned_world.h"
#include "train/memory/planned_rank.h"

namespace tessera {
namespace {

std::string describe_axes(const RankAxes& axes) {
  std::string text;
  for (const Factoring factoring : kFactorings) {
    for (const RankAxis axis : axes.of(factoring)) {
      text +=
          fmt::format("{}{} {}", text.empty() ? "" : ", ", rank_axis_name(axis), axes.degree(axis));
    }
  }
  return text.empty() ? "one rank" : text;
}

/// Every rank, or some of them all: each is compared with all that there are.
std::vector<int64_t> ranks_to_check(int64_t num_ranks) {
  constexpr int64_t kMost = 512;
  constexpr int64_t kMostPairs = 1 << 20;
  const int64_t count = std::clamp<int64_t>(kMostPairs / num_ranks, 1, std::min(num_ranks, kMost));
  std::vector<int64_t> ranks;
  for (int64_t i = 0; i < count; ++i) ranks.push_back(i * num_ranks / count);
  return ranks;
}

/// What a chunk's programs depend on.
struct ChunkKey {
  bool embedding = false;
  bool loss = false;
  std::set<LayerKind> kinds;
  int64_t first_layer = 0;  ///< 0 where all layers of a kind run the same program
  auto operator<=>(const ChunkKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// The first stage of each kind: stages with the same kinds of layers run the same programs.
std::vector<int64_t> different_stages(const Settings& settings) {
  const PipelineLayout pipeline =
      make_pipeline_layout(settings.parallel, settings.model.layer_counts());
  const bool layers_differ = !settings.train.recompute.empty() || !settings.train.offload.empty() ||
                             !settings.precision.plain.empty();
  std::vector<std::vector<ChunkKey>> keys(pipeline.num_stages);
  for (int64_t i = 0; i < std::ssize(pipeline.chunks); ++i) {
    const PipelineChunk& chunk = pipeline.chunks[i];
    ChunkKey key{
        .embedding = chunk.embedding || chunk.num_mtp > 0, .loss = chunk.loss, .kinds = {}};
    if (layers_differ) key.first_layer = chunk.first_layer;
    for (int64_t layer = 0; layer < chunk.all_layers(); ++layer)
      key.kinds.insert(settings.model.layer_kind(chunk.first_layer + layer));
    keys[i % pipeline.num_stages].push_back(std::move(key));
  }
  std::vector<int64_t> stages;
  std::set<std::vector<ChunkKey>> seen;
  for (int64_t stage = 0; stage < pipeline.num_stages; ++stage) {
    if (seen.insert(keys[stage]).second) stages.push_back(stage);
  }
  return stages;
}

void prove_stages(const Settings& settings, const Layout& layout, StaticVerification& result,
                  std::vector<SummedWeight>& weights) {
  const std::vector<int64_t> first_ranks = layout.group(0, Axis::kPp);
  for (const int64_t stage : different_stages(settings)) {
    const int64_t rank = first_ranks[stage];
    const PlannedRank planned = plan_rank(settings, rank, layout.num_ranks());
    StageProof proof = prove_rank(settings, planned.layout, planned.model.programs());
    result.faults.insert(result.faults.end(), proof.faults.begin(), proof.faults.end());
    weights.insert(weights.end(), proof.weights.begin(), proof.weights.end());
    const RankAxes axes(planned.layout.part.groups, settings.model.kv_heads());
    result.stages.push_back(
        {.first_rank = rank, .axes = describe_axes(axes), .programs = std::move(proof.programs)});
  }
}

void prove_ranks(const Settings& settings, const Layout& layout,
                 const std::vector<SummedWeight>& weights, StaticVerification& result) {
  std::vector<SummedWeight> kinds;
  for (const SummedWeight& weight : weights) {
    const auto is_alike = [&](const SummedWeight& other) {
      return weight.name != "embedding.weight" && other.expert == weight.expert &&
             other.tp_copies == weight.tp_copies && other.kv_heads == weight.kv_heads &&
             other.axes == weight.axes;
    };
    if (std::ranges::none_of(kinds, is_alike)) kinds.push_back(weight);
  }
  for (const int64_t rank : ranks_to_check(layout.num_ranks())) {
    const auto world = make_planned_world(rank, layout.num_ranks());
    const StageGroups groups = join_stage_groups(*world, layout, settings.parallel);
    const RankAxes axes(groups, settings.model.kv_heads());
    prove_groups(groups, layout, rank, axes, result.faults);
    prove_reductions(list_replica_ranks(settings, layout, rank), kinds, layout, rank, groups,
                     result.faults);
    ++result.num_checked;
  }
}

std::string describe_program(const ProvenProgram& program) {
  std::string text = fmt::format("{}\n", program.title);
  for (ValueId id = 0; id < program.program.num_values(); ++id) {
    const Value& value = program.program.value(id);
    if (!program.values[id].is_known()) continue;  // made by nobody: a pass has replaced it
    text += fmt::format("  {:<32} {:<28} {}\n", value.name, value.type.to_string(),
                        program.describe(id));
  }
  return text;
}

}  // namespace

int64_t StaticVerification::num_programs() const {
  int64_t count = 0;
  for (const Stage& stage : stages) count += std::ssize(stage.programs);
  return count;
}

int64_t StaticVerification::num_values() const {
  int64_t count = 0;
  for (const Stage& stage : stages) {
    for (const ProvenProgram& program : stage.programs)
      count += std::ranges::count_if(program.values,
                                     [](const Sharding& value) { return value.is_known(); });
  }
  return count;
}

StaticVerification verify_static(const Settings& settings, int64_t num_ranks) {
  const auto begin = std::chrono::steady_clock::now();
  const Layout layout(settings.parallel.layout, num_ranks);
  StaticVerification result{.num_ranks = num_ranks, .num_stages = layout.degree(Axis::kPp)};
  std::vector<SummedWeight> weights;
  prove_stages(settings, layout, result, weights);
  prove_ranks(settings, layout, weights, result);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

std::string describe(const StaticVerification& verification, bool all) {
  std::string text;
  for (const StaticVerification::Stage& stage : verification.stages) {
    if (!all) break;
    text += fmt::format("stage of rank {}: {}\n\n", stage.first_rank, stage.axes);
    for (const ProvenProgram& program : stage.programs) text += describe_program(program) + "\n";
  }
  if (all) {
    text +=
        "R: the same on all ranks of an axis; S0: parts along dim 0; E0: what belongs to each "
        "rank's own experts;\nP: summands; V: each rank's own, by design\n";
  }
  for (const std::string& fault : verification.faults) text += fmt::format("fault: {}\n", fault);
  text += fmt::format(
      "{}: {} ranks ({}, pp {}), {} programs, {} values; groups and reductions of {} ranks "
      "({:.2f} s, nothing was run)\n",
      verification.agrees() ? "proven" : "not proven", verification.num_ranks,
      verification.stages.front().axes, verification.num_stages, verification.num_programs(),
      verification.num_values(), verification.num_checked, verification.seconds);
  return text;
}

}  // namespace tessera
