// Whole training runs on a GPU, beside the same ones on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <numeric>

#include "ops/testing/gpu_test.h"
#include "train/bench_layer.h"
#include "train/testing/tiny_run.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

Settings on(DeviceChoice device, Settings settings) {
  settings.run.device = device;
  return settings;
}

std::vector<double> run_steps(Trainer& trainer, int count) {
  std::vector<double> losses;
  for (int i = 0; i < count; ++i) losses.push_back(trainer.step().loss);
  return losses;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << "step " << i + 1;
}

double mean_of_last(const std::vector<double>& values, size_t count) {
  double sum = 0;
  for (size_t i = values.size() - count; i < values.size(); ++i) sum += values[i];
  return sum / static_cast<double>(count);
}

struct RunCase {
  std::string name;
  double tolerance;  ///< of losses between the devices, relative, in the first steps
  void (*change)(Settings&);
};
void PrintTo(const RunCase& run, std::ostream* out) {
  *out << run.name;
}

class GpuRun : public GpuTest, public ::testing::WithParamInterface<RunCase> {
 protected:
  Settings settings(DeviceChoice device) const {
    Settings settings = on(device, tiny_settings(folder_));
    GetParam().change(settings);
    return settings;
  }
  const TemporaryFolder folder_;
};

TEST_P(GpuRun, TwiceGivesTheSameBits) {
  const auto a = make_trainer(settings(DeviceChoice::kCuda));
  const auto b = make_trainer(settings(DeviceChoice::kCuda));
  ASSERT_FALSE(a->backend().is_host());
  EXPECT_EQ(run_steps(*a, 4), run_steps(*b, 4));
  expect_same_state(*a, *b);
}

TEST_P(GpuRun, ContinuesBitwise) {
  const auto whole = make_trainer(settings(DeviceChoice::kCuda));
  const auto losses = run_steps(*whole, 4);

  const auto first = make_trainer(settings(DeviceChoice::kCuda));
  run_steps(*first, 2);
  first->save("");
  const auto second = make_trainer(settings(DeviceChoice::kCuda));
  ASSERT_EQ(second->position().step, 2);
  EXPECT_EQ(run_steps(*second, 2), std::vector(losses.begin() + 2, losses.end()));
  expect_same_state(*whole, *second);
}

/// A checkpoint of either continues on the other.
TEST_P(GpuRun, GoesOnWhereTheOtherDeviceStopped) {
  const auto expected = run_steps(*make_trainer(settings(DeviceChoice::kCpu)), 4);
  for (const auto& [from, to, folder] :
       {std::tuple(DeviceChoice::kCuda, DeviceChoice::kCpu, "from-gpu"),
        std::tuple(DeviceChoice::kCpu, DeviceChoice::kCuda, "from-cpu")}) {
    Settings own = settings(from);
    own.run.folder = folder_.file(folder);
    const auto first = make_trainer(own);
    auto losses = run_steps(*first, 2);
    first->save("");
    const auto second = make_trainer(on(to, own));
    ASSERT_EQ(second->position().step, 2);
    for (const double loss : run_steps(*second, 2)) losses.push_back(loss);
    expect_near(losses, expected, GetParam().tolerance);
  }
}

