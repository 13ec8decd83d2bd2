// Whole models spread over ranks of the host, by what the GPUs' test runs: see layout_cuda_test.cc.
#include "comm/staged_world.h"
#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "step/run/layout_testing.h"

namespace tessera::testing {
namespace {

void run_host_ranks(int64_t num_ranks, const std::function<void(World&, const Backend&)>& body) {
  run_thread_world(num_ranks,
                   [&](World& host) { body(*make_staged_world(host), make_cpu_kernels()); });
}

class HostLayouts : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(HostLayouts, GiveTheGradientsOfOneRank) {
  const StepResult one = run_layout(on_one_rank(GetParam()), DType::kF32, run_host_ranks);
  const StepResult spread = run_layout(GetParam(), DType::kF32, run_host_ranks);
  expect_same_step(spread, one, 1e-4);
}

TEST_P(HostLayouts, FusedActivationsGiveTheBitsOfKernelsApart) {
  LayoutCase c = GetParam();
  const StepResult apart = run_layout(c, DType::kF32, run_host_ranks);
  c.fuse_activations = true;
  expect_same_step(run_layout(c, DType::kF32, run_host_ranks), apart, 0);
}

/// Experts and their adapters gather the same rows, where these are not of other ranks.
bool gathers_rows_twice(const LayoutCase& c) {
  ModelConfig config;
  c.change(config);
  ParallelSpec parallel;
  c.spread(parallel);
  return config.lora.rank > 0 && parallel.layout.ep == 1;
}

/// Also where what a product gathers has come from other ranks. Gradients of what is gathered twice
/// are added up in another order (program/fusion/fuse_gathers.h).
TEST_P(HostLayouts, FusedGathersGiveTheBitsOfCopies) {
  LayoutCase c = GetParam();
  c.gathers = GatherFusion::kNever;
  const StepResult copies = run_layout(c, DType::kF32, run_host_ranks);
  c.gathers = GatherFusion::kAlways;
  expect_same_step(run_layout(c, DType::kF32, run_host_ranks), copies,
                   gathers_rows_twice(c) ? 1e-6 : 0);
}

/// Whatever waits in the host's memory comes back as it was.
TEST_P(HostLayouts, OffloadedValuesGiveTheBitsOfThoseThatStay) {
  LayoutCase c = GetParam();
  const StepResult kept = run_layout(c, DType::kF32, run_host_ranks);
  c.offload = {"all"};
  expect_same_step(run_layout(c, DType::kF32, run_host_ranks), kept, 0);
}

TEST_P(HostLayouts, StashedRowsGiveTheBitsOfThoseThatStay) {
  expect_stash_changes_nothing(GetParam(), run_host_ranks);
}

INSTANTIATE_TEST_SUITE_P(All, HostLayouts, ::testing::ValuesIn(share_of_cases(model_layouts(), 0)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::testing
