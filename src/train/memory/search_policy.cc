#include "train/memory/search_policy.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "train/memory/layer_options.h"

namespace tessera {
namespace {

using Names = std::vector<std::string>;

/// Layers alike, with what they may do.
struct LayerClass {
  LayerProgramKey base;
  std::vector<int64_t> layers;
  std::vector<LayerOption> options;
};

/// A layer takes an option.
struct PathStep {
  int64_t layer = 0;
  const LayerClass* of = nullptr;
  size_t option = 0;
};

/// Steps in the order in which they are taken, and after how many one may stop.
struct OptionPath {
  std::vector<PathStep> steps;
  std::vector<size_t> stops = {0};
};

/// The first `num_layers` of the rank offload; `names` empty: everything that they keep.
struct OffloadedPrefix {
  size_t num_layers = 0;
  std::set<std::string> names;
};

/// What `names` has and `base` has not.
Names without(const Names& names, const Names& base) {
  Names more;
  std::ranges::set_difference(names, base, std::back_inserter(more));
  return more;
}

class PolicySearch {
 public:
  PolicySearch(const PolicyTrial& trial, const SavedPolicy& base, const MemoryLimit& limit,
               PolicyGrain grain)
      : trial_(trial),
        base_(base),
        limit_(limit),
        is_uniform_(grain == PolicyGrain::kUniform),
        layers_(trial.layers()) {}

  PolicySearchResult run() {
    result_.kept = {.choices = {}, .cost = judge({})};
    result_.least = result_.kept;
    if (consider({})) return std::move(result_);
    find_classes();
    try_by_hand();
    for (const int64_t transient : find_transients()) search_paths(transient);
    if (result_.fits && !is_uniform_) improve();
    if (result_.fits) drop_idle_offloads();
    return std::move(result_);
  }

 private:
  int64_t num_layers() const { return trial_.programs().config.all_layers(); }
  bool may_offload() const {
    return !trial_.rank().backend.is_host() && !trial_.programs().part.merges_passes;
  }
  /// Each policy once.
  const PolicyCost& judge(const LayerChoices& choices) {
    const SavedPolicy policy = make_policy(base_, choices, num_layers());
    std::string key;
    for (const LayerEntry& entry : policy.recompute) key += entry.to_string() + ' ';
    for (const LayerEntry& entry : policy.offload.entries) key += '^' + entry.to_string() + ' ';
    const auto [found, is_new] = judged_.try_emplace(std::move(key));
    if (is_new) found->second = trial_.judge(policy);
    return found->second;
  }

  /// The order in which policies are preferred.
  static auto rank_of(const PolicyCost& cost) {
    return std::tuple(cost.seconds, cost.memory.activations.offloaded, cost.bytes());
  }

  /// Whether they fit.
  bool consider(const LayerChoices& choices) {
    const PolicyCost& cost = judge(choices);
    if (cost.bytes() < result_.least.cost.bytes()) result_.least = {choices, cost};
    if (!cost.fits(limit_)) return false;
    if (!result_.fits || rank_of(cost) < rank_of(result_.best.cost)) result_.best = {choices, cost};
    result_.fits = true;
    return true;
  }

  void find_classes() {
    std::map<LayerProgramKey, std::vector<int64_t>> layers;
    for (const int64_t layer : layers_) layers[trial_.programs().key_of(layer)].push_back(layer);
    for (auto& [key, own] : layers)
      classes_.push_back({key, std::move(own), find_layer_options(trial_, key)});
    for (const LayerClass& one : classes_) {
      for (const int64_t layer : one.layers) class_of_[layer] = &one;
    }
    find_expensive();
  }

  /// Values by what they cost to compute again for a byte, the most expensive first.
  void find_expensive() {
    std::map<std::string, double> prices;
    for (const LayerClass& one : classes_) {
      const LayerCost kept = trial_.judge_layer(one.base);
      for (const Names& names : find_droppable(trial_, one.base)) {
        LayerProgramKey key = one.base;
        key.recomputed.insert(key.recomputed.end(), names.begin(), names.end());
        std::ranges::sort(key.recomputed);
        const LayerCost dropped = trial_.judge_layer(key);
        const auto bytes = static_cast<double>(std::max<int64_t>(kept.bytes - dropped.bytes, 1));
        for (const std::string& name : names)
          prices[name] = std::max(prices[name], (dropped.seconds - kept.seconds) / bytes);
      }
    }
    for (const auto& [name, price] : prices) expensive_.push_back(name);
    std::ranges::stable_sort(expensive_, std::greater<>(),
                             [&](const std::string& name) { return prices.at(name); });
  }

