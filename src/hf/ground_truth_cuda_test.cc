// Hugging Face's numbers on a GPU, in F32 and BF16.
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>

#include "hf/testing/ground_truth.h"
#include "ops/testing/gpu_test.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

void change_nothing(ModelConfig& /*model*/) {}

class GroundTruthGpu : public GpuTest, public ::testing::WithParamInterface<fs::path> {
 protected:
  const fs::path& folder() const { return GetParam(); }
};

void expect_near(const std::string& what, double actual, double expected, double tolerance) {
  const double error = std::abs(actual - expected) / std::abs(expected);
  EXPECT_LT(error, tolerance) << what;
  EXPECT_FALSE(std::isnan(error)) << what;
  std::cout << fmt::format("  {} {:.1e}", what, error);
}

TEST_P(GroundTruthGpu, F32LossGradientsAndTwelveSteps) {
  constexpr double kTolerance = 1e-4;
  GroundTruth truth(folder(), change_nothing, DType::kF32, gpu());
  const MicroBatchResult result = truth.run(to_ids(truth.expected("input_ids")));
  std::cout << folder().filename().string() << ":";
  expect_near("loss", truth.total_loss(result), truth.expected_scalar("loss"), kTolerance);
  const LargestError gradients = truth.compare_gradients().largest;
  EXPECT_LT(gradients.value, kTolerance) << gradients.where;
  std::cout << fmt::format("  gradients {:.1e}", gradients.value);

  const std::vector<int32_t> ids = to_ids(truth.expected("traj_input_ids"));
  const auto rates = truth.expected("traj_lr");
  const auto losses = truth.expected("traj_loss");
  const size_t batch = ids.size() / rates.size();
  for (size_t step = 0; step < rates.size(); ++step) {
    const MicroBatchResult after = truth.run(std::span(ids).subspan(step * batch, batch));
    truth.optimizer().step(
        {.step_idx = static_cast<int64_t>(step), .lr = rates[step], .max_grad_norm = 1.0});
    const double error = std::abs(truth.total_loss(after) - losses[step]) / losses[step];
    EXPECT_LT(error, kTolerance) << "step " << step;
  }
  const LargestError logits = largest_of(
      row_errors(truth.logits(), truth.expected("traj_final_logits"), truth.shape("logits")[2]));
  EXPECT_LT(logits.value, kTolerance) << logits.where;
  std::cout << fmt::format("  final logits {:.1e}\n", logits.value);
}

/// As on the CPU: at most what a plain PyTorch run errs, by the median tensor.
TEST_P(GroundTruthGpu, Bf16ErrsNoMoreThanANaiveRun) {
  if (!fs::exists(folder() / "bf16.safetensors")) return;
  const HfTensors naive(folder() / "bf16.safetensors");
  GroundTruth truth(folder(), change_nothing, DType::kBF16, gpu());
  GroundTruth exact(folder(), change_nothing);
  const std::vector<int32_t> ids = to_ids(truth.expected("input_ids"));
  truth.run(ids);
  exact.run(ids);
  const double moved = moved_share(truth.expert_counts(), exact.expert_counts());
  const HfTensor& expected = *naive.find("gradients");
  const double ratio = median_of(truth.compare_gradients().tensors) /
                       median_of(to_doubles(expected.bytes().data(), DType::kF32,
                                            static_cast<size_t>(expected.entry->shape[0])));
  EXPECT_LT(moved, 0.02);
  // A token near a tie that goes to another expert changes whole rows of gradients.
  EXPECT_LT(ratio, moved < 0.005 ? 1.5 : moved < 0.01 ? 5.0 : 15.0);
  std::cout << fmt::format(
      "{}: BF16 gradients' error over a naive run's: {:.2f}; {:.2f}% of the assignments moved\n",
      folder().filename().string(), ratio, 100 * moved);
}

std::string folder_name(const ::testing::TestParamInfo<fs::path>& info) {
  return fmt::format("{}_{}", info.index, info.param.filename().string());
}

INSTANTIATE_TEST_SUITE_P(All, GroundTruthGpu, ::testing::ValuesIn(ground_truth_folders()),
                         folder_name);

}  // namespace
}  // namespace tessera::testing
