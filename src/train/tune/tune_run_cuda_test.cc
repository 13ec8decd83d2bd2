#include <cmath>
#include <fstream>
#include <sstream>

#include "ops/testing/gpu_test.h"
#include "train/metrics/jsonl.h"
#include "train/testing/tiny_run.h"
#include "train/tune/tune_run.h"

namespace tessera::testing {
namespace {

class GpuTuneRun : public GpuTest {
 protected:
  Settings settings(const std::string& run, DeviceChoice device) const {
    Settings settings = tiny_settings(folder_);
    settings.data.text.clear();
    settings.data.sequence_length = 24;
    settings.run.folder = folder_.file(run);
    settings.run.device = device;
    settings.run.report = settings.run.tensorboard = false;
    settings.run.checkpoint_interval = 0;
    settings.train.validation_interval = 0;
    settings.schedule.warmup_steps = 0;
    return settings;
  }
  std::vector<StepRecord> run(const Settings& settings) {
    const TrainRequest request{
        .settings = settings, .config_toml = "", .terminal = {}, .given_batches = true};
    const bool is_dpo = settings.train.objective == Objective::kDpo;
    const auto world = make_single_world();
    (is_dpo ? train_on_preferences : train_on_rewards)(request, *world, out_);
    std::vector<StepRecord> records;
    read_metrics(settings.run.folder + "/metrics.jsonl",
                 {.step = [&](const StepRecord& record) { records.push_back(record); }});
    return records;
  }
  static double number(const StepRecord& record, const std::string& name) {
    for (const NamedNumber& one : record.objective) {
      if (one.name == name) return one.value;
    }
    ADD_FAILURE() << "no " << name;
    return 0;
  }

  TemporaryFolder folder_;
  std::ostringstream out_;
};

TEST_F(GpuTuneRun, PreferencesAreLearnedAsOnTheCpu) {
  const auto learn =
      [&](const std::string& name, DeviceChoice device) {
        Settings own = settings(name, device);
        own.train.objective = Objective::kDpo;
        own.dpo.pairs = folder_.file("pairs.jsonl");
        std::ofstream(own.dpo.pairs)
            << "{\"prompt\": \"one\", \"chosen\": \"yes\", \"rejected\": \"no no\"}\n"
            << "{\"prompt\": \"\", \"chosen\": \"never\", \"rejected\": \"no\"}\n";
        return run(own);
      };
  const auto expected = learn("cpu", DeviceChoice::kCpu);
  const auto found = learn("gpu", DeviceChoice::kCuda);
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_NEAR(found.front().loss, std::log(2.0), 1e-6);
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i].loss, expected[i].loss, 5e-3) << "step " << i + 1;
}

/// Also with biases of the experts, which a GPU has copies of.
TEST_F(GpuTuneRun, RewardsRise) {
  for (const bool has_biases : {false, true}) {
    Settings own = settings(has_biases ? "biases" : "plain", DeviceChoice::kCuda);
    own.train.objective = Objective::kGrpo;
    own.rl.task = "digits";
    own.rl.max_tokens = 8;
    own.rl.group_size = 16;
    own.rl.router_replay = has_biases;
    own.model.moe.bias_update_speed = has_biases ? 1e-3 : 0;
    own.train.micro_batch = 16;
    own.train.global_batch = 32;
    own.train.steps = own.schedule.num_steps = 25;
    own.schedule.kind = ScheduleKind::kConstant;
    const auto records = run(own);
    ASSERT_EQ(records.size(), 25U);
    EXPECT_LT(number(records.front(), "reward_mean"), 0.2);
    EXPECT_GT(number(records.back(), "reward_mean"), 0.6) << out_.str();
    for (const StepRecord& record : records) {
      EXPECT_LT(std::abs(number(record, "generator_kl")), 1e-3) << record.step;
      if (has_biases) {
        EXPECT_LT(number(record, "generator_error"), 1e-3) << record.step;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
