// Whole models spread over ranks of GPUs, beside the same on one: ranks are threads that share the
// GPUs there are.
#include "ops/testing/gpu_ranks.h"
#include "step/run/layout_testing.h"

namespace tessera::testing {
namespace {

class GpuLayouts : public GpuTest, public ::testing::WithParamInterface<LayoutCase> {};

TEST_P(GpuLayouts, GiveTheGradientsOfOneRank) {
  const StepResult one = run_layout(on_one_rank(GetParam()), DType::kF32, run_gpu_ranks);
  const StepResult spread = run_layout(GetParam(), DType::kF32, run_gpu_ranks);
  expect_same_step(spread, one, 3e-4);
}

/// Its rounding may send tokens to other experts.
TEST_P(GpuLayouts, TheLossInBf16IsNear) {
  const StepResult one = run_layout(on_one_rank(GetParam()), DType::kBF16, run_gpu_ranks);
  const StepResult spread = run_layout(GetParam(), DType::kBF16, run_gpu_ranks);
  expect_losses_near(spread.losses, one.losses, 3e-2);
}

/// Whatever waits in the host's memory comes back as it was.
TEST_P(GpuLayouts, OffloadedValuesGiveTheGradientsOfThoseThatStay) {
  LayoutCase c = GetParam();
  const StepResult kept = run_layout(c, DType::kF32, run_gpu_ranks);
  c.offload = {"all"};
  expect_same_step(run_layout(c, DType::kF32, run_gpu_ranks), kept, 0);
}

TEST_P(GpuLayouts, StashedRowsGiveTheGradientsOfThoseThatStay) {
  expect_stash_changes_nothing(GetParam(), run_gpu_ranks);
}

INSTANTIATE_TEST_SUITE_P(All, GpuLayouts, ::testing::ValuesIn(model_layouts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::testing
