#include <fmt/ranges.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "train/plan/context_times.h"
#include "train/setup/training_data.h"

namespace tessera {
namespace {

constexpr int64_t kSteps = 8;

/// "1 x 12, 4 x 1": ranks that share a micro-batch, and how many such there are.
std::string list_groups(const ContextWay& way) {
  std::vector<std::string> parts;
  for (const auto& [degree, count] : way.groups)
    parts.push_back(fmt::format("{} x {}", degree, count));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string seconds_of(const ContextWay& way) {
  return fmt::format("{:.3g} s", way.seconds);
}

nlohmann::ordered_json to_json(const ContextWay& way) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::object();
  for (const auto& [degree, count] : way.groups) groups[std::to_string(degree)] = count;
  return {{"micro_batches", way.micro_batches},
          {"seconds", way.seconds},
          {"mean_seconds", way.mean_seconds},
          {"groups", groups}};
}

nlohmann::ordered_json to_json(const ContextComparison& step) {
  return {{"documents", step.documents},      {"tokens", step.tokens},
          {"longest", step.longest},          {"fixed", to_json(step.fixed)},
          {"dynamic", to_json(step.dynamic)}, {"ratio", step.ratio()}};
}

void print(int64_t step, const ContextComparison& found) {
  std::cout << fmt::format(
      "{:>4} {:>9} {:>9} {:>8}   {:>9} {:>5.0f}%   {:>9} {:>5.0f}%   {:>5.2f}   {}\n", step,
      found.documents, found.tokens, found.longest, seconds_of(found.fixed),
      100 * found.fixed.mean_seconds / found.fixed.seconds, seconds_of(found.dynamic),
      100 * found.dynamic.mean_seconds / found.dynamic.seconds, found.ratio(),
      list_groups(found.dynamic));
}

}  // namespace

void show_contexts(Settings settings, const InspectArguments& arguments) {
  settings.parallel.dynamic_cp = true;
  validate(settings);
  const int64_t ranks =
      arguments.ranks > 0 ? arguments.ranks : least_ranks(settings.parallel.layout);
  const Hardware hardware = load_hardware(arguments.hardware);
  const TrainingData data = open_training_data(settings);
  const ContextCosts costs = simulate_costs(settings, ranks, hardware);
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  if (!arguments.json) {
    std::cout << fmt::format(
        "passes of {} ranks of {}, by the programs for CPUs; busy: a rank's own work\n"
        "step documents    tokens  longest   {:>9}   busy   {:>9}   busy   ratio   ranks x "
        "micro-batches\n",
        ranks, hardware.name, fmt::format("cp {}", settings.parallel.layout.cp), "dynamic");
  }
  for (int64_t step = 0; step < std::min(kSteps, settings.train.steps); ++step) {
    const ContextComparison found = compare_contexts(settings, ranks, *data.train, costs, step);
    if (arguments.json) {
      list.push_back(to_json(found));
    } else {
      print(step + 1, found);
    }
  }
  if (arguments.json) std::cout << list.dump(2) << "\n";
}

}  // namespace tessera
