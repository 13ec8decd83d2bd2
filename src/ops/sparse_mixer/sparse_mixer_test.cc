#include "ops/sparse_mixer/sparse_mixer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/sparse_mixer/sparse_mixer_testing.h"

namespace tessera {
namespace {

using testing::make_sparse_mixer_inputs;
using testing::sparse_mixer_cases;
using testing::SparseMixerCase;

KernelTable kernels() {
  KernelTable table;
  add_sparse_mixer_cpu(table);
  return table;
}

/// The probabilities of all experts at choice k, 0 for those that do not count, as transformers'
/// sparsemixer writes it: scores that were chosen before are minus infinity.
std::vector<double> shares_at(std::span<const double> logits, std::span<const int32_t> experts,
                              size_t k, double jitter) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> scores(logits.begin(), logits.end());
  for (size_t j = 0; j < k; ++j) scores[experts[j]] = kNone;
  const double largest = *std::ranges::max_element(scores);
  double sum = 0;
  for (size_t e = 0; e < scores.size(); ++e) {
    const double factor = std::max(std::abs(logits[e]), largest);
    if ((largest - logits[e]) / factor > 2 * jitter) scores[e] = kNone;
    sum += std::exp(scores[e] - largest);
  }
  for (double& score : scores) score = std::exp(score - largest) / sum;
  return scores;
}

/// The part of a token in a tensor of rows.
template <typename Values>
auto row_of(const Values& values, int64_t token, int64_t width) {
  return std::span(values).subspan(token * width, width);
}

TEST(SparseMixer, ProbabilitiesAreOfSoftmaxesOfThoseNearTheBest) {
  for (const SparseMixerCase& c : sparse_mixer_cases()) {
    const auto inputs = make_sparse_mixer_inputs(c, 3);
    const auto out = testing::run_operator(SparseMixer({c.jitter}), kernels(), inputs);
    const auto logits = testing::to_doubles(inputs[0].tensor);
    const auto experts = inputs[1].tensor.get().span<int32_t>();
    const auto probs = testing::to_doubles(out[0]);
    int alone = 0;
    int among_others = 0;
    for (int64_t token = 0; token < c.tokens; ++token) {
      const auto own = row_of(experts, token, c.top_k);
      for (int64_t k = 0; k < c.top_k; ++k) {
        const double found = probs[token * c.top_k + k];
        if (own[0] < 0) {
          ASSERT_EQ(found, 0);
          continue;
        }
        const double expected =
            shares_at(row_of(logits, token, c.num_experts), own, k, c.jitter)[own[k]];
        ASSERT_NEAR(found, expected, 1e-6) << token << " " << k;
        (expected < 1 ? among_others : alone) += 1;
      }
    }
    if (c.tokens >= 100) {
      EXPECT_GT(among_others, 10) << c.jitter;
      EXPECT_GT(alone + (c.jitter > 0.05 ? 11 : 0), 10) << c.jitter;
    }
  }
}

TEST(SparseMixer, GradientsMatchFiniteDifferences) {
  // No logit is so near the border that a step would move it over.
  auto inputs = testing::list_inputs(
      testing::TestInput{testing::tensor_of({2, 5}, {1.0F, 0.9F, 0.85F, 0.3F, -2.0F, -1.0F, -1.1F,
                                                     -9.0F, -1.15F, -1.05F}),
                         testing::Role::kValue, "logits"},
      testing::TestInput{testing::tensor_of_i32({2, 3}, {0, 1, 2, 0, 4, 1}),
                         testing::Role::kConstant, "expert_idx"});
  const auto out = testing::run_operator(SparseMixer({0.1}), kernels(), inputs);
  for (const double prob : testing::to_doubles(out[0])) EXPECT_GT(prob, 0.2);
  testing::check_gradients(make_sparse_mixer({0.1}), kernels(), inputs, {.step = 2e-3});
}

TEST(SparseMixer, ChosenExpertsThatAreFarHaveNeitherProbabilityNorGradient) {
  const auto inputs =
      testing::list_inputs(testing::TestInput{testing::tensor_of({1, 3}, {4.0F, 1.0F, 3.9F}),
                                              testing::Role::kValue, "logits"},
                           testing::TestInput{testing::tensor_of_i32({1, 2}, {1, 0}),
                                              testing::Role::kConstant, "expert_idx"});
  const auto out = testing::run_operator(SparseMixer({0.1}), kernels(), inputs);
  EXPECT_EQ(out[0].get().as<float>()[0], 0);
  EXPECT_NEAR(out[0].get().as<float>()[1], 1 / (1 + std::exp(-0.1)), 1e-6);
  std::vector<OwnedTensor> given(1);
  given[0] = testing::tensor_of({1, 2}, {5.0F, 0.0F});
  const auto grads = testing::run_gradients(make_sparse_mixer({0.1}), kernels(), inputs, given);
  EXPECT_THAT(testing::to_doubles(grads[0]), ::testing::Each(0.0));
}

std::vector<OwnedTensor> draw(const SparseMixerCase& c, bool training, int32_t key = 5) {
  auto inputs = make_sparse_mixer_inputs(c, 3);
  testing::add_sparse_mixer_noise(inputs, training, key);
  return testing::run_operator(SparseMixer({c.jitter, true}), kernels(), inputs);
}

TEST(SparseMixer, DrawsNothingOutsideTraining) {
  for (const SparseMixerCase& c : sparse_mixer_cases()) {
    const auto inputs = make_sparse_mixer_inputs(c, 3);
    const auto plain = testing::run_operator(SparseMixer({c.jitter}), kernels(), inputs);
    const auto out = draw(c, false);
    testing::expect_bitwise_equal(out[0], plain[0], "probabilities");
    testing::expect_bitwise_equal(out[1], inputs[1].tensor, "experts");
  }
}

TEST(SparseMixer, DrawsFromThoseNearTheBest) {
  for (const SparseMixerCase& c : sparse_mixer_cases()) {
    const auto inputs = make_sparse_mixer_inputs(c, 3);
    const auto logits = testing::to_doubles(inputs[0].tensor);
    const auto given = inputs[1].tensor.get().span<int32_t>();
    const auto out = draw(c, true);
    const auto probs = testing::to_doubles(out[0]);
    const auto drawn = out[1].get().span<int32_t>();
    std::vector<double> counts(c.num_experts);
    for (int64_t token = 0; token < c.tokens; ++token) {
      const auto own = row_of(drawn, token, c.top_k);
      if (given[token * c.top_k] < 0) {
        ASSERT_THAT(own, ::testing::Each(-1));
        continue;
      }
      for (int64_t k = 0; k < c.top_k; ++k) {
        const auto shares = shares_at(row_of(logits, token, c.num_experts), own, k, c.jitter);
        const double share = shares[own[k]];
        ASSERT_GT(share, 0) << "one that counts, and that was not chosen before";
        const double found = probs[token * c.top_k + k];
        const bool is_best = share == *std::ranges::max_element(shares);
        ASSERT_TRUE(std::abs(found - share) < 1e-6 ||
                    (!is_best && std::abs(found - 0.3333 * share) < 1e-6))
            << found << " of " << share;
        counts[own[k]] += 1;
      }
    }
    EXPECT_EQ(testing::to_doubles(out[2]), counts);
  }
}

/// Of many tokens with the same logits each expert has its share, and a quarter of those that are
/// not the best counts in full.
TEST(SparseMixer, DrawsWithTheProbabilities) {
  constexpr int64_t kTokens = 20000;
  const std::vector<float> own = {1.0F, 0.9F, 0.2F, 0.8F};
  std::vector<float> logits;
  std::vector<int32_t> experts;
  std::vector<int64_t> numbers;
  for (int64_t token = 0; token < kTokens; ++token) {
    logits.insert(logits.end(), own.begin(), own.end());
    experts.insert(experts.end(), {0, 1});
    numbers.push_back(token);
  }
  const auto inputs = testing::list_inputs(
      testing::TestInput{testing::tensor_of({kTokens, 4}, logits), testing::Role::kConstant, "l"},
      testing::TestInput{testing::tensor_of_i32({kTokens, 2}, experts), testing::Role::kConstant,
                         "i"},
      testing::TestInput{testing::tensor_of_i64({kTokens}, numbers), testing::Role::kConstant, "n"},
      testing::TestInput{testing::tensor_of_i32({kNumNoiseWords}, {9, 8, 0, 1}),
                         testing::Role::kConstant, "noise"});
  const auto out = testing::run_operator(SparseMixer({0.15, true}), kernels(), inputs);
  const auto drawn = out[1].get().span<int32_t>();
  const auto probs = out[0].get().span<float>();
  const std::vector<double> doubles(own.begin(), own.end());
  const auto shares = shares_at(doubles, std::vector<int32_t>{}, 0, 0.15);
  std::vector<double> found(4);
  double full = 0;
  double others = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    const int32_t expert = drawn[2 * token];
    found[expert] += 1.0 / kTokens;
    if (expert == 0) continue;
    others += 1;
    full += probs[2 * token] > 0.5 * shares[expert] ? 1 : 0;
  }
  EXPECT_EQ(found[2], 0);
  for (int e = 0; e < 4; ++e) EXPECT_NEAR(found[e], shares[e], 0.015) << e;
  EXPECT_NEAR(full / others, 0.25, 0.02);
}

