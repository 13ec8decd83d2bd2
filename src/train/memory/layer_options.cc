#include "train/memory/layer_options.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

namespace tessera {
namespace {

constexpr double kLeastSeconds = 1e-12;  ///< so that what costs nothing can be compared

/// Time for a byte that is not kept.
double price(const LayerCost& from, const LayerCost& to) {
  const auto bytes = static_cast<double>(from.bytes - to.bytes);
  return std::max(to.seconds - from.seconds, kLeastSeconds) / bytes;
}

bool beats(const LayerCost& a, const LayerCost& b) {
  return a.bytes <= b.bytes && a.transient <= b.transient && a.seconds <= b.seconds;
}

/// Judges sets of groups of names, each once.
class OptionSearch {
 public:
  OptionSearch(const PolicyTrial& trial, const LayerProgramKey& base)
      : trial_(trial), base_(base), groups_(find_droppable(trial, base)) {}

  std::vector<LayerOption> run() {
    add_all();
    search(INT64_MAX);
    std::set<int64_t> limits;
    for (const auto& [chosen, option] : known_) limits.insert(option.cost.transient);
    constexpr size_t kMostLimits = 5;
    size_t count = 0;
    for (const int64_t limit : limits) {
      if (count++ == kMostLimits) break;
      search(limit);
    }
    return best();
  }

 private:
  using Chosen = std::set<size_t>;

  void add_all() {
    LayerProgramKey key = base_;
    key.recomputed = {"all"};
    more_.push_back({key.recomputed, trial_.judge_layer(key)});
  }

  const LayerCost& judge(const Chosen& chosen) {
    const auto [found, is_new] = known_.try_emplace(chosen);
    LayerOption& option = found->second;
    if (!is_new) return option.cost;
    std::set<std::string> names(base_.recomputed.begin(), base_.recomputed.end());
    for (const size_t group : chosen) names.insert(groups_[group].begin(), groups_[group].end());
    LayerProgramKey key = base_;
    key.recomputed = {names.begin(), names.end()};
    option = {key.recomputed, trial_.judge_layer(key)};
    return option.cost;
  }

  void search(int64_t transient) {
    Chosen chosen;
    judge(chosen);
    while (drop_one(chosen, transient)) continue;
    for (size_t group = 0; group < groups_.size(); ++group) chosen.insert(group);
    judge(chosen);
    while (keep_one(chosen, transient)) continue;
  }

  /// Of what can be dropped, the group with the most bytes for its time.
  bool drop_one(Chosen& chosen, int64_t transient) {
    const LayerCost now = judge(chosen);
    Chosen best;
    double least = 0;
    for (size_t group = 0; group < groups_.size(); ++group) {
      Chosen with = chosen;
      if (!with.insert(group).second) continue;
      const LayerCost& cost = judge(with);
      if (cost.bytes >= now.bytes || cost.transient > transient) continue;
      const double own = price(now, cost);
      if (!best.empty() && own >= least) continue;
      least = own;
      best = std::move(with);
    }
    if (best.empty()) return false;
    chosen = std::move(best);
    return true;
  }

  /// Of what is dropped, back the group with the most time for its bytes, while the working memory
  /// is within the limit or does not grow.
  bool keep_one(Chosen& chosen, int64_t transient) {
    if (chosen.empty()) return false;
    const LayerCost now = judge(chosen);
    Chosen best;
    double most = -1;
    for (const size_t group : chosen) {
      Chosen without = chosen;
      without.erase(group);
      const LayerCost& cost = judge(without);
      if (cost.transient > std::max(transient, now.transient)) continue;
      const double own = cost.bytes > now.bytes ? price(cost, now) : 0;
      if (own <= most) continue;
      most = own;
      best = std::move(without);
    }
    if (most < 0) return false;
    chosen = std::move(best);
    return true;
  }

  /// `base` first, then those that no other one beats.
  std::vector<LayerOption> best() {
    std::vector<LayerOption> all = more_;
    for (const auto& [chosen, option] : known_) all.push_back(option);
    std::vector<LayerOption> kept = {known_.at({})};
    for (size_t i = 0; i < all.size(); ++i) {
      const LayerCost& own = all[i].cost;
      bool beaten = beats(kept[0].cost, own);
      for (size_t j = 0; j < all.size() && !beaten; ++j) {
        const bool equal = beats(own, all[j].cost);
        beaten = j != i && beats(all[j].cost, own) && (!equal || j < i);
      }
      if (!beaten) kept.push_back(all[i]);
    }
    return kept;
  }

  const PolicyTrial& trial_;
  const LayerProgramKey& base_;
  std::vector<std::vector<std::string>> groups_;
  std::map<Chosen, LayerOption> known_;
  std::vector<LayerOption> more_;
};

}  // namespace

std::vector<std::vector<std::string>> find_droppable(const PolicyTrial& trial,
                                                     const LayerProgramKey& base) {
  const Executable& forward = trial.programs().compile_kind(base).derived.forward;
  const Program& program = forward.program();
  constexpr int64_t kLeastShare = 1000;
  constexpr int64_t kLeastOfNode = 32;
  const int64_t least = trial.judge_layer(base).bytes / kLeastShare;
  const auto may_drop = [&](ValueId id) {
    const Storage storage = forward.plan().values[id].storage;
    const bool kept = storage == Storage::kSaved || storage == Storage::kOffloaded;
    const bool offloaded = std::ranges::count(base.offloaded, program.value(id).name) > 0;
    return kept && !offloaded && is_dropped(program, id, {"all"});
  };
  std::vector<std::vector<std::string>> groups;
  for (const Node& node : program.nodes()) {
    std::vector<ValueId> values;
    std::ranges::copy_if(node.outputs, std::back_inserter(values), may_drop);
    int64_t bytes = 0;
    for (const ValueId id : values) bytes += program.type(id).num_bytes();
    if (bytes <= least) continue;
    std::vector<std::string>& names = groups.emplace_back();
    for (const ValueId id : values) {
      if (program.type(id).num_bytes() >= bytes / kLeastOfNode)
        names.push_back(program.value(id).name);
    }
  }
  return groups;
}

std::vector<LayerOption> find_layer_options(const PolicyTrial& trial, const LayerProgramKey& base) {
  if (base.recomputed == std::vector<std::string>{"all"})
    return {{base.recomputed, trial.judge_layer(base)}};
  return OptionSearch(trial, base).run();
}

std::vector<size_t> order_options(const std::vector<LayerOption>& options, int64_t transient) {
  if (options[0].cost.transient > transient) return {};
  std::vector<size_t> order = {0};
  while (true) {
    const LayerCost& now = options[order.back()].cost;
    size_t next = 0;
    for (size_t i = 1; i < options.size(); ++i) {
      const LayerCost& cost = options[i].cost;
      if (cost.transient > transient || cost.bytes >= now.bytes) continue;
      if (next == 0 || price(now, cost) < price(now, options[next].cost)) next = i;
    }
    if (next == 0) return order;
    order.push_back(next);
  }
}

}  // namespace tessera
