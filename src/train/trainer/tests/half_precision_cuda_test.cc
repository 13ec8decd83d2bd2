// Runs in FP16 on a GPU, beside the same on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/gpu_test.h"
#include "train/testing/layout_runs.h"
#include "train/testing/option_families.h"
#include "train/testing/tiny_run.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class HalfPrecisionCuda : public GpuTest {
 protected:
  struct Steps {
    std::vector<double> losses;
    std::vector<double> scales;
    int64_t num_skipped = 0;
    int64_t num_read_ahead = 0;
  };
  static Steps run(const Settings& settings, DeviceChoice device) {
    Settings chosen = settings;
    chosen.run.device = device;
    chosen.run.resume = ResumeMode::kNever;
    validate(chosen);
    const auto trainer = make_trainer(chosen);
    Steps steps;
    for (int64_t i = 0; i < chosen.train.steps; ++i) {
      const StepOutcome outcome = trainer->step();
      steps.losses.push_back(outcome.loss);
      steps.scales.push_back(outcome.loss_scale);
    }
    steps.num_skipped = trainer->position().skipped_steps;
    steps.num_read_ahead = trainer->num_read_ahead();
    return steps;
  }
  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected,
                          double tolerance) {
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << "step " << i;
  }
  Settings fp16() const {
    Settings settings = tiny_settings(folder_);
    settings.train.precision = Precision::kFp16;
    return settings;
  }

  const TemporaryFolder folder_;
};

TEST_F(HalfPrecisionCuda, LearnsAsOnTheHost) {
  const Settings settings = fp16();
  const Steps found = run(settings, DeviceChoice::kCuda);
  expect_near(found.losses, run(settings, DeviceChoice::kCpu).losses, 5e-3);
  EXPECT_EQ(found.losses, run(settings, DeviceChoice::kCuda).losses) << "two runs differ";
}

/// A step that is replayed is multiplied by, and divided by, the scale of its own: they change in
/// every few steps, first by overflows and then by growing.
TEST_F(HalfPrecisionCuda, ReplayedStepsSeeTheirScale) {
  Settings settings = fp16();
  settings.train.steps = settings.schedule.num_steps = 40;
  settings.precision.loss_scaling = {.initial = 0x1p36, .window = 3};
  settings.run.cuda_graphs = GraphMode::kOn;
  const Steps replayed = run(settings, DeviceChoice::kCuda);
  EXPECT_GT(replayed.num_skipped, 3);
  EXPECT_GT(replayed.num_read_ahead, 5);
  settings.run.cuda_graphs = GraphMode::kOff;
  const Steps launched = run(settings, DeviceChoice::kCuda);
  EXPECT_EQ(replayed.losses, launched.losses);
  EXPECT_EQ(replayed.scales, launched.scales);
  EXPECT_EQ(replayed.num_skipped, launched.num_skipped);
  const Steps host = run(settings, DeviceChoice::kCpu);
  expect_near(replayed.losses, host.losses, 0.02);
  EXPECT_EQ(replayed.scales, host.scales);
}

/// Weights rounded once a step, recomputed and offloaded values keep the bits.
TEST_F(HalfPrecisionCuda, ChoicesKeepTheBits) {
  const Settings settings = fp16();
  const std::vector<double> expected = run(settings, DeviceChoice::kCuda).losses;
  Settings other = settings;
  other.precision.weight_copies = false;
  EXPECT_EQ(run(other, DeviceChoice::kCuda).losses, expected);
  other.train.recompute = {"all"};
  EXPECT_EQ(run(other, DeviceChoice::kCuda).losses, expected);
  other.train.recompute = {};
  other.train.offload = {"all"};
  EXPECT_EQ(run(other, DeviceChoice::kCuda).losses, expected);
}

class HalfFamiliesCuda : public HalfPrecisionCuda,
                         public ::testing::WithParamInterface<OptionFamily> {};

/// Every option that changes which operators run: refused by name, or near the host's run.
TEST_P(HalfFamiliesCuda, AreNearTheHosts) {
  Settings settings = settings_of(GetParam());
  settings.run.folder = folder_.file("run");
  settings.data.tokens = folder_.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 2;
  write_tokens(settings);
  settings.train.precision = Precision::kFp16;
  settings.train.global_batch = 2 * settings.train.micro_batch;
  try {
    validate(settings);
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("train.precision = \"fp16\""));
    return;
  }
  expect_near(run(settings, DeviceChoice::kCuda).losses, run(settings, DeviceChoice::kCpu).losses,
              0.01);
}

INSTANTIATE_TEST_SUITE_P(All, HalfFamiliesCuda, ::testing::ValuesIn(option_families()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::testing
