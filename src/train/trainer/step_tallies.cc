#include "train/trainer/step_tallies.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera {
namespace {

/// Makes of each rank's tallies what all ranks saw: the largest of the largest, and the sums of
/// counts.
void join_over_ranks(std::vector<LayerTally>& tallies, Communicator& world) {
  const auto join = [&](std::vector<int64_t> LayerTally::*const counts, ReduceOp op) {
    std::vector<int64_t> all;
    for (const LayerTally& tally : tallies)
      all.insert(all.end(), (tally.*counts).begin(), (tally.*counts).end());
    const Tensor joined = view(std::span(all), {std::ssize(all)});
    world.all_reduce(joined, joined, op).wait();
    auto next = all.cbegin();
    for (LayerTally& tally : tallies) {
      std::copy_n(next, (tally.*counts).size(), (tally.*counts).begin());
      next += std::ssize(tally.*counts);
    }
  };
  join(&LayerTally::amax, ReduceOp::kMax);
  join(&LayerTally::values, ReduceOp::kSum);
  join(&LayerTally::saturated, ReduceOp::kSum);
  join(&LayerTally::nonfinite, ReduceOp::kSum);
}

}  // namespace

void set_scales(const RoundingHistory& history, RoundingTables& tables) {
  for (const RoundingHistory::Layer& layer : history.layers())
    tables.set_scales(layer.number, history.scales(layer));
}

std::vector<LayerTally> collect_tallies(const RoundingHistory& history,
                                        const RoundingTables& tables, Communicator& world) {
  std::vector<LayerTally> tallies;
  for (const RoundingHistory::Layer& layer : history.layers()) {
    tallies.emplace_back(layer.num_rows());
    tables.read(layer.number, tallies.back());
  }
  if (!tallies.empty()) join_over_ranks(tallies, world);
  return tallies;
}

std::vector<RoundingCounts> count_roundings(const RoundingHistory& history,
                                            const std::vector<LayerTally>& tallies) {
  std::vector<RoundingCounts> counts;
  for (size_t i = 0; i < tallies.size(); ++i)
    counts.push_back(count_roundings(history.layers()[i].number, tallies[i]));
  return counts;
}

void add_roundings(const std::vector<RoundingCounts>& layers, StepRecord& record) {
  for (const RoundingCounts& counts : layers) {
    const auto share = [&](OperandKind kind) {
      return counts.saturated[static_cast<size_t>(kind)];
    };
    const LayerRoundings layer{.layer = counts.layer,
                               .activations = share(OperandKind::kActivation),
                               .weights = share(OperandKind::kWeight),
                               .gradients = share(OperandKind::kGradient),
                               .nonfinite = counts.most_nonfinite()};
    record.saturated = std::max(record.saturated.value_or(0), layer.saturated());
    if (layer.saturated() > 0 || layer.nonfinite > 0) record.roundings.push_back(layer);
  }
}

std::vector<std::vector<int64_t>> list_loads(const std::vector<ExpertState>& experts) {
  std::vector<std::vector<int64_t>> loads;
  for (const ExpertState& expert : experts) {
    std::vector<int64_t> counts;
    for (const float count : expert.step_counts.get().span<float>())
      counts.push_back(std::llround(count));
    loads.push_back(std::move(counts));
  }
  return loads;
}

void add_objective(std::vector<NamedNumber> numbers, StepRecord& record) {
  record.objective = std::move(numbers);
  const auto loss = std::ranges::find(record.objective, "loss", &NamedNumber::name);
  if (loss == record.objective.end()) return;
  record.loss = loss->value;
  record.objective.erase(loss);
}

std::vector<ExpertLoad> loads_by_layer(std::vector<std::vector<int64_t>> loads,
                                       const ModelConfig& model) {
  std::vector<ExpertLoad> list;
  size_t next = 0;
  for (int64_t layer = 0; layer < model.all_layers(); ++layer) {
    if (model.is_moe_layer(layer)) list.push_back({layer, std::move(loads.at(next++))});
  }
  return list;
}

}  // namespace tessera
