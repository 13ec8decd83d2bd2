#include "train/plan/read_routing.h"

#include <deque>
#include <filesystem>

#include "core/error.h"
#include "train/metrics/jsonl.h"

namespace tessera {
namespace {

/// Steps that are read, the last of the run: enough for a mean, and of one state of the router.
constexpr size_t kSteps = 20;

}  // namespace

RoutingCounts read_routing(const std::string& run, const ModelConfig& model) {
  namespace fs = std::filesystem;
  const fs::path path = fs::is_directory(run) ? fs::path(run) / "metrics.jsonl" : fs::path(run);
  std::deque<std::vector<ExpertLoad>> last;
  read_metrics(path, {.step =
                          [&](const StepRecord& record) {
                            if (record.expert_load.empty()) return;
                            last.push_back(record.expert_load);
                            if (last.size() > kSteps) last.pop_front();
                          },
                      .validation = {}});
  RoutingCounts counts;
  for (const std::vector<ExpertLoad>& step : last) {
    for (const ExpertLoad& load : step) {
      const int64_t experts = std::ssize(load.tokens_per_expert);
      require(experts == model.moe.router_outputs(),
              "{}: layer {} has {} experts, but the configuration {} (moe.num_experts and "
              "moe.zero_experts)",
              path.string(), load.layer, experts, model.moe.router_outputs());
      auto tokens = load.tokens_per_expert;
      tokens.resize(model.moe.num_experts);  // the others compute nothing
      counts.add(load.layer, tokens);
    }
  }
  require(!counts.empty(), "{}: no step says what came to its experts", path.string());
  return counts;
}

}  // namespace tessera