  /// Limits of the working memory within which classes have different options.
  std::vector<int64_t> find_transients() const {
    std::set<int64_t> all;
    int64_t least = 0;
    for (const LayerClass& one : classes_) {
      least = std::max(least, one.options[0].cost.transient);
      for (const LayerOption& option : one.options) all.insert(option.cost.transient);
    }
    std::vector<int64_t> limits;
    for (const int64_t transient : all) {
      if (transient >= least) limits.push_back(transient);
    }
    constexpr size_t kMost = 6;
    while (limits.size() > kMost) limits.erase(limits.begin() + 1);
    return limits;
  }

  /// One step is one layer's, from the last layer to the first.
  OptionPath find_path(int64_t transient) const {
    struct ClassStep {
      double price = 0;
      const LayerClass* of = nullptr;
      size_t option = 0;
    };
    std::vector<ClassStep> steps;
    for (const LayerClass& one : classes_) {
      const std::vector<size_t> order = order_options(one.options, transient);
      for (size_t i = 1; i < order.size(); ++i) {
        const LayerCost& from = one.options[order[i - 1]].cost;
        const LayerCost& to = one.options[order[i]].cost;
        steps.push_back({(to.seconds - from.seconds) / static_cast<double>(from.bytes - to.bytes),
                         &one, order[i]});
      }
    }
    std::ranges::stable_sort(steps, {}, &ClassStep::price);
    OptionPath path;
    for (const ClassStep& step : steps) {
      for (auto layer = step.of->layers.rbegin(); layer != step.of->layers.rend(); ++layer) {
        path.steps.push_back({*layer, step.of, step.option});
        if (!is_uniform_) path.stops.push_back(path.steps.size());
      }
      if (is_uniform_) path.stops.push_back(path.steps.size());
    }
    return path;
  }

  void recompute_more(LayerChoices& choices, int64_t layer, const LayerOption& option) const {
    choices[layer].recompute = without(option.names, class_of_.at(layer)->base.recomputed);
  }

  /// Offloads of a layer what it keeps, given what it computes again.
  void offload_kept(LayerChoices& choices, int64_t layer,
                    const std::set<std::string>& names) const {
    if (names.empty()) {
      choices[layer].offload = {"all"};
      return;
    }
    LayerProgramKey key = class_of_.at(layer)->base;
    key.recomputed = recomputed_names(layer, choices[layer]);
    const Executable& forward = trial_.programs().compile_kind(key).derived.forward;
    std::set<std::string> kept;
    for (ValueId id = 0; id < forward.program().num_values(); ++id) {
      const std::string& name = forward.program().value(id).name;
      const Storage storage = forward.plan().values[id].storage;
      if (storage == Storage::kSaved && names.contains(name) &&
          std::ranges::find(key.recomputed, name) == key.recomputed.end())
        kept.insert(name);
    }
    choices[layer].offload = {kept.begin(), kept.end()};
  }

  LayerChoices choose(const std::vector<PathStep>& path, size_t num_steps,
                      const OffloadedPrefix& prefix) const {
    LayerChoices choices;
    for (size_t i = 0; i < num_steps; ++i)
      recompute_more(choices, path[i].layer, path[i].of->options[path[i].option]);
    for (size_t i = 0; i < prefix.num_layers; ++i) offload_kept(choices, layers_[i], prefix.names);
    return choices;
  }

  /// Whether what takes at least as long as these is of no use.
  bool is_late(const LayerChoices& choices) {
    return result_.fits && judge(choices).seconds >= result_.best.cost.seconds;
  }

  /// The fewest steps that fit; more take longer.
  void search_path(const OptionPath& path, const OffloadedPrefix& prefix) {
    const auto choose_to = [&](size_t stop) {
      return choose(path.steps, path.stops[stop], prefix);
    };
    const LayerChoices none = choose_to(0);
    if (consider(none) || is_late(none) || !consider(choose_to(path.stops.size() - 1))) return;
    size_t too_few = 0;
    size_t enough = path.stops.size() - 1;
    while (enough - too_few > 1) {
      const size_t middle = (too_few + enough) / 2;
      const LayerChoices choices = choose_to(middle);
      if (consider(choices)) {
        enough = middle;
      } else {
        if (is_late(choices)) return;
        too_few = middle;
      }
    }
  }