TEST(SparseMixer, DrawsAreAFunctionOfKeyAndToken) {
  const SparseMixerCase c{.tokens = 200, .num_experts = 16, .top_k = 2, .jitter = 0.3};
  const auto first = draw(c, true, 5);
  testing::expect_bitwise_equal(draw(c, true, 5)[1], first[1], "the same key");
  const auto other = draw(c, true, 6);
  const auto a = first[1].get().span<int32_t>();
  const auto b = other[1].get().span<int32_t>();
  EXPECT_FALSE(std::equal(a.begin(), a.end(), b.begin()));
}

/// The gradient of a drawn choice has no factor of 0.3333.
TEST(SparseMixer, TheGradientOfDrawnExpertsIsOfTheirSoftmaxes) {
  const SparseMixerCase c{.tokens = 60, .num_experts = 8, .top_k = 2, .jitter = 0.3};
  auto inputs = make_sparse_mixer_inputs(c, 3);
  testing::add_sparse_mixer_noise(inputs, true);
  const auto out = testing::run_operator(SparseMixer({c.jitter, true}), kernels(), inputs);
  Random random(4, 4);
  std::vector<OwnedTensor> given(3);
  given[0] = testing::random_tensor(DType::kF32, {c.tokens, c.top_k}, random);
  const auto found =
      testing::run_gradients(make_sparse_mixer({c.jitter, true}), kernels(), inputs, given);
  std::vector<testing::TestInput> of_drawn = make_sparse_mixer_inputs(c, 3);
  std::ranges::copy(out[1].get().span<int32_t>(), of_drawn[1].tensor.get().as<int32_t>());
  std::vector<OwnedTensor> same(1);
  same[0] = std::move(given[0]);
  const auto expected =
      testing::run_gradients(make_sparse_mixer({c.jitter}), kernels(), of_drawn, same);
  testing::expect_bitwise_equal(found[0], expected[0], "gradient of logits");
}

