#include "train/plan/candidates.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr std::string_view kTp = "parallel.tp";
constexpr std::string_view kCp = "parallel.cp";
constexpr std::string_view kPp = "parallel.pp";
constexpr std::string_view kEp = "parallel.ep";
constexpr std::string_view kEtp = "parallel.etp";
constexpr std::string_view kChunks = "parallel.pipeline_chunks";
constexpr std::string_view kSchedule = "parallel.pipeline_schedule";
constexpr std::string_view kStages = "parallel.pipeline_layout";
constexpr std::string_view kMicroBatch = "train.micro_batch";
constexpr std::string_view kShard = "optim.shard";
constexpr std::string_view kStepSchedule = "train.schedule";
constexpr std::string_view kDispatcher = "parallel.dispatcher";

/// Sequences this much longer than a context are worth sharing.
constexpr int64_t kTokensOfContext = 8192;
constexpr int64_t kMostMicroBatch = 8;
constexpr int64_t kMostChunks = 8;

std::vector<int64_t> powers_up_to(int64_t most) {
  std::vector<int64_t> powers;
  for (int64_t power = 1; power <= most; power *= 2) powers.push_back(power);
  return powers;
}

/// Degrees of one axis: those of `open` where the search may set it, that of the base otherwise.
std::vector<int64_t> degrees(const SearchSpace& space, std::string_view key, int64_t of_base,
                             std::vector<int64_t> open) {
  if (!space.may_set(std::string(key))) return {of_base};
  return open;
}

std::vector<int64_t> tensor_degrees(const SearchSpace& space) {
  const int64_t heads = space.base.model.num_heads;
  std::vector<int64_t> all = powers_up_to(std::min(space.node_devices, space.num_ranks));
  std::erase_if(all, [&](int64_t tp) { return heads % tp != 0; });
  return degrees(space, kTp, space.base.parallel.layout.tp, all);
}

std::vector<int64_t> context_degrees(const SearchSpace& space) {
  const int64_t most = std::max<int64_t>(2 * space.base.data.sequence_length / kTokensOfContext, 1);
  return degrees(space, kCp, space.base.parallel.layout.cp,
                 powers_up_to(std::min(most, space.num_ranks)));
}

std::vector<int64_t> stage_counts(const SearchSpace& space) {
  const int64_t layers = space.base.model.num_layers;
  std::vector<int64_t> all;
  for (int64_t stages = 1; stages <= std::min(layers, space.num_ranks); ++stages) {
    const bool is_power = (stages & (stages - 1)) == 0;
    if (is_power || layers % stages == 0) all.push_back(stages);
  }
  std::erase_if(all, [&](int64_t stages) { return space.num_ranks % stages != 0; });
  return degrees(space, kPp, space.base.parallel.layout.pp, all);
}

std::vector<int64_t> expert_degrees(const SearchSpace& space, int64_t ranks_of_stage) {
  const int64_t experts = space.base.model.moe.num_experts;
  std::vector<int64_t> all = powers_up_to(std::max<int64_t>(experts, 1));
  std::erase_if(all, [&](int64_t ep) {
    return ranks_of_stage % ep != 0 || std::max<int64_t>(experts, 1) % ep != 0;
  });
  return degrees(space, kEp, space.base.parallel.layout.ep, all);
}

std::vector<ShardScope> scopes(const SearchSpace& space, int64_t stages) {
  if (!space.may_set(std::string(kShard))) return {space.base.shard.scope};
  if (stages > 1) return {ShardScope::kState};
  return {ShardScope::kState, ShardScope::kFull};
}

bool divides_batch(const Settings& settings, int64_t num_ranks) {
  const LayoutSpec& layout = settings.parallel.layout;
  const int64_t shared = layout.tp * layout.cp * layout.pp;
  if (num_ranks % shared != 0) return false;
  const int64_t at_once = num_ranks / shared * settings.train.micro_batch;
  return settings.train.global_batch % at_once == 0;
}

void set_chunks(Settings& settings, int64_t chunks) {
  settings.parallel.chunks_per_stage = chunks;
  settings.parallel.schedule = chunks > 1 ? PipelineKind::kInterleaved : PipelineKind::kOneFOneB;
}