  void search_paths(int64_t transient) {
    const OptionPath path = find_path(transient);
    search_path(path, {});
    if (!may_offload()) return;
    if (is_uniform_) return search_path(path, {.num_layers = layers_.size(), .names = {}});
    constexpr size_t kMostNames = 6;
    for (size_t names = 0; names <= std::min(expensive_.size(), kMostNames); ++names) {
      OffloadedPrefix prefix;
      prefix.names = {expensive_.begin(), expensive_.begin() + static_cast<ptrdiff_t>(names)};
      for (size_t count = 1; count <= layers_.size(); count += std::max<size_t>(count / 3, 1)) {
        prefix.num_layers = count;
        search_path(path, prefix);
      }
      prefix.num_layers = layers_.size();
      search_path(path, prefix);
    }
  }

  /// What users write for all layers.
  void try_by_hand() {
    std::vector<std::set<std::string>> wholes = {{}};
    for (const std::string& name : expensive_) wholes.push_back({name});
    const auto everywhere = [&](const Names& recompute, bool offload,
                                const std::set<std::string>& names) {
      LayerChoices choices;
      for (const int64_t layer : layers_) {
        if (!recompute.empty()) {
          const LayerOption option{recompute, {}};
          if (class_of_.at(layer)->base.recomputed != Names{"all"})
            recompute_more(choices, layer, option);
        }
        if (offload) offload_kept(choices, layer, names);
      }
      consider(choices);
    };
    everywhere({"all"}, false, {});
    if (is_uniform_) wholes.resize(1);
    for (size_t i = 1; i < wholes.size(); ++i) everywhere({*wholes[i].begin()}, false, {});
    if (!may_offload()) return;
    everywhere({"all"}, true, {});
    for (const std::set<std::string>& names : wholes) everywhere({}, true, names);
  }

  /// Lets one layer after the other do less, or something else, as long as that is better.
  void improve() {
    constexpr int kMostTrials = 600;
    int trials = 0;
    for (bool better = true; better;) {
      better = false;
      for (const int64_t layer : layers_) {
        for (const LayerChoices& changed : list_changes(layer)) {
          if (++trials > kMostTrials) return;
          const auto before = rank_of(result_.best.cost);
          consider(changed);
          better = better || rank_of(result_.best.cost) < before;
        }
      }
    }
  }

  /// Options that take less time than what the layer does, and others in place of offloading.
  std::vector<LayerChoices> list_changes(int64_t layer) {
    std::vector<LayerChoices> changes;
    const LayerChoices now = result_.best.choices;
    const auto own = now.find(layer);
    if (own == now.end()) return changes;
    LayerProgramKey key = class_of_.at(layer)->base;
    key.recomputed = recomputed_names(layer, own->second);
    const double seconds = trial_.judge_layer(key).seconds;
    const bool offloads = !own->second.offload.empty();
    for (const LayerOption& option : class_of_.at(layer)->options) {
      LayerChoices changed = now;
      recompute_more(changed, layer, option);
      const bool offloads_all = own->second.offload == Names{"all"};
      if (option.cost.seconds < seconds && (!offloads || offloads_all)) changes.push_back(changed);
      changed[layer].offload.clear();
      if (offloads) changes.push_back(std::move(changed));
    }
    return changes;
  }

  /// All that a layer computes again.
  Names recomputed_names(int64_t layer, const LayerChoice& choice) const {
    Names names = class_of_.at(layer)->base.recomputed;
    names.insert(names.end(), choice.recompute.begin(), choice.recompute.end());
    std::ranges::sort(names);
    if (std::ranges::binary_search(names, "all")) return {"all"};
    return names;
  }

  /// Entries that name what no copy is planned for would only confuse.
  void drop_idle_offloads() {
    const std::vector<int64_t> offloading =
        trial_.find_offloading(make_policy(base_, result_.best.choices, num_layers()));
    LayerChoices choices = result_.best.choices;
    for (auto& [layer, choice] : choices) {
      if (!std::ranges::binary_search(offloading, layer)) choice.offload.clear();
    }
    const PolicyCost& cost = judge(choices);
    const PolicyCost& best = result_.best.cost;
    if (cost.fits(limit_) && cost.seconds <= best.seconds)
      result_.best = {std::move(choices), cost};
  }

  const PolicyTrial& trial_;
  const SavedPolicy& base_;
  MemoryLimit limit_;
  bool is_uniform_;
  std::vector<int64_t> layers_;
  std::vector<LayerClass> classes_;
  std::map<int64_t, const LayerClass*> class_of_;
  Names expensive_;
  std::map<std::string, PolicyCost> judged_;  // by the policy's entries
  PolicySearchResult result_;
};

}  // namespace

PolicySearchResult search_policy(const PolicyTrial& trial, const SavedPolicy& base,
                                 const MemoryLimit& limit, PolicyGrain grain) {
  return PolicySearch(trial, base, limit, grain).run();
}

}  // namespace tessera
