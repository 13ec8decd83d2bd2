// Low-rank adapters trained on a GPU, beside the same on the host.
#include <gtest/gtest.h>

#include "ops/testing/gpu_test.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/testing/tiny_run.h"

namespace tessera::testing {
namespace {

class AdaptersCuda : public GpuTest {
 protected:
  Settings settings(const std::string& name, DeviceChoice device, Precision precision) const {
    Settings settings = tiny_settings(folder_);
    settings.model.hidden_size = 64;
    settings.model.moe.inner_size = 48;
    settings.model.moe.shared_inner_size = 32;
    settings.model.moe.first_dense_layers = 1;
    settings.train.precision = precision;
    settings.run.device = device;
    settings.run.folder = folder_.file(name);
    return settings;
  }

  const TemporaryFolder folder_;
};

/// With ranks that tensor cores take and one that they do not.
TEST_F(AdaptersCuda, TrainEvaluateAndContinueAsOnTheHost) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Settings base = settings("base", DeviceChoice::kCpu, precision);
    {
      const auto trainer = make_trainer(base);
      for (int step = 0; step < 4; ++step) trainer->step();
      trainer->save(make_schema(base).to_toml());
    }
    const double tolerance = precision == Precision::kF32 ? 1e-4 : 2e-2;
    for (const int64_t rank : {8, 16, 5}) {
      SCOPED_TRACE(fmt::format("rank {}", rank));
      const auto run = [&](DeviceChoice device) {
        Settings own = settings(device == DeviceChoice::kCpu ? "cpu" : "gpu", device, precision);
        own.run.init_from = base.run.folder;
        own.model.lora = {.rank = rank, .alpha = 16};
        auto trainer = make_trainer(own);
        std::vector<double> losses = {trainer->validate()};
        for (int step = 0; step < 4; ++step) losses.push_back(trainer->step().loss);
        losses.push_back(trainer->validate());
        trainer->save(make_schema(own).to_toml());
        const auto resumed = make_trainer(own);
        losses.push_back(resumed->validate());
        losses.push_back(resumed->step().loss);
        return losses;
      };
      const std::vector<double> cpu = run(DeviceChoice::kCpu);
      const std::vector<double> gpu = run(DeviceChoice::kCuda);
      ASSERT_EQ(gpu.size(), cpu.size());
      for (size_t i = 0; i < cpu.size(); ++i)
        EXPECT_NEAR(gpu[i], cpu[i], tolerance * cpu[i]) << "value " << i;
      LoadedModel on_host(folder_.file("gpu"), DeviceChoice::kCpu);
      LoadedModel on_gpu(folder_.file("gpu"), DeviceChoice::kCuda);
      const double expected = evaluate(on_host, {.max_batches = 2}).loss;
      EXPECT_NEAR(evaluate(on_gpu, {.max_batches = 2}).loss, expected, tolerance * expected);
      for (const char* name : {"cpu", "gpu"}) std::filesystem::remove_all(folder_.file(name));
    }
    std::filesystem::remove_all(base.run.folder);
  }
}

}  // namespace
}  // namespace tessera::testing
