#include "train/memory/choose_policy.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "comm/planned_world.h"
#include "core/memory.h"
#include "train/memory/layer_options.h"
#include "train/memory/search_policy.h"
#include "train/setup/device_choice.h"

namespace tessera {
namespace {

/// A pipeline stage's rank that the choice is made for, with the most that one of the stage's ranks
/// holds.
struct StageTrial {
  PlannedRank rank;
  ModelState::Bytes state;
};

/// Ranks of a stage differ in their shares of the state: a bucket more or less, and experts of
/// different sizes. The first of very many stand for the others.
StageTrial plan_stage(const Settings& settings, const std::vector<int64_t>& ranks,
                      int64_t num_ranks, const Backend& backend, const BatchShape& shape) {
  constexpr size_t kMostRanks = 64;
  ModelState::Bytes most;
  int64_t largest = ranks.front();
  for (size_t i = 0; i < std::min(ranks.size(), kMostRanks); ++i) {
    const auto world = make_planned_world(ranks[i], num_ranks);
    const auto state =
        ModelState::count_bytes(settings, make_run_layout(settings, *world), backend);
    if (state.total() <= most.total()) continue;
    most = state;
    largest = ranks[i];
  }
  return {plan_rank(settings, largest, num_ranks, backend, shape), most};
}

std::vector<std::vector<int64_t>> ranks_of_stages(const Settings& settings, int64_t num_ranks) {
  const Layout layout(settings.parallel.layout, num_ranks);
  std::vector<std::vector<int64_t>> stages(layout.degree(Axis::kPp));
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    stages[layout.coordinate(rank, Axis::kPp)].push_back(rank);
  return stages;
}

std::string quote_list(const std::vector<std::string>& texts) {
  std::string list;
  for (const std::string& text : texts)
    list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", text);
  return fmt::format("[{}]", list);
}

std::vector<std::string> write_entries(const std::vector<LayerEntry>& entries) {
  std::vector<std::string> texts;
  for (const LayerEntry& entry : entries) texts.push_back(entry.to_string());
  return texts;
}

std::string name_limit(const TrainSettings& train, const MemoryLimit& limit) {
  if (!limit.is_of_device()) {
    return fmt::format("train.memory_limit is \"{}\" ({}), but", train.memory_limit,
                       format_bytes(limit.bytes));
  }
  return fmt::format("out of memory: {} has {} for training, and", limit.device,
                     format_bytes(limit.bytes));
}

[[noreturn]] void refuse_limit(const TrainSettings& train, const MemoryLimit& limit, int64_t rank,
                               const FoundPolicy& least, const SavedPolicy& policy) {
  const MemoryPrediction& memory = least.cost.memory;
  const ModelState::Bytes& state = memory.state;
  user_error(
      "{} the least that training can do with is {} on rank "
      "{}: {} weights, {} gradients, {} optimizer, {} saved activations, {} working memory, {} "
      "hidden states and inputs{}{}{}, with train.recompute = {} and train.offload = {}. {} a "
      "smaller model, train.micro_batch or data.sequence_length, or more ranks",
      name_limit(train, limit), format_bytes(least.cost.bytes()), rank, format_bytes(state.weights),
      format_bytes(state.gradients), format_bytes(state.optimizer),
      format_bytes(memory.activations.saved), format_bytes(memory.activations.transient),
      format_bytes(memory.activations.hidden + memory.activations.inputs),
      describe_overhead(memory.overhead), describe_snapshot(memory), describe_offloaded(memory),
      quote_list(write_entries(policy.recompute)),
      quote_list(write_entries(policy.offload.entries)),
      limit.is_of_device() ? "Use" : "Raise the limit, or use");
}

/// Makes a choice stage by stage.
class Chooser {
 public:
  Chooser(const Settings& settings, int64_t num_ranks, const Backend& backend,
          const BatchShape& shape, const MemoryLimit& limit)
      : settings_(settings),
        num_ranks_(num_ranks),
        backend_(backend),
        shape_(shape),
        base_(settings.train.saved_policy()) {
    result_.limit = limit;
  }

