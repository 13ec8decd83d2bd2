#include <gtest/gtest.h>

#include <numeric>

#include "model/run/model_testing.h"

namespace tessera {
namespace {

using testing::TestBatch;
using testing::tiny_config;
using testing::tiny_shape;

struct HooksCase {
  std::string name;
  bool tied = false;
  int64_t mtp_layers = 0;
  bool split_weights = false;
};

void PrintTo(const HooksCase& c, std::ostream* out) {
  *out << c.name;
}

/// One micro-batch, and what its hooks were told.
class PassHooksTest : public ::testing::TestWithParam<HooksCase> {
 protected:
  PassHooksTest()
      : config_(make_config()),
        parameters_(list_parameters(config_, DType::kF32), true),
        experts_(make_expert_states(config_)),
        model_(config_, tiny_shape(2, 6), {}, make_cpu_kernels(),
               {.split_weights = GetParam().split_weights}) {
    parameters_.initialize(3);
    model_.bind(parameters_, experts_);
  }

  static ModelConfig make_config() {
    ModelConfig config = tiny_config();
    config.tie_embeddings = GetParam().tied;
    config.mtp_layers = GetParam().mtp_layers;
    return config;
  }

  void run(const PassHooks& hooks) {
    TestBatch batch(config_, 2, 6, 5);
    ChunkRun& run = model_.run_at({0, 0});
    run.load(batch.view(), {.loss = 0.1F, .balance = 0.01F, .mtp = 0.1F});
    run.forward({}, hooks);
    run.backward({}, hooks);
    run.backward_weights({}, hooks);
  }

  std::vector<float> gradient(size_t idx) const {
    const auto values = parameters_.all()[idx].grad.span<float>();
    return {values.begin(), values.end()};
  }

  ModelConfig config_;
  ParameterSet parameters_;
  std::vector<ExpertState> experts_;
  TrainingModel model_;
};

/// Every gradient is told of once, and does not change any more.
TEST_P(PassHooksTest, GradientsAreCompleteWhenTheyAreSaidToBe) {
  std::map<size_t, std::vector<float>> complete;
  std::vector<size_t> first;
  run({.before_forward = {}, .after_backward = [&](std::span<const size_t> parameters) {
         if (complete.empty()) first.assign(parameters.begin(), parameters.end());
         for (const size_t idx : parameters)
           EXPECT_TRUE(complete.emplace(idx, gradient(idx)).second)
               << parameters_.all()[idx].spec.name;
       }});
  ASSERT_EQ(complete.size(), parameters_.all().size());
  for (const auto& [idx, values] : complete)
    EXPECT_EQ(values, gradient(idx)) << parameters_.all()[idx].spec.name;
  // The sums over the ranks begin with the last that a forward pass uses.
  if (GetParam().mtp_layers == 0) {
    EXPECT_EQ(std::ranges::count(first, parameters_.index("final_norm.weight")), 1);
  }
  EXPECT_EQ(std::ranges::count(first, parameters_.index("layers.0.attn.q.weight")), 0);
}

/// Each program asks for its own weights, not for those of later ones.
TEST_P(PassHooksTest, WeightsAreAskedForWhenTheyAreNeeded) {
  std::vector<std::vector<size_t>> asked;
  run({.before_forward =
           [&](std::span<const size_t> parameters) {
             asked.emplace_back(parameters.begin(), parameters.end());
           },
       .after_backward = {}});
  EXPECT_EQ(asked.front(), std::vector{parameters_.index("embedding.weight")});
  std::vector<bool> seen(parameters_.all().size());
  for (const auto& parameters : asked) {
    for (const size_t idx : parameters) seen[idx] = true;
  }
  EXPECT_EQ(std::ranges::count(seen, false), 0);
}

INSTANTIATE_TEST_SUITE_P(All, PassHooksTest,
                         ::testing::Values(HooksCase{"plain"}, HooksCase{"tied", true},
                                           HooksCase{"prediction", false, 2},
                                           HooksCase{"tied_prediction", true, 1},
                                           HooksCase{"split", false, 0, true},
                                           HooksCase{"split_tied_prediction", true, 1, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
