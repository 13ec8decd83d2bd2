#include "model/run/training_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "model/run/gradient_cases.h"

namespace tessera {
namespace {

using testing::Case;
using testing::expect_same_gradients;
using testing::gradient_cases;
using testing::kLength;
using testing::kSequences;
using testing::ModelRig;
using testing::run_once;
using testing::test_scales;
using testing::TestBatch;
using testing::tiny_config;
using testing::tiny_shape;

class ModelGradients : public ::testing::TestWithParam<Case> {};

/// A derivative along a direction of a parameter's weights, and how far differences are from it.
struct Derivative {
  double expected = 0;
  double best_error = 1e30;
};

/// Of several steps, of which the larger ones may change a routing decision and make the loss jump.
template <typename Loss>
Derivative measure_derivative(std::span<float> weight, std::span<const float> grad, Random& random,
                              const Loss& loss) {
  const std::vector<float> start(weight.begin(), weight.end());
  std::vector<float> direction(start.size());
  Derivative result;
  for (size_t j = 0; j < direction.size(); ++j) {
    direction[j] = static_cast<float>(random.next_normal());
    result.expected += static_cast<double>(direction[j]) * grad[j];
  }
  for (const float step : {4e-3F, 2e-3F, 1e-3F, 5e-4F, 1.2e-4F}) {
    for (size_t j = 0; j < start.size(); ++j) weight[j] = start[j] + step * direction[j];
    const double above = loss();
    for (size_t j = 0; j < start.size(); ++j) weight[j] = start[j] - step * direction[j];
    const double below = loss();
    const double error = std::abs((above - below) / (2.0 * step) - result.expected);
    result.best_error =
        std::min(result.best_error, error / std::max(0.05, std::abs(result.expected)));
  }
  std::copy(start.begin(), start.end(), weight.begin());
  return result;
}

/// The whole model's loss along a random direction of all weights of one parameter, against central
/// differences; along another where scores are so near to each other that each step but those that
/// rounding blurs changes a routing decision.
TEST_P(ModelGradients, EveryParameterMatchesFiniteDifferences) {
  constexpr double kTolerance = 0.02;
  ModelRig rig(GetParam().config, tiny_shape(kSequences, kLength));
  TestBatch batch(rig.config, kSequences, kLength, 5);
  const LossScales scales = test_scales(batch);
  rig.parameters.zero_gradients();
  rig.model.begin_step();
  rig.run(batch, scales);
  const auto loss = [&] {
    rig.model.begin_step();
    return rig.run(batch, scales);
  };
  Random random(11, 0);
  // Gradients of later runs add up, so the wanted ones are copied.
  std::vector<std::vector<float>> grads;
  for (const ModelParameter& p : rig.parameters.all()) {
    const auto grad = p.grad.span<float>();
    grads.emplace_back(grad.begin(), grad.end());
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    const ModelParameter& p = rig.parameters.all()[i];
    if (p.is_frozen()) continue;
    Derivative found = measure_derivative(p.weight.span<float>(), grads[i], random, loss);
    if (found.best_error >= kTolerance)
      found = measure_derivative(p.weight.span<float>(), grads[i], random, loss);
    EXPECT_LT(found.best_error, kTolerance)
        << p.spec.name << ": directional derivative " << found.expected;
  }
}

/// Sums of two micro-batches that begin with the first one's gradients, in memory full of NaN,
/// are those that begin with zeros.
TEST_P(ModelGradients, AreSetByTheFirstToAdd) {
  const auto sums = [&](bool set) {
    ModelRig rig(GetParam().config, tiny_shape(kSequences, kLength));
    for (const ModelParameter& p : rig.parameters.all()) {
      const auto grad = p.grad.span<float>();
      std::fill(grad.begin(), grad.end(), std::numeric_limits<float>::quiet_NaN());
    }
    set ? rig.parameters.reset_gradients() : rig.parameters.zero_gradients();
    rig.model.begin_step();
    for (const uint64_t seed : {5, 6}) {
      TestBatch batch(rig.config, kSequences, kLength, seed);
      rig.run(batch, test_scales(batch));
    }
    rig.parameters.settle_gradients();
    std::vector<std::vector<float>> grads;
    for (const ModelParameter& p : rig.parameters.all()) {
      const auto grad = p.grad.span<float>();
      grads.emplace_back(grad.begin(), grad.end());
    }
    return grads;
  };
  EXPECT_EQ(sums(true), sums(false));
}

INSTANTIATE_TEST_SUITE_P(All, ModelGradients, ::testing::ValuesIn(gradient_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(Experts, BlockSparseAgreesWithGrouped) {
  for (const bool unequal : {false, true}) {
    for (const int64_t latent_size : {0, 5}) {
      ModelConfig grouped = tiny_config();
      if (unequal) grouped.moe.inner_sizes = {8, 16, 8, 24};
      grouped.moe.latent_size = latent_size;
      ModelConfig sparse = grouped;
      sparse.moe.experts = ExpertPath::kBlockSparse;
      sparse.moe.block_size = 8;
      expect_same_gradients(*run_once(grouped), *run_once(sparse), 2e-4);
    }
  }
}

TEST(Experts, EarlyProbabilityAgreesWithLateAndKeepsLess) {
  ModelConfig late = tiny_config();
  late.moe.memory_efficient = false;
  const auto a = run_once(tiny_config());
  const auto b = run_once(late);
  expect_same_gradients(*a, *b, 2e-4);
  EXPECT_LT(a->model.activation_bytes().saved, b->model.activation_bytes().saved);
}

TEST(Gradients, OfMicroBatchesAddUpToThoseOfTheWholeBatch) {
  const ModelConfig config = tiny_config();
  TestBatch whole(config, 2, kLength, 5);
  const LossScales scales{.loss = 1.0F / static_cast<float>(whole.num_valid)};
  ModelRig once(config, tiny_shape(2, kLength));
  once.run(whole, scales);

  ModelRig parts(config, tiny_shape(1, kLength));
  double loss = 0;
  for (int64_t half = 0; half < 2; ++half) {
    TestBatch part(config, 1, kLength, 5);
    std::copy_n(whole.tokens.begin() + half * kLength, kLength, part.tokens.begin());
    std::copy_n(whole.labels.begin() + half * kLength, kLength, part.labels.begin());
    loss += parts.run(part, scales);
  }
  TestBatch again = whole;
  EXPECT_NEAR(loss, once.run(again, scales), 1e-5);
  once.parameters.zero_gradients();
  once.run(again, scales);
  expect_same_gradients(once, parts, 2e-4);
}

TEST(Experts, WithoutTokensHaveZeroGradients) {
  ModelConfig config = tiny_config();
  config.moe.num_experts = 64;
  config.moe.top_k = 1;
  const auto rig = run_once(config);
  const auto counts = rig->model.last_counts();
  const ModelParameter& up = rig->parameters.find("layers.0.moe.experts.gate_up.weight");
  const auto grad = up.grad.span<float>();
  const size_t per_expert = grad.size() / 64;
  size_t empty = 0;
  for (size_t e = 0; e < 64; ++e) {
    if (counts[0][e] > 0) continue;
    ++empty;
    for (size_t i = 0; i < per_expert; ++i)
      ASSERT_EQ(grad[e * per_expert + i], 0.0F) << "expert " << e;
  }
  EXPECT_GT(empty, 32U);
}

/// BF16 rounds the weights too, so gradients agree with F32 as far as its 8 bits go.
TEST(Bf16, GradientsPointWhereF32sDo) {
  ModelConfig config = tiny_config();
  config.moe.top_k = config.moe.num_experts;  // no routing decision can flip
  const auto exact = run_once(config);
  const auto rounded = run_once(config, {}, DType::kBF16);
  for (size_t i = 0; i < exact->parameters.all().size(); ++i) {
    const auto a = exact->parameters.all()[i].grad.span<float>();
    const auto b = rounded->parameters.all()[i].grad.span<float>();
    double difference = 0;
    double norm = 0;
    for (size_t j = 0; j < a.size(); ++j) {
      difference += (a[j] - b[j]) * (a[j] - b[j]);
      norm += a[j] * a[j];
    }
    EXPECT_LT(std::sqrt(difference / std::max(norm, 1e-12)), 0.08)
        << exact->parameters.all()[i].spec.name;
  }
}

TEST(Evaluate, EqualsTheTrainingLossAndChangesNothing) {
  ModelRig rig(tiny_config(), tiny_shape(kSequences, kLength));
  TestBatch batch(rig.config, kSequences, kLength, 5);
  const double trained = rig.run(batch, {.loss = 1});
  const auto before = rig.model.last_counts();
  rig.parameters.zero_gradients();
  EXPECT_NEAR(rig.model.evaluate(batch.view()), trained, 1e-5 * std::abs(trained));
  for (const ModelParameter& p : rig.parameters.all()) {
    for (const float g : p.grad.span<float>()) ASSERT_EQ(g, 0.0F);
  }
  EXPECT_EQ(rig.model.last_counts(), before);
}

/// A head of one token, x · weightᵀ after RMSNorm with weight 1, and −log p of the label.
double plain_loss(std::vector<double> x, const Tensor& weight, int64_t label) {
  const auto rows = weight.span<float>();
  std::vector<double> logits(weight.shape[0], 0.0);
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double rstd = 1 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
  double sum = 0;
  for (size_t row = 0; row < logits.size(); ++row) {
    for (size_t i = 0; i < x.size(); ++i) logits[row] += x[i] * rstd * rows[row * x.size() + i];
    sum += std::exp(logits[row]);
  }
  return std::log(sum) - logits[label];
}

void fill(const ModelRig& rig, const std::string& name, float diagonal) {
  const Tensor weight = rig.parameters.find(name).weight;
  std::ranges::fill(weight.span<float>(), 0.0F);
  for (int64_t i = 0; i < weight.shape[0] && diagonal != 0; ++i)
    weight.as<float>()[i * weight.shape[1] + i] = diagonal;
}

/// A layer that hands the embedding of the later token to the head, so that what it sees and what
/// it is asked for can be told from the loss.
TEST(Prediction, SeesTheLaterTokenAndLearnsTheOneAfterIt) {
  ModelConfig config = tiny_config();
  config.mtp_layers = 2;
  ModelRig rig(config, tiny_shape(3, 4));
  for (int64_t layer = 0; layer < 2; ++layer) {
    const std::string prefix = fmt::format("mtp.{}.", layer);
    fill(rig, prefix + "hidden_proj.weight", 0);
    fill(rig, prefix + "embed_proj.weight", 1);
    fill(rig, prefix + "attn.o.weight", 0);
    fill(rig, prefix + "moe.experts.down.weight", 0);
  }
  TestBatch batch(config, 3, 4, 5);
  batch.cu_seqlens = {0, 5, 6, 12};
  const auto embedding = rig.parameters.find("embedding.weight").weight.span<float>();
  double expected = 0;
  int64_t count = 0;
  for (const int64_t shift : {1, 2}) {
    for (int64_t i = 0; i < 12; ++i) {
      const int64_t end = i < 5 ? 5 : i < 6 ? 6 : 12;
      if (i + shift >= end || batch.labels[i + shift] < 0) continue;
      const auto first = embedding.begin() + batch.tokens[i + shift] * 16;
      std::vector<double> x(first, first + 16);
      expected += plain_loss(x, rig.parameters.find("head.weight").weight, batch.labels[i + shift]);
      ++count;
    }
  }
  const MicroBatchResult result = rig.model.run(batch.view(), {.mtp = 0.5F});
  EXPECT_NEAR(result.mtp_loss, 0.5 * expected, 1e-3 * expected);
  EXPECT_EQ(count_mtp_labels(batch.view(), 2), count);
}

/// Without a loss of its own it changes nothing of the model.
TEST(Prediction, LeavesTheModelsOwnPathAlone) {
  ModelConfig with = tiny_config();
  with.moe.num_experts = 0;
  with.mtp_layers = 1;
  ModelConfig without = with;
  without.mtp_layers = 0;
  ModelRig a(with, tiny_shape(kSequences, kLength));
  ModelRig b(without, tiny_shape(kSequences, kLength));
  TestBatch batch(with, kSequences, kLength, 5);
  EXPECT_EQ(a.run(batch, {.loss = 1}), b.run(batch, {.loss = 1}));
  for (const ModelParameter& p : b.parameters.all())
    testing::expect_bitwise_equal(a.parameters.find(p.spec.name).grad, p.grad, p.spec.name);
  EXPECT_EQ(a.model.evaluate(batch.view()), b.model.evaluate(batch.view()));
}

}  // namespace
}  // namespace tessera
