// Runs on a GPU whose products read rounded numbers, beside the same on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/quantize/quantize_testing.h"
#include "ops/testing/gpu_test.h"
#include "train/testing/layout_runs.h"
#include "train/testing/option_families.h"
#include "train/testing/tiny_run.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class RoundedProductsCuda : public GpuTest {
 protected:
  static std::vector<double> losses_of(const Settings& settings, DeviceChoice device) {
    Settings chosen = settings;
    chosen.run.device = device;
    chosen.run.resume = ResumeMode::kNever;
    validate(chosen);
    const auto trainer = make_trainer(chosen);
    std::vector<double> losses;
    for (int64_t i = 0; i < chosen.train.steps; ++i) losses.push_back(trainer->step().loss);
    return losses;
  }
  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected,
                          double tolerance) {
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << "step " << i;
  }

  const TemporaryFolder folder_;
};

TEST_F(RoundedProductsCuda, EveryRecipeLearnsAsOnTheHost) {
  Settings settings = tiny_settings(folder_);
  settings.train.precision = Precision::kBF16;
  const std::vector<double> bf16 = losses_of(settings, DeviceChoice::kCuda);
  settings.train.precision = Precision::kFp8;
  for (const Recipe& recipe : recipes()) {
    SCOPED_TRACE(recipe.name);
    settings.precision.recipe = std::string(recipe.name);
    const std::vector<double> found = losses_of(settings, DeviceChoice::kCuda);
    EXPECT_NE(found, bf16);
    expect_near(found, losses_of(settings, DeviceChoice::kCpu), 0.03);
    EXPECT_EQ(found, losses_of(settings, DeviceChoice::kCuda)) << "two runs differ";
  }
}

/// Of the same numbers, whose sums alone differ.
TEST_F(RoundedProductsCuda, Fp8LearnsAsItsEmulation) {
  Settings settings = tiny_settings(folder_);
  settings.model.hidden_size = settings.model.moe.inner_size = 128;
  settings.schedule.peak_lr = 1e-3;
  settings.train.precision = Precision::kFp8;
  for (const char* recipe : {"rowwise", "blockwise"}) {
    for (const auto& [rounds_gradients, saved] :
         {std::pair(true, SavedPrecision::kBf16), std::pair(false, SavedPrecision::kBf16),
          std::pair(true, SavedPrecision::kFp8), std::pair(false, SavedPrecision::kFp8),
          std::pair(true, SavedPrecision::kFp8All)}) {
      SCOPED_TRACE(
          fmt::format("{} {} saved {}", recipe, rounds_gradients, static_cast<int>(saved)));
      settings.precision.saved = saved;
      settings.precision.recipe = recipe;
      settings.precision.weight_gradients = rounds_gradients;
      settings.precision.emulate = false;
      const std::vector<double> found = losses_of(settings, DeviceChoice::kCuda);
      EXPECT_EQ(found, losses_of(settings, DeviceChoice::kCuda)) << "two runs differ";
      settings.precision.emulate = true;
      const std::vector<double> emulated = losses_of(settings, DeviceChoice::kCuda);
      EXPECT_NE(found, emulated);
      expect_near(found, emulated, 0.02);
    }
  }
}

