#include <cstring>

#include "comm/staged_world.h"
#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "model/run/slab_bytes.h"
#include "ops/testing/shadow_backend.h"
#include "step/run/layout_testing.h"

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

/// Of equal scores the lower expert wins, so routers without weights choose the first experts.
void scale_routers(LayoutStep& step, const std::string& layer, float factor) {
  for (const ModelParameter& parameter : step.parameters().all()) {
    const std::string& name = parameter.spec.name;
    if (name.find("router") == std::string::npos || !name.starts_with(layer)) continue;
    const HostTensor weight(parameter.weight, HostTensor::Access::kWrite);
    for (float& value : weight.get().span<float>()) value *= factor;
    weight.store();
  }
}

TEST(ElasticStep, AllTokensToOneRankTakeTheBound) {
  run_shadow_ranks(4, [](World& world, const Backend& backend) {
    LayoutStep step(over_ep(enlarge), DType::kF32, world, backend);
    const TrainingModel& model = step.model();
    const SlabBytes before = model.slab_bytes();
    scale_routers(step, "", 0);
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

std::map<std::string, OwnedTensor> gradients_of(const LayoutStep& step) {
  std::map<std::string, OwnedTensor> gradients;
  step.add_gradients(gradients);
  return gradients;
}

/// A step where all rows of one layer come to rank 0: the most memory that its slabs have taken,
/// and its gradients.
struct SkewedStep {
  int64_t peak_bytes = 0;
  std::map<std::string, OwnedTensor> gradients;
};

constexpr int64_t kWanderingLayers = 6;
/// Twice round the layers; once where the sanitizers take their time.
constexpr int64_t kWanderingSteps = (kCaseShare == 1 ? 2 : 1) * kWanderingLayers;

/// One after the other on the same memory, or each on its own.
std::vector<SkewedStep> run_wandering(const LayoutCase& c, bool same_memory, World& world,
                                      const Backend& backend, int64_t* given_back = nullptr) {
  std::vector<SkewedStep> steps;
  std::unique_ptr<LayoutStep> step;
  for (int64_t layer = 0; layer < kWanderingSteps; ++layer) {
    if (!step || !same_memory) step = std::make_unique<LayoutStep>(c, DType::kF32, world, backend);
    // Any other layer routes as it did, to the bit.
    const LayoutStep fresh(c, DType::kF32, world, backend);
    for (size_t i = 0; i < step->parameters().all().size(); ++i) {
      const HostTensor to(step->parameters().all()[i].weight, HostTensor::Access::kWrite);
      const HostTensor from(fresh.parameters().all()[i].weight, HostTensor::Access::kRead);
      std::memcpy(to.get().data, from.get().data, to.get().num_bytes());
      to.store();
    }
    scale_routers(*step, fmt::format("layers.{}.", layer % kWanderingLayers), 0);
    step->run();
    steps.push_back({step->model().slabs().peak_bytes(), gradients_of(*step)});
  }
  if (given_back != nullptr) *given_back = step->model().slabs().given_back_bytes();
  return steps;
}

void expect_wandering_is_bounded(const LayoutCase& c, bool gives_back = true) {
  run_shadow_ranks(4, [&](World& world, const Backend& backend) {
    const auto alone = run_wandering(c, /*same_memory=*/false, world, backend);
    int64_t given_back = 0;
    const auto together = run_wandering(c, /*same_memory=*/true, world, backend, &given_back);
    int64_t worst = 0;
    for (size_t i = 0; i < alone.size(); ++i) {
      worst = std::max(worst, alone[i].peak_bytes);
      for (const auto& [name, gradient] : alone[i].gradients) {
        EXPECT_TRUE(std::ranges::equal(gradient.get().span<float>(),
                                       together[i].gradients.at(name).get().span<float>()))
            << name << " in step " << i;
      }
    }
    // Beside it, pieces that are needed in part.
    EXPECT_LE(together.back().peak_bytes, worst + worst / 8);
    const LayoutStep any(c, DType::kF32, world, backend);
    const int64_t of_all_layers = skewed(any.model(), 1e6).total();
    EXPECT_TRUE(world.rank() != 0 || !gives_back || 10 * worst < 9 * of_all_layers)
        << worst << " of " << of_all_layers;
    EXPECT_TRUE(world.rank() != 0 || !gives_back || given_back > worst / 8) << given_back;
  });
}

void deepen(ModelConfig& config) {
  enlarge(config);
  config.num_layers = kWanderingLayers;
}

TEST(ElasticStep, SkewThatWandersTakesTheMemoryOfItsWorstStep) {
  expect_wandering_is_bounded(over_ep(deepen));
}

TEST(ElasticStep, SkewThatWandersIsBoundedBesideRecomputationAndOffloading) {
  // What is recomputed is of the memory that all layers share.
  expect_wandering_is_bounded(over_ep(deepen, /*recompute=*/true), /*gives_back=*/false);
  LayoutCase offloaded = over_ep(deepen);
  offloaded.offload = {"all"};
  expect_wandering_is_bounded(offloaded);
}

/// Over lanes that spoil what is under way.
TEST(ElasticStep, OffloadedRowsComeBackAsTheyWere) {
  LayoutCase c = over_ep(deepen);
  const StepResult kept = run_layout(c, DType::kF32, run_shadow_ranks);
  c.offload = {"all"};
  expect_same_step(run_layout(c, DType::kF32, run_shadow_ranks), kept, 0);
  run_shadow_ranks(4, [&](World& world, const Backend& backend) {
    LayoutStep step(c, DType::kF32, world, backend);
    const TrainingModel& model = step.model();
    EXPECT_FALSE(model.placement().offloads.empty());
    step.run();
    const SlabBytes most = bound_slab_bytes(model.programs(), model.placement());
    EXPECT_LT(2 * model.slab_bytes().saved, most.saved);
  });
}

/// Of several micro-batches in flight, whose slabs share addresses.
TEST(ElasticStep, OffloadedRowsComeBackInPipelines) {
  for (const bool split_weights : {false, true}) {
    LayoutCase c = over_ep([](ModelConfig& config) {
      enlarge(config);
      config.num_layers = 8;
    });
    c.spread = split_weights ? [](ParallelSpec& p) {
      p.layout = {.ep = 2, .pp = 2};
      p.dispatcher = DispatcherRequest::kAllToAll;
      p.split_weights = true;
    } : [](ParallelSpec& p) {
      p.layout = {.ep = 2, .pp = 2};
      p.dispatcher = DispatcherRequest::kAllToAll;
      p.chunks_per_stage = 2;
      p.schedule = PipelineKind::kInterleaved;
    };
    const StepResult kept = run_layout(c, DType::kF32, run_shadow_ranks);
    c.offload = {"all"};
    expect_same_step(run_layout(c, DType::kF32, run_shadow_ranks), kept, 0);
    run_shadow_ranks(4, [&](World& world, const Backend& backend) {
      const LayoutStep step(c, DType::kF32, world, backend);
      EXPECT_TRUE(step.model().slabs().is_by_page());
      EXPECT_FALSE(world.rank() < 2 && step.model().placement().offloads.empty());
    });
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

TEST_P(ShadowLayouts, OffloadedValuesGiveTheBitsOfThoseThatStay) {
  LayoutCase c = GetParam();
  const StepResult kept = run_layout(c, DType::kF32, run_shadow_ranks);
  c.offload = {"all"};
  expect_same_step(run_layout(c, DType::kF32, run_shadow_ranks), kept, 0);
}

INSTANTIATE_TEST_SUITE_P(All, ShadowLayouts,
                         ::testing::ValuesIn(share_of_cases(model_layouts(), 1)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::testing