  PolicyChoice run() {
    for (const std::vector<int64_t>& ranks : ranks_of_stages(settings_, num_ranks_))
      stages_.push_back(plan_stage(settings_, ranks, num_ranks_, backend_, shape_));
    for (const StageTrial& stage : stages_)
      trials_.emplace_back(settings_, stage.rank, stage.state, result_.limit.is_of_device());
    for (size_t i = 0; i < stages_.size(); ++i) choose_stage(i);
    const SavedPolicy policy = make_policy(base_, choices_, num_layers());
    result_.recompute = write_entries(policy.recompute);
    result_.offload = write_entries(policy.offload.entries);
    for (size_t i = 0; i < stages_.size(); ++i) result_.stages[i].chosen = trials_[i].judge(policy);
    add_entries(policy);
    return std::move(result_);
  }

 private:
  int64_t num_layers() const { return settings_.model.all_layers(); }

  void choose_stage(size_t idx) {
    const int64_t rank = stages_[idx].rank.layout.rank();
    PolicySearchResult found = search(trials_[idx]);
    if (!found.fits) {
      refuse_limit(settings_.train, result_.limit, rank, found.least,
                   make_policy(base_, found.least.choices, num_layers()));
    }
    result_.stages.push_back({.rank = rank, .kept = found.kept.cost, .chosen = {}});
    choices_.merge(found.best.choices);
  }

  /// Where the device has no room to leave, without any.
  PolicySearchResult search(const PolicyTrial& trial) const {
    MemoryLimit limit = result_.limit;
    if (limit.is_of_device()) {
      const FoundPolicy kept{.choices = {}, .cost = trial.judge(base_)};
      if (kept.cost.bytes() <= limit.bytes)
        return {.kept = kept, .best = kept, .fits = true, .least = kept};
    }
    PolicySearchResult found = search_policy(trial, base_, limit);
    if (found.fits || !limit.is_of_device()) return found;
    limit.spare = 0;
    const PolicyTrial tight(settings_, trial.rank(), found.least.cost.memory.state);
    return search_policy(tight, base_, limit);
  }

  /// Values of one node, of which one costs as much as all, are one entry of the report.
  void add_entries(const SavedPolicy& policy) {
    std::vector<LayerEntry> chosen(
        policy.recompute.begin() + static_cast<ptrdiff_t>(base_.recompute.size()),
        policy.recompute.end());
    while (!chosen.empty()) {
      const LayerEntry first = chosen.front();
      const auto own =
          std::stable_partition(chosen.begin(), chosen.end(),
                                [&](const LayerEntry& entry) { return !is_beside(entry, first); });
      const std::vector<LayerEntry> together(own, chosen.end());
      chosen.erase(own, chosen.end());
      SavedPolicy without = policy;
      for (const LayerEntry& entry : together) remove(without.recompute, entry);
      add_entry(together, false, without);
    }
    const std::vector<LayerEntry>& offload = policy.offload.entries;
    for (size_t i = base_.offload.entries.size(); i < offload.size(); ++i) {
      SavedPolicy without = policy;
      remove(without.offload.entries, offload[i]);
      add_entry({offload[i]}, true, without);
    }
  }