/// Of each of so many stages: powers of two, and what divides a stage's layers.
std::vector<int64_t> chunk_counts(int64_t layers, int64_t stages) {
  const int64_t most = std::min(layers / stages, kMostChunks);
  std::vector<int64_t> counts;
  for (int64_t count = 1; count <= most; ++count) {
    const bool is_power = (count & (count - 1)) == 0;
    if (is_power || layers % (stages * count) == 0) counts.push_back(count);
  }
  return counts;
}

bool may_set_chunks(const SearchSpace& space) {
  return space.may_set(std::string(kChunks)) && space.may_set(std::string(kSchedule)) &&
         space.may_set(std::string(kStages));
}

/// How many of the first node's ranks are neighbours in EP; 1 where other nodes have other shares.
int64_t ranks_in_node(const SearchSpace& space, const Settings& settings) {
  const Layout layout(settings.parallel.layout, space.num_ranks);
  const std::vector<int64_t> ep = layout.group(0, Axis::kEp);
  const auto node_of = [&](int64_t i) { return ep[i] / space.node_devices; };
  int64_t inner = 1;
  while (inner < std::ssize(ep) && node_of(inner) == node_of(0)) ++inner;
  if (std::ssize(ep) % inner != 0) return 1;
  for (int64_t i = 0; i < std::ssize(ep); ++i)
    if (node_of(i) != node_of(i / inner * inner)) return 1;
  return inner;
}

}  // namespace

std::vector<std::string> searched_keys() {
  std::vector<std::string> keys = {"train.recompute", "train.offload"};
  for (const std::string_view key : {kTp, kCp, kPp, kEp, kEtp, kChunks, kSchedule, kStages,
                                     kMicroBatch, kShard, kStepSchedule, kDispatcher})
    keys.emplace_back(key);
  return keys;
}

std::vector<Settings> list_layouts(const SearchSpace& space) {
  std::vector<Settings> all;
  Settings one = space.base;
  LayoutSpec& layout = one.parallel.layout;
  if (space.may_set(std::string(kMicroBatch))) one.train.micro_batch = 1;
  if (may_set_chunks(space)) set_chunks(one, 1);
  for (const int64_t pp : stage_counts(space)) {
    layout.pp = pp;
    for (const int64_t tp : tensor_degrees(space)) {
      layout.tp = tp;
      for (const int64_t cp : context_degrees(space)) {
        layout.cp = cp;
        if (!divides_batch(one, space.num_ranks)) continue;
        for (const int64_t ep : expert_degrees(space, space.num_ranks / pp)) {
          layout.ep = ep;
          for (const ShardScope scope : scopes(space, pp)) {
            one.shard.scope = scope;
            all.push_back(one);
          }
        }
      }
    }
  }
  return all;
}

std::vector<Settings> list_variants(const SearchSpace& space, const Settings& layout) {
  std::vector<int64_t> batches = {layout.train.micro_batch};
  if (space.may_set(std::string(kMicroBatch))) batches = powers_up_to(kMostMicroBatch);
  std::vector<int64_t> chunks = {layout.parallel.chunks_per_stage};
  const int64_t stages = layout.parallel.layout.pp;
  if (stages > 1 && may_set_chunks(space)) chunks = chunk_counts(layout.model.num_layers, stages);
  std::vector<Settings> all;
  for (const int64_t batch : batches) {
    for (const int64_t count : chunks) {
      Settings one = layout;
      one.train.micro_batch = batch;
      if (count != layout.parallel.chunks_per_stage) set_chunks(one, count);
      const bool is_same =
          batch == layout.train.micro_batch && count == layout.parallel.chunks_per_stage;
      if (!is_same && divides_batch(one, space.num_ranks)) all.push_back(one);
    }
  }
  return all;
}

