#include "comm/staged_world.h"
#include "comm/thread/thread_world.h"
#include "model/run/slab_bytes.h"
#include "ops/testing/shadow_backend.h"
#include "step/layout_testing.h"

namespace tessera::testing {
namespace {

/// Ranks whose device has small pages, and refuses what uses memory that was not asked for.
void run_shadow_ranks(int64_t num_ranks, const std::function<void(World&, const Backend&)>& body) {
  run_thread_world(num_ranks, [&](World& host) {
    const auto staged = make_staged_world(host);
    const Backend backend = make_shadow_backend(make_cpu_kernels());
    body(*make_shadow_world(*staged, backend), backend);
  });
}

/// Layers whose rows take some pages.
void enlarge(ModelConfig& config) {
  config.hidden_size = 128;
  config.init_deviation = 0.05;
  config.moe.num_experts = 8;
  config.moe.inner_size = 64;
}

LayoutCase over_ep(void (*change)(ModelConfig&), bool recompute = false) {
  return {.name = "ep",
          .num_ranks = 4,
          .spread =
              [](ParallelSpec& p) {
                p.layout.ep = 4;
                p.dispatcher = DispatcherRequest::kAllToAll;
              },
          .change = change,
          .recompute = recompute};
}

SlabBytes skewed(const TrainingModel& model, double skew) {
  return skewed_slab_bytes(model.programs(), model.placement(), skew);
}

TEST(ElasticStep, MemoryComesWithTheRows) {
  run_shadow_ranks(4, [](World& world, const Backend& backend) {
    LayoutStep step(over_ep(enlarge), DType::kF32, world, backend);
    const TrainingModel& model = step.model();
    const SlabBytes balanced = skewed(model, 1);
    const SlabBytes most = bound_slab_bytes(model.programs(), model.placement());
    EXPECT_EQ(model.slab_bytes().total(), balanced.total());
    EXPECT_LT(2 * balanced.saved, most.saved) << "four ranks can send four times the share";
    EXPECT_EQ(model.activation_bytes().saved, balanced.saved);
    EXPECT_EQ(model.activation_bytes().worst, most.total() - balanced.total());
    step.run();
    EXPECT_GE(model.slab_bytes().total(), balanced.total());
    EXPECT_LT(model.slab_bytes().saved, skewed(model, 2).saved);
  });
}

/// Of equal scores the lower expert wins, so without weights all routers choose the first experts.
TEST(ElasticStep, AllTokensToOneRankTakeTheBound) {
  run_shadow_ranks(4, [](World& world, const Backend& backend) {
    LayoutStep step(over_ep(enlarge), DType::kF32, world, backend);
    const TrainingModel& model = step.model();
    const SlabBytes before = model.slab_bytes();
    for (const ModelParameter& parameter : step.parameters().all()) {
      if (parameter.spec.name.find("router") == std::string::npos) continue;
      const HostTensor weight(parameter.weight, HostTensor::Access::kWrite);
      std::ranges::fill(weight.get().span<float>(), 0.0F);
      weight.store();
    }
    step.run();
    const SlabBytes after = model.slab_bytes();
    if (world.rank() == 0) {
      const double all = 1e6;
      EXPECT_EQ(after.saved, skewed(model, all).saved);
      EXPECT_EQ(after.transient, skewed(model, all).transient);
      EXPECT_GT(after.saved, 2 * before.saved);
    } else {
      EXPECT_EQ(after.total(), before.total());
    }
  });
}

TEST(ElasticStep, GradientsAreThoseOfOneRank) {
  for (const bool recompute : {false, true}) {
    const LayoutCase c = over_ep(enlarge, recompute);
    const StepResult one = run_layout(on_one_rank(c), DType::kF32, run_shadow_ranks);
    expect_same_step(run_layout(c, DType::kF32, run_shadow_ranks), one, 1e-4);
  }
}

TEST(ElasticStep, OneRankTakesItsMemoryWhole) {
  run_shadow_ranks(1, [](World& world, const Backend& backend) {
    LayoutStep step(on_one_rank(over_ep(enlarge)), DType::kF32, world, backend);
    const TrainingModel& model = step.model();
    EXPECT_FALSE(comes_by_pages(model.programs(), model.placement()));
    EXPECT_EQ(model.activation_bytes().worst, 0);
    EXPECT_EQ(model.slab_bytes().total(),
              bound_slab_bytes(model.programs(), model.placement()).total());
  });
}

class ShadowLayouts : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(ShadowLayouts, GiveTheGradientsOfOneRank) {
  const StepResult one = run_layout(on_one_rank(GetParam()), DType::kF32, run_shadow_ranks);
  expect_same_step(run_layout(GetParam(), DType::kF32, run_shadow_ranks), one, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(All, ShadowLayouts, ::testing::ValuesIn(model_layouts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::testing