TEST(SparseMixer, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_sparse_mixer({.jitter = 0}), UserError);
  const ValueType logits{DType::kF32, {3, 4}};
  const ValueType idx{DType::kI32, {3, 2}};
  const ValueType numbers{DType::kI64, {3}};
  const ValueType noise{DType::kI32, {kNumNoiseWords}};
  const SparseMixer plain({});
  const SparseMixer samples({.samples = true});
  const auto infer = [](const SparseMixer& op, const std::vector<ValueType>& types) {
    return op.infer(types);
  };
  EXPECT_EQ(infer(plain, {logits, idx}), (std::vector<ValueType>{{DType::kF32, {3, 2}}}));
  EXPECT_EQ(infer(samples, {logits, idx, numbers, noise}).at(2), (ValueType{DType::kF32, {4}}));
  EXPECT_THROW(infer(plain, {logits, idx, numbers, noise}), UserError);
  EXPECT_THROW(infer(plain, {logits, {DType::kI32, {3, 5}}}), UserError);
  EXPECT_THROW(infer(plain, {{DType::kBF16, {3, 4}}, idx}), UserError);
  EXPECT_THROW(infer(samples, {logits, idx, {DType::kI64, {2}}, noise}), UserError);
  EXPECT_THROW(infer(samples, {logits, idx, numbers, {DType::kI32, {2}}}), UserError);
}

}  // namespace
}  // namespace tessera