std::optional<Settings> merge_passes(const SearchSpace& space, const Settings& settings) {
  const LayoutSpec& layout = settings.parallel.layout;
  const bool exchanges = layout.tp * layout.cp * layout.pp * layout.ep > 1;
  if (!space.may_set(std::string(kStepSchedule)) || !exchanges ||
      settings.shard.scope == ShardScope::kFull)
    return std::nullopt;
  Settings merged = settings;
  merged.train.schedule = "merged";
  return merged;
}

std::vector<Settings> other_dispatchers(const SearchSpace& space, const Settings& settings) {
  const int64_t ep = settings.parallel.layout.ep;
  if (ep == 1 || !space.may_set(std::string(kDispatcher)) ||
      settings.parallel.dispatcher != DispatcherRequest::kAuto)
    return {};
  std::vector<Settings> all;
  Settings other = settings;
  other.parallel.dispatcher = DispatcherRequest::kDeduplicated;
  all.push_back(other);
  const int64_t inner = ranks_in_node(space, settings);
  if (inner == 1 || inner == ep) return all;
  other.parallel.dispatcher = DispatcherRequest::kHierarchical;
  other.parallel.dispatch_inner = inner;
  all.push_back(other);
  return all;
}

std::string describe_candidate(const Settings& settings) {
  const LayoutSpec& layout = settings.parallel.layout;
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  const auto add_degree = [&](const char* name, int64_t degree) {
    if (degree > 1) add(fmt::format("{} {}", name, degree));
  };
  add_degree("tp", layout.tp);
  add_degree("cp", layout.cp);
  const int64_t chunks = settings.parallel.chunks_per_stage;
  if (layout.pp > 1)
    add(fmt::format("pp {}{}{}", layout.pp, chunks > 1 ? fmt::format(" x {} chunks", chunks) : "",
                    settings.parallel.pipeline_layout.empty() ? "" : ", stages by time"));
  add_degree("ep", layout.ep);
  add_degree("etp", layout.etp);
  add(fmt::format("micro-batch {}", settings.train.micro_batch));
  if (settings.parallel.dispatcher != DispatcherRequest::kAuto && layout.ep > 1)
    add(std::string(dispatcher_name(kind_of(settings.parallel.dispatcher))));
  if (settings.shard.scope == ShardScope::kFull) add("full sharding");
  if (settings.train.schedule != kAsBuilt) add(settings.train.schedule);
  return text;
}

std::vector<std::string> list_overrides(const Settings& settings) {
  const LayoutSpec& layout = settings.parallel.layout;
  std::vector<std::string> all = {
      fmt::format("--{}={}", kTp, layout.tp),
      fmt::format("--{}={}", kCp, layout.cp),
      fmt::format("--{}={}", kPp, layout.pp),
      fmt::format("--{}={}", kEp, layout.ep),
      fmt::format("--{}={}", kEtp, layout.etp),
      fmt::format("--{}={}", kMicroBatch, settings.train.micro_batch),
      fmt::format("--{}={}", kChunks, settings.parallel.chunks_per_stage)};
  if (settings.parallel.chunks_per_stage > 1)
    all.push_back(fmt::format("--{}=interleaved", kSchedule));
  if (!settings.parallel.pipeline_layout.empty())
    all.push_back(fmt::format("--{}={}", kStages, settings.parallel.pipeline_layout));
  if (settings.parallel.dispatcher != DispatcherRequest::kAuto)
    all.push_back(fmt::format("--{}={}", kDispatcher,
                              dispatcher_name(kind_of(settings.parallel.dispatcher))));
  if (settings.parallel.dispatch_inner > 1)
    all.push_back(fmt::format("--parallel.dispatch_inner={}", settings.parallel.dispatch_inner));
  if (settings.train.schedule != kAsBuilt)
    all.push_back(fmt::format("--{}={}", kStepSchedule, settings.train.schedule));
  if (settings.shard.scope == ShardScope::kFull) all.push_back(fmt::format("--{}=full", kShard));
  if (!settings.train.recompute.empty())
    all.push_back(fmt::format("--train.recompute={}", fmt::join(settings.train.recompute, ",")));
  if (!settings.train.offload.empty())
    all.push_back(fmt::format("--train.offload={}", fmt::join(settings.train.offload, ",")));
  return all;
}

}  // namespace tessera