  /// The last of them: what was given stands in front.
  static void remove(std::vector<LayerEntry>& entries, const LayerEntry& entry) {
    for (size_t i = entries.size(); i-- > 0;) {
      if (entries[i].to_string() != entry.to_string()) continue;
      entries.erase(entries.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
  }

  /// Whether both are of the same layers, and of a node of theirs.
  bool is_beside(const LayerEntry& a, const LayerEntry& b) const {
    const auto layers_of = [](const LayerEntry& entry) {
      return entry.to_string().substr(entry.name.size());
    };
    if (a.name == b.name || layers_of(a) != layers_of(b)) return a.to_string() == b.to_string();
    return std::ranges::any_of(trials_, [&](const PolicyTrial& trial) {
      for (const auto& [key, program] : trial.programs().kinds) {
        for (const std::vector<std::string>& names : find_droppable(trial, key)) {
          if (std::ranges::count(names, a.name) > 0 && std::ranges::count(names, b.name) > 0)
            return true;
        }
      }
      return false;
    });
  }

  void add_entry(const std::vector<LayerEntry>& entries, bool offloaded,
                 const SavedPolicy& without) {
    ChosenEntry chosen{.offloaded = offloaded,
                       .entry = fmt::format("{}", fmt::join(write_entries(entries), ", "))};
    for (size_t i = 0; i < stages_.size(); ++i) {
      const PolicyCost& with = result_.stages[i].chosen;
      const PolicyCost cost = trials_[i].judge(without);
      chosen.saved_bytes = std::max(chosen.saved_bytes, cost.bytes() - with.bytes());
      chosen.seconds = std::max(chosen.seconds, with.seconds - cost.seconds);
    }
    result_.entries.push_back(std::move(chosen));
  }

  const Settings& settings_;
  int64_t num_ranks_;
  const Backend& backend_;
  const BatchShape& shape_;
  SavedPolicy base_;
  std::vector<StageTrial> stages_;
  std::vector<PolicyTrial> trials_;
  LayerChoices choices_;
  PolicyChoice result_;
};

std::string describe(const ChosenStage& stage, bool several) {
  return fmt::format("\n  {}{} predicted in place of {}, passes of a step {} in place of {}",
                     several ? fmt::format("rank {}: ", stage.rank) : "",
                     format_bytes(stage.chosen.bytes()), format_bytes(stage.kept.bytes()),
                     format_estimate(stage.chosen.seconds), format_estimate(stage.kept.seconds));
}

}  // namespace

PolicyChoice choose_policy(const Settings& settings, int64_t num_ranks, const Backend& backend,
                           const BatchShape& shape, const MemoryLimit& limit) {
  return Chooser(settings, num_ranks, backend, shape, limit).run();
}

std::optional<PolicyChoice> plan_policy(const Settings& settings, int64_t num_ranks,
                                        const Backend& backend, const BatchShape& shape) {
  if (const auto given = given_limit(settings.train))
    return choose_policy(settings, num_ranks, backend, shape, *given);
  const int64_t memory = gpu_memory();
  if (!chooses_for_device(settings.train, backend) || memory == 0) return std::nullopt;
  PolicyChoice choice = choose_policy(settings, num_ranks, backend, shape,
                                      limit_of_device(backend.device().name(), memory, num_ranks));
  if (choice.entries.empty()) return std::nullopt;
  return choice;
}

void apply(const PolicyChoice& choice, TrainSettings& train) {
  train.recompute = choice.recompute;
  train.offload = choice.offload;
}

std::string format_estimate(double seconds) {
  constexpr double kMilliseconds = 1e3;
  return seconds < 10 ? fmt::format("{:.4g} ms", seconds * kMilliseconds)
                      : fmt::format("{:.4g} s", seconds);
}

std::string describe(const PolicyChoice& choice) {
  std::string text = fmt::format("memory limit {}{}:", format_bytes(choice.limit.bytes),
                                 choice.limit.is_of_device() ? " of " + choice.limit.device : "");
  if (choice.entries.empty()) {
    text += " all fits, nothing more is recomputed or offloaded";
  } else {
    text += " with the bytes that each saves beside the others, and its time in a step by estimate";
  }
  for (const ChosenEntry& entry : choice.entries) {
    text +=
        fmt::format("\n  {:<10} {:<20} {:>12} {:>12}", entry.offloaded ? "offload" : "recompute",
                    entry.entry, format_bytes(entry.saved_bytes), format_estimate(entry.seconds));
  }
  for (const ChosenStage& stage : choice.stages) text += describe(stage, choice.stages.size() > 1);
  if (choice.entries.empty()) return text;
  return text +
         fmt::format("\n  the same without a limit:\n  train.recompute = {}\n  train.offload = {}",
                     quote_list(choice.recompute), quote_list(choice.offload));
}

std::string write_toml(const PolicyChoice& choice) {
  std::string text = fmt::format("# What was chosen for {}{}.",
                                 choice.limit.is_of_device() ? choice.limit.device + ", " : "",
                                 format_bytes(choice.limit.bytes));
  for (const ChosenStage& stage : choice.stages) {
    std::string line = describe(stage, choice.stages.size() > 1);
    text += "\n#" + line.substr(line.find_first_not_of('\n') + 1);
  }
  return text + fmt::format("\n[train]\nmemory_limit = \"none\"\nrecompute = {}\noffload = {}\n",
                            quote_list(choice.recompute), quote_list(choice.offload));
}

}  // namespace tessera
