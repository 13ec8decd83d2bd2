#include "step/build/estimate_passes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "model/run/model_testing.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"
#include "program/dependencies.h"
#include "step/build/place_saved.h"

namespace tessera {
namespace {

constexpr MachineRates kRates = {.flops = 1e12,
                                 .memory_bytes = 1e11,
                                 .link_bytes = 1e10,
                                 .host_bytes = 1e10,
                                 .exchange_seconds = 1e-5,
                                 .kernel_seconds = 1e-6};

std::vector<PipelineStep> one_micro_batch() {
  return {{.pass = PipelinePass::kForward}, {.pass = PipelinePass::kBackward}};
}

StagePrograms make_programs(const SavedPolicy& policy) {
  ModelConfig config = testing::tiny_config();
  config.num_layers = 6;
  return {config, testing::tiny_shape(2, 32), {}, policy, make_cpu_kernels()};
}

double estimate(const StagePrograms& programs, const MachineRates& rates) {
  const auto steps = one_micro_batch();
  const SavedPlacement placement = place_saved(programs, steps);
  return estimate_passes(list_step_passes(programs, nullptr, steps).runs, programs, placement,
                         rates);
}

/// Without exchanges: the sum over the nodes.
TEST(EstimateSeconds, IsTheSumOfTheNodes) {
  const StagePrograms programs = make_programs({});
  for (const auto& [key, kind] : programs.kinds) {
    for (const Executable* executable : {&kind->derived.forward, &kind->derived.backward}) {
      const Program& program = executable->program();
      double seconds = 0;
      for (const Node& node : program.nodes()) {
        const Cost cost = node.op->cost(program.types(node.inputs), program.types(node.outputs));
        seconds += 1e-6 + std::max(cost.flops / 1e12, cost.bytes / 1e11);
      }
      EXPECT_DOUBLE_EQ(estimate_seconds(*executable, kRates), seconds);
    }
  }
}

TEST(EstimatePasses, IsTheSumOfTheRuns) {
  const StagePrograms programs = make_programs({});
  double seconds = 0;
  for (const StepRun& run : list_step_passes(programs, nullptr, one_micro_batch()).runs)
    seconds += estimate_seconds(*run.executable, kRates);
  EXPECT_DOUBLE_EQ(estimate(programs, kRates), seconds);
}

TEST(EstimatePasses, CountsWhatRunsTwice) {
  const double kept = estimate(make_programs({}), kRates);
  const double one = estimate(make_programs({.recompute = parse_recompute({"all@2"})}), kRates);
  const double all = estimate(make_programs({.recompute = parse_recompute({"all"})}), kRates);
  EXPECT_GT(one, kept);
  EXPECT_NEAR(all - kept, 6 * (one - kept), 1e-9 * all);
}

/// Copies take from the memory's rate what they carry, and are waited for where the way is slower
/// than they were planned for.
TEST(EstimatePasses, CountsCopies) {
  SavedPolicy policy{.offload = {.entries = parse_offload({"all"}), .link_bytes = 1e15}};
  const StagePrograms programs = make_programs(policy);
  const auto steps = one_micro_batch();
  const SavedPlacement placement = place_saved(programs, steps);
  double bytes = 0;
  for (const LayerOffload& offload : placement.offloads)
    bytes += 2 * static_cast<double>(
                     layer_moved_bytes(programs, programs.part.chunks[0], offload.layer));
  ASSERT_GT(bytes, 0);
  const double kept = estimate(make_programs({}), kRates);
  MachineRates rates = kRates;
  rates.host_bytes = 1e15;
  EXPECT_NEAR(estimate(programs, rates), kept + bytes / rates.memory_bytes, 1e-9 * kept);
  rates.host_bytes = 1e6;
  EXPECT_GE(estimate(programs, rates), bytes / 2 / rates.host_bytes);
}

}  // namespace
}  // namespace tessera