/// Weights that are cast from masters on the GPU, and turned there, learn as on the host; at the
/// end they are what the host casts of the same masters.
TEST_F(RoundedProductsCuda, WeightsInFp8AreTheHosts) {
  Settings settings = tiny_settings(folder_);
  settings.model.hidden_size = settings.model.moe.inner_size = 128;
  settings.schedule.peak_lr = 1e-3;
  settings.train.precision = Precision::kFp8;
  settings.precision.fp8_weights = true;
  for (const bool rounds_gradients : {true, false}) {
    settings.precision.weight_gradients = rounds_gradients;
    const std::vector<double> found = losses_of(settings, DeviceChoice::kCuda);
    expect_near(found, losses_of(settings, DeviceChoice::kCpu), 0.03);
    Settings other = settings;
    other.run.cuda_graphs = GraphMode::kOff;
    other.precision.weight_copies = false;
    EXPECT_EQ(found, losses_of(other, DeviceChoice::kCuda)) << "without graphs and copies";
    other.precision.emulate = true;
    expect_near(found, losses_of(other, DeviceChoice::kCuda), 0.02);
  }
  settings.run.device = DeviceChoice::kCuda;
  settings.run.resume = ResumeMode::kNever;
  const auto trainer = make_trainer(settings);
  for (int64_t i = 0; i < 3; ++i) trainer->step();
  for (const NamedSlice& master : trainer->state().optimizer().weight_slices(HeldPart::kOwned)) {
    const ModelParameter& parameter = trainer->state().parameters().find(master.name);
    if (!parameter.spec.is_fp8()) continue;
    const HostTensor values(master.tensor, HostTensor::Access::kRead);
    const ScaledTensor expected = quantize(values.get(), {.scale = ScaleLayout::block(128, 128)});
    const ScaledTensor own(type_of(parameter.weight));
    parameter.weight.device->copy(own.tensor.data, parameter.weight.data,
                                  parameter.weight.num_bytes());
    parameter.weight.device->synchronize();
    EXPECT_EQ(own.elements(), expected.elements()) << master.name;
    EXPECT_EQ(own.scales(), expected.scales()) << master.name;
  }
}

/// Also where the GPU repeats recorded steps.
TEST_F(RoundedProductsCuda, DelayedScalesAreThoseOfTheHost) {
  Settings settings = tiny_settings(folder_);
  settings.train.precision = Precision::kFp8;
  settings.precision.recipe = "tensorwise_delayed";
  settings.precision.delayed.history = 8;
  settings.run.resume = ResumeMode::kNever;
  const auto roundings_after = [&](int64_t steps, DeviceChoice device, GraphMode graphs) {
    Settings chosen = settings;
    chosen.run.device = device;
    chosen.run.cuda_graphs = graphs;
    const auto trainer = make_trainer(chosen);
    for (int64_t i = 0; i < steps; ++i) trainer->step();
    return list_roundings(trainer->state().roundings());
  };
  const auto expected = roundings_after(1, DeviceChoice::kCpu, GraphMode::kAuto);
  const auto found = roundings_after(1, DeviceChoice::kCuda, GraphMode::kAuto);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 0.05 * expected[i] + 1e-7) << i;
  EXPECT_EQ(roundings_after(6, DeviceChoice::kCuda, GraphMode::kAuto),
            roundings_after(6, DeviceChoice::kCuda, GraphMode::kOff));
}

TEST_F(RoundedProductsCuda, WithoutAnyAreThoseOfBf16) {
  Settings settings = tiny_settings(folder_);
  settings.train.steps = settings.schedule.num_steps = 3;
  settings.train.precision = Precision::kBF16;
  const std::vector<double> expected = losses_of(settings, DeviceChoice::kCuda);
  settings.train.precision = Precision::kFp8;
  settings.precision.plain = {"all"};
  expect_near(losses_of(settings, DeviceChoice::kCuda), expected, 1e-3);
}

class RoundedFamiliesCuda : public RoundedProductsCuda,
                            public ::testing::WithParamInterface<OptionFamily> {};

/// Every option that changes which operators run: refused by name, or near the host's run.
TEST_P(RoundedFamiliesCuda, AreNearTheHosts) {
  Settings settings = settings_of(GetParam());
  settings.run.folder = folder_.file("run");
  settings.data.tokens = folder_.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 2;
  write_tokens(settings);
  settings.train.precision = Precision::kFp8;
  settings.train.global_batch = 2 * settings.train.micro_batch;
  // Emulated, and multiplied in FP8.
  for (const auto& [recipe, saved] :
       {std::pair("mxfp8", SavedPrecision::kBf16), std::pair("rowwise", SavedPrecision::kBf16),
        std::pair("rowwise", SavedPrecision::kFp8),
        std::pair("rowwise", SavedPrecision::kFp8All)}) {
    SCOPED_TRACE(recipe);
    settings.precision.recipe = recipe;
    settings.precision.saved = saved;
    try {
      validate(settings);
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("train.precision = \"fp8\""));
      return;
    }
    expect_near(losses_of(settings, DeviceChoice::kCuda), losses_of(settings, DeviceChoice::kCpu),
                0.02);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RoundedFamiliesCuda, ::testing::ValuesIn(option_families()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::testing
