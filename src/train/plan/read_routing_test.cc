#include "train/plan/read_routing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "train/metrics/jsonl.h"
#include "train/plan/plan_testing.h"
#include "train/plan/simulated_step.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::settings_to_plan;
using testing::small_machine;
using ::testing::ThrowsMessage;

/// Steps in which all rows of layer 0 come to the first expert, after others that do not count.
void write_run(const std::string& path) {
  MetricsFile file(path, AppendFile::Start::kEmpty);
  for (int64_t step = 1; step <= 40; ++step) {
    StepRecord record{.step = step, .total_steps = 40, .loss = 1, .grad_norm = 1};
    const int64_t other = step <= 20 ? 80 : 0;
    record.expert_load.push_back({0, {80, 0, 0, 0, other, 0, 0, 0}});
    record.expert_load.push_back({1, {10, 10, 10, 10, 10, 10, 10, 10}});
    file.write(record);
  }
}

TEST(ReadRouting, IsThatOfTheLastSteps) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  write_run(path);
  Settings settings = settings_to_plan({"--parallel.ep=4", "--model.num_layers=2"});
  for (const std::string& run : {path, folder.file("")}) {
    const RoutingCounts counts = read_routing(run, settings.model);
    EXPECT_DOUBLE_EQ(counts.skew(0, 4), 4);
    EXPECT_DOUBLE_EQ(counts.skew(1, 4), 1);
  }
  const auto seconds = [&](const SimulationOptions& options) {
    return simulate_step(settings, 4, StepWork(small_machine(), options), 0).seconds;
  };
  const double routed = seconds({.routing = read_routing(path, settings.model)});
  EXPECT_GT(routed, seconds({}));
  EXPECT_LT(routed, seconds({.skew = 4})) << "of both layers";
}

TEST(ReadRouting, RefusesRunsThatDoNotSay) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("metrics.jsonl");
  const auto expect_refused = [&](const ModelConfig& model, const std::string& why) {
    EXPECT_THAT([&] { read_routing(path, model); }, ThrowsMessage<UserError>(HasSubstr(why)));
  };
  const ModelConfig model = settings_to_plan({}).model;
  expect_refused(model, "metrics.jsonl");
  { MetricsFile(path, AppendFile::Start::kEmpty).write(StepRecord{.step = 1, .total_steps = 1}); }
  expect_refused(model, "no step says what came to its experts");
  write_run(path);
  ModelConfig other = model;
  other.moe.num_experts = 16;
  expect_refused(other, "layer 0 has 8 experts, but the configuration 16");
}

}  // namespace
}  // namespace tessera