TEST_P(GpuRun, ValidatesAndCountsAsTheCpuDoes) {
  const auto cpu = make_trainer(settings(DeviceChoice::kCpu));
  const auto gpu = make_trainer(settings(DeviceChoice::kCuda));
  EXPECT_NEAR(gpu->validate(), cpu->validate(), GetParam().tolerance * cpu->validate());
  const StepOutcome expected = cpu->step();
  const StepOutcome found = gpu->step();
  EXPECT_NEAR(found.update.grad_norm, expected.update.grad_norm,
              20 * GetParam().tolerance * expected.update.grad_norm);
  EXPECT_NEAR(found.balance_loss, expected.balance_loss, 0.05 * expected.balance_loss);
  for (const std::vector<int64_t>& layer : gpu->expert_loads())
    EXPECT_EQ(std::accumulate(layer.begin(), layer.end(), int64_t{0}), 4 * 16 * 2);
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuRun,
    ::testing::Values(
        RunCase{"f32", 5e-4, [](Settings&) {}},
        RunCase{"bf16", 2e-2, [](Settings& s) { s.train.precision = Precision::kBF16; }},
        RunCase{"recompute", 5e-4, [](Settings& s) { s.train.recompute = {"all"}; }},
        RunCase{"global_balance", 5e-4,
                [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
        RunCase{"predicted_tokens", 5e-4, [](Settings& s) { s.model.mtp_layers = 1; }}),
    [](const auto& info) { return info.param.name; });

class GpuRuns : public GpuTest {
 protected:
  const TemporaryFolder folder_;
};

/// Roundings grow with the steps until the runs are different ones that learn the same.
TEST_F(GpuRuns, TwoHundredStepsLearnWhatTheCpuLearns) {
  constexpr int kSteps = 200;
  Settings settings = tiny_settings(folder_);
  settings.train.steps = settings.schedule.num_steps = kSteps;
  settings.schedule.peak_lr = 3e-3;
  const auto cpu = run_steps(*make_trainer(on(DeviceChoice::kCpu, settings)), kSteps);
  const auto gpu = run_steps(*make_trainer(on(DeviceChoice::kCuda, settings)), kSteps);
  expect_near({gpu.begin(), gpu.begin() + 4}, {cpu.begin(), cpu.begin() + 4}, 5e-4);
  EXPECT_LT(mean_of_last(gpu, 20), 0.7 * gpu.front());
  EXPECT_NEAR(mean_of_last(gpu, 20), mean_of_last(cpu, 20), 0.03 * mean_of_last(cpu, 20));
  for (size_t step = 0; step < kSteps; step += 20)
    std::cout << fmt::format("  step {:>3}: cpu {:.5f}, gpu {:.5f}\n", step + 1, cpu[step],
                             gpu[step]);
}

/// One expert is never chosen: its products have no rows.
TEST_F(GpuRuns, TrainWithADeadExpert) {
  for (const auto& [precision, tolerance] :
       {std::pair(Precision::kF32, 5e-4), std::pair(Precision::kBF16, 2e-2)}) {
    Settings settings = tiny_settings(folder_);
    settings.train.precision = precision;
    settings.model.moe.expert_bias = true;
    std::vector<std::vector<double>> losses;
    for (const DeviceChoice device : {DeviceChoice::kCpu, DeviceChoice::kCuda}) {
      const auto trainer = make_trainer(on(device, settings));
      for (ExpertState& expert : trainer->state().experts())
        expert.bias.get().span<float>()[1] = -1e9F;
      losses.push_back(run_steps(*trainer, 3));
      for (const std::vector<int64_t>& layer : trainer->expert_loads()) {
        EXPECT_EQ(layer[1], 0);
        EXPECT_GT(layer[0] + layer[2] + layer[3], 0);
      }
    }
    expect_near(losses[1], losses[0], tolerance);
  }
}

/// What cannot fit is refused before anything of it is taken, and the GPU stays usable.
TEST_F(GpuRuns, AModelBeyondTheMemoryIsRefused) {
  Settings huge = on(DeviceChoice::kCuda, tiny_settings(folder_));
  huge.model.hidden_size = 131072;
  huge.model.num_heads = 1024;
  const auto expect_refused = [](const auto& call) {
    try {
      call();
      FAIL() << "hundreds of GiB were taken to fit";
    } catch (const UserError& error) {
      for (const char* part : {"out of memory", "at the peak", "cuda", "weights", "optimizer",
                               "activations", "are free", "train.micro_batch"})
        EXPECT_THAT(error.what(), HasSubstr(part));
      std::cout << "  " << error.what() << "\n";
    }
  };
  expect_refused([&] { check_model(huge, 1); });
  expect_refused([&] { make_trainer(huge); });
  EXPECT_GT(make_trainer(on(DeviceChoice::kCuda, tiny_settings(folder_)))->step().loss, 0);
}

TEST_F(GpuRuns, BenchTimesSteps) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  settings.model.vocab_size = 320;
  const StepBenchResult result = bench_step({.settings = settings, .steps = 2, .warmup = 1});
  EXPECT_EQ(result.device, "cuda:0");
  EXPECT_GT(result.median(), 0);
  EXPECT_GT(result.operators.at("router"), 0);
  EXPECT_GT(result.matrix_peak, 1e12);
}

TEST_F(GpuRuns, BenchTimesBlocks) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  settings.model.vocab_size = 320;
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    settings.train.precision = precision;
    const LayerBenchResult moe = bench_layer({.settings = settings, .runs = 2, .warmup = 1});
    EXPECT_EQ(moe.device, "cuda:0");
    EXPECT_GT(moe.backward.operators.at("grouped_matmul_wgrad"), 0);
    EXPECT_EQ(std::accumulate(moe.expert_load.begin(), moe.expert_load.end(), 0.0), 2 * 16 * 2);
    const LayerBenchResult attention = bench_layer(
        {.settings = settings, .block = LayerBlock::kAttention, .runs = 1, .warmup = 0});
    EXPECT_GT(attention.backward.median(), 0);
  }
}

}  // namespace
}  // namespace tessera::testing
