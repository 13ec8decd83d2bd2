#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "model/run/gradient_cases.h"

namespace tessera {
namespace {

using testing::kLength;
using testing::kSequences;
using testing::ModelRig;
using testing::TestBatch;

ModelConfig jittered_config(double jitter, bool experts = false) {
  ModelConfig config = testing::tiny_config();
  config.mtp_layers = 1;
  config.moe.router_jitter = jitter;
  config.moe.jitter_experts = experts;
  return config;
}

/// A micro-batch's loss, and the rig with its gradients.
struct NoisyRun {
  std::unique_ptr<ModelRig> rig;
  double loss = 0;
};

NoisyRun run_with(const ModelConfig& config, const RouterNoise& noise,
                  const RecomputePolicy& policy = {}, int64_t length = kLength) {
  BatchShape shape = testing::tiny_shape(kSequences, length);
  shape.trains = true;
  NoisyRun run{std::make_unique<ModelRig>(config, shape, policy)};
  TestBatch batch(config, kSequences, length, 5);
  MicroBatch view = batch.view();
  view.noise = noise;
  run.rig->model.begin_step();
  run.loss = run.rig->model.run(view, testing::test_scales(batch)).loss;
  return run;
}

constexpr RouterNoise kNoise = {.training = true, .key = 77, .first_token = 24};

TEST(RouterNoise, IsOffInEvaluations) {
  const NoisyRun plain = run_with(jittered_config(0), {});
  for (const bool experts : {false, true}) {
    const NoisyRun off = run_with(jittered_config(0.3, experts), {.key = 77});
    EXPECT_EQ(plain.loss, off.loss);
  }
}

TEST(RouterNoise, IsAFunctionOfStepLayerAndToken) {
  const ModelConfig config = jittered_config(0.3);
  const double loss = run_with(config, kNoise).loss;
  EXPECT_EQ(run_with(config, kNoise).loss, loss);
  RouterNoise other_step = kNoise;
  other_step.key = 78;
  EXPECT_NE(run_with(config, other_step).loss, loss);
  RouterNoise other_tokens = kNoise;
  other_tokens.first_token = 0;
  EXPECT_NE(run_with(config, other_tokens).loss, loss);
  EXPECT_NE(run_with(jittered_config(0.3, true), kNoise).loss, loss);
}

TEST(RouterNoise, RecomputationKeepsTheBits) {
  for (const bool experts : {false, true}) {
    const ModelConfig config = jittered_config(0.3, experts);
    const NoisyRun kept = run_with(config, kNoise);
    const NoisyRun again = run_with(config, kNoise, {"all"});
    EXPECT_EQ(kept.loss, again.loss);
    testing::expect_same_gradients(*kept.rig, *again.rig, 0);
  }
}

ModelConfig evened_config() {
  ModelConfig config = testing::tiny_config();
  config.moe.routing = Routing::kSinkhorn;
  return config;
}

/// The loads of a run's MoE layers.
std::vector<float> list_counts(const NoisyRun& run) {
  std::vector<float> all;
  for (const ExpertState& experts : run.rig->experts) {
    const auto counts = experts.step_counts.get().span<float>();
    all.insert(all.end(), counts.begin(), counts.end());
  }
  return all;
}

TEST(RouterNoise, SinkhornChoosesInTrainingAlone) {
  constexpr int64_t kLong = 64;
  ModelConfig plain_config = testing::tiny_config();
  ModelConfig config = evened_config();
  plain_config.moe.top_k = config.moe.top_k = 1;
  const NoisyRun plain = run_with(plain_config, {}, {}, kLong);
  const NoisyRun evaluated = run_with(config, {}, {}, kLong);
  EXPECT_EQ(evaluated.loss, plain.loss);
  const NoisyRun trained = run_with(config, kNoise, {}, kLong);
  EXPECT_NE(trained.loss, plain.loss);
  const auto before = list_counts(plain);
  const auto after = list_counts(trained);
  EXPECT_EQ(std::accumulate(before.begin(), before.end(), 0.0F),
            std::accumulate(after.begin(), after.end(), 0.0F));
  const auto spread = [](const std::vector<float>& counts) {
    return std::inner_product(counts.begin(), counts.end(), counts.begin(), 0.0F);
  };
  EXPECT_LT(spread(after), spread(before)) << "sums of squares: the least where loads are even";
}

TEST(RouterNoise, SinkhornKeepsItsChoiceInRecomputation) {
  const NoisyRun kept = run_with(evened_config(), kNoise);
  const NoisyRun again = run_with(evened_config(), kNoise, {"all"});
  EXPECT_EQ(kept.loss, again.loss);
  testing::expect_same_gradients(*kept.rig, *again.rig, 0);
}

ModelConfig drawing_config() {
  ModelConfig config = testing::tiny_config();
  config.moe.sparse_mixer = 0.4;
  config.moe.draw_experts = true;
  config.moe.normalize_top_k = false;
  return config;
}

TEST(RouterNoise, ExpertsAreDrawnInTrainingAlone) {
  ModelConfig plain_config = drawing_config();
  plain_config.moe.draw_experts = false;
  const NoisyRun plain = run_with(plain_config, {});
  const NoisyRun evaluated = run_with(drawing_config(), {});
  EXPECT_EQ(evaluated.loss, plain.loss);
  EXPECT_EQ(list_counts(evaluated), list_counts(plain));
  const NoisyRun trained = run_with(drawing_config(), kNoise);
  EXPECT_NE(trained.loss, plain.loss);
  EXPECT_NE(list_counts(trained), list_counts(plain));
  EXPECT_EQ(run_with(drawing_config(), kNoise).loss, trained.loss);
  RouterNoise other_tokens = kNoise;
  other_tokens.first_token = 0;
  EXPECT_NE(run_with(drawing_config(), other_tokens).loss, trained.loss);
}

TEST(RouterNoise, DrawnExpertsAreKeptInRecomputation) {
  const NoisyRun kept = run_with(drawing_config(), kNoise);
  const NoisyRun again = run_with(drawing_config(), kNoise, {"all"});
  EXPECT_EQ(kept.loss, again.loss);
  testing::expect_same_gradients(*kept.rig, *again.rig, 0);
}

/// The loss along a random direction of each parameter against central differences, the noise being
/// the same. All experts are chosen, so that no step changes the choice.
TEST(RouterNoise, GradientsMatchFiniteDifferences) {
  ModelConfig config = jittered_config(0.3, true);
  config.moe.top_k = config.moe.num_experts;
  const NoisyRun run = run_with(config, kNoise);
  ModelRig& rig = *run.rig;
  TestBatch batch(config, kSequences, kLength, 5);
  MicroBatch view = batch.view();
  view.noise = kNoise;
  const LossScales scales{.loss = testing::test_scales(batch).loss};
  rig.parameters.zero_gradients();
  const auto loss = [&] {
    rig.model.begin_step();
    return rig.model.run(view, scales).loss;
  };
  loss();
  std::vector<std::vector<float>> grads;
  for (const ModelParameter& p : rig.parameters.all()) {
    const auto grad = p.grad.span<float>();
    grads.emplace_back(grad.begin(), grad.end());
  }
  Random random(11, 0);
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto weight = rig.parameters.all()[i].weight.span<float>();
    const std::vector<float> start(weight.begin(), weight.end());
    std::vector<float> direction(start.size());
    double expected = 0;
    for (size_t j = 0; j < direction.size(); ++j) {
      direction[j] = static_cast<float>(random.next_normal());
      expected += static_cast<double>(direction[j]) * grads[i][j];
    }
    double best_error = 1e30;
    for (const float step : {4e-3F, 1e-3F}) {
      for (size_t j = 0; j < start.size(); ++j) weight[j] = start[j] + step * direction[j];
      const double above = loss();
      for (size_t j = 0; j < start.size(); ++j) weight[j] = start[j] - step * direction[j];
      const double below = loss();
      const double measured = (above - below) / (2.0 * step);
      best_error =
          std::min(best_error, std::abs(measured - expected) / std::max(0.05, std::abs(expected)));
    }
    std::copy(start.begin(), start.end(), weight.begin());
    EXPECT_LT(best_error, 0.02) << rig.parameters.all()[i].spec.name;
  }
}

}  // namespace
}  // namespace tessera
