#include "train/bench/calibrate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "core/file/file.h"
#include "train/bench/bench_step.h"
#include "train/plan/simulated_step.h"
#include "train/state/load_settings.h"

namespace tessera {
namespace {

const std::vector<std::string> kSmall = {"--model.preset=tiny",       "--model.vocab_size=256",
                                         "--data.sequence_length=64", "--train.micro_batch=4",
                                         "--train.global_batch=8",    "--train.precision=f32",
                                         "--run.device=cpu"};

Settings small_settings() {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, "", kSmall);
  return settings;
}

/// What was calibrated is read again, and predicts about what was timed: a busy machine may be
/// several times as slow.
TEST(Calibrate, WritesAFileByWhichStepsArePredicted) {
  Hardware base{.on_host = true};
  base.network.gbs = 1;
  const Hardware found = calibrate(base, {{.name = "small", .overrides = kSmall}});
  const std::string path = ::testing::TempDir() + unique_name("calibrated-") + ".toml";
  replace_file(path, write_hardware(found));
  const Hardware hardware = load_hardware(path);
  std::filesystem::remove(path);
  EXPECT_GT(hardware.memory_gbs, 0);
  EXPECT_GT(hardware.memory_bytes(), 0);
  std::set<std::string> operators;
  for (const KernelSample& sample : hardware.samples()) operators.insert(sample.name);
  for (const char* name : {"linear", "rmsnorm", "attention", "grouped_matmul", "router"})
    EXPECT_TRUE(operators.contains(name)) << name;
  const double measured =
      bench_step({.settings = small_settings(), .steps = 5, .steps_only = true}).median();
  const double predicted = simulate_step(small_settings(), 1, StepWork(hardware), 0).seconds;
  EXPECT_GT(predicted, measured / 8);
  EXPECT_LT(predicted, measured * 8);
}

/// All of them can be trained, and none is there twice.
TEST(CalibrationCases, AreConfigurations) {
  for (const bool on_host : {false, true}) {
    std::set<std::vector<std::string>> known;
    for (const CalibrationCase& one : calibration_cases(on_host)) {
      EXPECT_TRUE(known.insert(one.overrides).second) << one.name;
      Settings settings;
      ConfigSchema schema = make_schema(settings);
      EXPECT_NO_THROW(load_settings(schema, settings, "", one.overrides)) << one.name;
      EXPECT_NO_THROW(validate_without_data(settings)) << one.name;
    }
  }
}

}  // namespace
}  // namespace tessera
