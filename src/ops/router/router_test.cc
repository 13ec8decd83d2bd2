#include "ops/router/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "ops/router/router_testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace router = testing::router;
using router::Case;
using router::kernels;
using router::make_case;
using router::make_inputs;
using router::published_specs;
using testing::Role;
using testing::TestInput;

std::vector<OwnedTensor> run(const Case& c, const std::vector<TestInput>& inputs) {
  return testing::run_operator(*make_router(c.spec), kernels(), inputs);
}

using Row = std::vector<double>;

/// What the router should give, written down plainly in double.
struct Reference {
  std::vector<Row> probs;
  std::vector<std::vector<int32_t>> experts;
  std::vector<double> counts;
  double balance_loss = 0;
  double z_loss = 0;
  std::vector<double> score_means;
};

Row softmax(const Row& logits) {
  const double largest = *std::ranges::max_element(logits);
  Row result;
  for (const double l : logits) result.push_back(std::exp(l - largest));
  const double sum = std::accumulate(result.begin(), result.end(), 0.0);
  for (double& r : result) r /= sum;
  return result;
}

Row scores_of(const RouterSpec& spec, const Row& logits) {
  if (spec.score == ScoreFunction::kSoftmax) return softmax(logits);
  Row result;
  for (const double l : logits) {
    result.push_back(spec.score == ScoreFunction::kSigmoid ? 1 / (1 + std::exp(-l))
                                                           : std::sqrt(std::log1p(std::exp(l))));
  }
  return result;
}

std::vector<int32_t> best(const Row& keys, int64_t count) {
  std::vector<int32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return keys[a] > keys[b]; });
  order.resize(count);
  return order;
}

/// Experts of groups that are not chosen fall to minus infinity.
Row limit_to_groups(const RouterSpec& spec, Row keys) {
  const size_t size = spec.num_experts / spec.num_groups;
  Row group_keys;
  for (size_t first = 0; first < keys.size(); first += size) {
    Row members(keys.begin() + static_cast<std::ptrdiff_t>(first),
                keys.begin() + static_cast<std::ptrdiff_t>(first + size));
    std::ranges::sort(members, std::greater<>());
    const bool two = spec.group_score == GroupScore::kTopTwoSum && size > 1;
    group_keys.push_back(members[0] + (two ? members[1] : 0.0));
  }
  const auto chosen = best(group_keys, spec.top_groups);
  for (size_t e = 0; e < keys.size(); ++e) {
    if (std::ranges::find(chosen, static_cast<int32_t>(e / size)) == chosen.end()) {
      keys[e] = -std::numeric_limits<double>::infinity();
    }
  }
  return keys;
}

Row probs_of(const RouterSpec& spec, const Row& logits, const std::vector<int32_t>& experts) {
  const Row scores = scores_of(spec, logits);
  Row result;
  for (const int32_t e : experts) result.push_back(scores[e]);
  if (spec.normalize_top_k || spec.order == ScoreOrder::kAfterTopK) {
    const double sum = std::accumulate(result.begin(), result.end(), 0.0);
    for (double& p : result) p /= sum;
  }
  for (double& p : result) p *= spec.scaling_factor;
  return result;
}

std::vector<Row> logits_of(const std::vector<TestInput>& inputs) {
  const auto x = testing::to_doubles(inputs[0].tensor);
  const auto w = testing::to_doubles(inputs[1].tensor);
  Row bias(w.size() / router::kHidden);
  for (const TestInput& input : inputs) {
    if (input.name == "bias" && input.role == Role::kWeight)
      bias = testing::to_doubles(input.tensor);
  }
  std::vector<Row> result(x.size() / router::kHidden, bias);
  for (size_t t = 0; t < result.size(); ++t) {
    for (size_t e = 0; e < result[t].size(); ++e) {
      for (size_t h = 0; h < router::kHidden; ++h) {
        result[t][e] += x[t * router::kHidden + h] * w[e * router::kHidden + h];
      }
    }
  }
  return result;
}

/// The sums of every `group_size` neighbours.
Row sum_groups(const Row& values, int64_t group_size) {
  Row sums(values.size() / static_cast<size_t>(group_size), 0.0);
  for (size_t i = 0; i < values.size(); ++i) sums[i / static_cast<size_t>(group_size)] += values[i];
  return sums;
}

/// E · Σ f·P over tokens [first, last), or D · Σ f·P over groups of experts.
double plain_balance(const Case& c, const Reference& r, const std::vector<Row>& logits,
                     size_t first, size_t last) {
  const size_t num_experts = c.spec.num_experts;
  Row f(num_experts, 0.0);
  Row p(num_experts, 0.0);
  for (size_t t = first; t < last; ++t) {
    for (const int32_t e : r.experts[t]) f[e] += 1;
    const Row scores = scores_of(c.spec, logits[t]);
    const double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
    for (size_t e = 0; e < num_experts; ++e) p[e] += scores[e] / sum;
  }
  const double total = std::accumulate(f.begin(), f.end(), 0.0);
  f = sum_groups(f, c.spec.balance_group_size);
  p = sum_groups(p, c.spec.balance_group_size);
  double loss = 0;
  for (size_t d = 0; d < f.size(); ++d) loss += f[d] / total * p[d];
  return loss * static_cast<double>(f.size()) / static_cast<double>(last - first);
}

void add_losses(const Case& c, const std::vector<Row>& logits, Reference& r) {
  r.score_means.assign(c.spec.num_experts, 0.0);
  if (logits.empty()) return;
  for (const Row& row : logits) {
    const Row scores = scores_of(c.spec, row);
    const double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
    for (size_t e = 0; e < scores.size(); ++e)
      r.score_means[e] += scores[e] / sum / static_cast<double>(logits.size());
  }
  for (const Row& row : logits) {
    const double largest = *std::ranges::max_element(row);
    double sum = 0;
    for (const double l : row) sum += std::exp(l - largest);
    const double lse = largest + std::log(sum);
    r.z_loss += lse * lse / static_cast<double>(logits.size());
  }
  std::vector<int32_t> bounds{0, static_cast<int32_t>(logits.size())};
  if (c.spec.balance_scope == BalanceScope::kSequence) bounds = c.cu_seqlens;
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    if (bounds[s] == bounds[s + 1]) continue;
    const double weight = (bounds[s + 1] - bounds[s]) / static_cast<double>(logits.size());
    r.balance_loss += weight * plain_balance(c, r, logits, static_cast<size_t>(bounds[s]),
                                             static_cast<size_t>(bounds[s + 1]));
  }
}

Reference plain_router(const Case& c, const std::vector<TestInput>& inputs) {
  Reference r;
  r.counts.assign(c.spec.num_experts, 0.0);
  const auto logits = logits_of(inputs);
  for (const Row& row : logits) {
    Row keys = c.spec.order == ScoreOrder::kAfterTopK ? row : scores_of(c.spec, row);
    for (size_t e = 0; e < c.bias.size(); ++e) keys[e] += static_cast<double>(c.bias[e]);
    r.experts.push_back(best(limit_to_groups(c.spec, keys), c.spec.top_k));
    r.probs.push_back(probs_of(c.spec, row, r.experts.back()));
    for (const int32_t e : r.experts.back()) r.counts[e] += 1;
  }
  add_losses(c, logits, r);
  return r;
}

void expect_matches_reference(const Case& c, uint64_t seed) {
  Random random(seed, 3);
  const auto inputs = make_inputs(c, random);
  const auto outputs = run(c, inputs);
  const Reference expected = plain_router(c, inputs);
  const auto probs = testing::to_doubles(outputs[RouterOutput::kProbs]);
  const auto experts = outputs[RouterOutput::kExpertIdx].get().span<int32_t>();
  size_t at = 0;
  for (size_t t = 0; t < expected.probs.size(); ++t) {
    for (size_t k = 0; k < expected.probs[t].size(); ++k, ++at) {
      EXPECT_EQ(experts[at], expected.experts[t][k]) << "token " << t << ", k " << k;
      EXPECT_NEAR(probs[at], expected.probs[t][k], 2e-6 * c.spec.scaling_factor) << "token " << t;
    }
  }
  EXPECT_EQ(at, experts.size());
  EXPECT_EQ(testing::to_doubles(outputs[RouterOutput::kCounts]), expected.counts);
  const auto means = testing::to_doubles(outputs[RouterOutput::kScoreMeans]);
  for (size_t e = 0; e < means.size(); ++e) EXPECT_NEAR(means[e], expected.score_means[e], 1e-5);
  EXPECT_NEAR(testing::to_doubles(outputs[RouterOutput::kBalanceLoss])[0], expected.balance_loss,
              2e-6);
  EXPECT_NEAR(testing::to_doubles(outputs[RouterOutput::kZLoss])[0], expected.z_loss,
              2e-6 * std::max(1.0, expected.z_loss));
}

TEST(Router, AgreesWithThePlainRule) {
  Random random(11, 0);
  uint64_t seed = 0;
  for (const RouterSpec& spec : published_specs()) {
    for (const BalanceScope scope : router::kScopes) {
      for (const int64_t num_tokens : {0, 1, 7, 65, 130}) {
        const Case c = make_case(spec, scope, num_tokens, random);
        SCOPED_TRACE(fmt::format("T={} {}", num_tokens, make_router(c.spec)->attributes()));
        expect_matches_reference(c, ++seed);
      }
    }
  }
}

TEST(Router, Bf16InputsAreWidenedNotRounded) {
  Random random(12, 0);
  Case c = make_case(published_specs()[4], BalanceScope::kMicroBatch, 600, random);
  c.dtype = DType::kBF16;
  expect_matches_reference(c, 1);
}

/// Logits of `scale` times the given values: x is the values, the weight is diagonal. (One NaN
/// makes all of its token's logits NaN.)
std::vector<OwnedTensor> run_on_logits(const RouterSpec& spec, const std::vector<float>& logits,
                                       float scale = 1) {
  const int64_t num_experts = spec.num_experts;
  std::vector<float> diagonal(num_experts * num_experts, 0.0F);
  for (int64_t e = 0; e < num_experts; ++e) diagonal[e * num_experts + e] = scale;
  return testing::run_operator(
      *make_router(spec), kernels(),
      testing::list_inputs(
          TestInput{testing::tensor_of({std::ssize(logits) / num_experts, num_experts}, logits),
                    Role::kConstant, "x"},
          TestInput{testing::tensor_of({num_experts, num_experts}, diagonal), Role::kConstant,
                    "weight"}));
}

std::vector<int32_t> experts_of(const std::vector<OwnedTensor>& outputs) {
  const auto span = outputs[RouterOutput::kExpertIdx].get().span<int32_t>();
  return {span.begin(), span.end()};
}

TEST(Router, TheLowerIndexWinsATie) {
  const auto outputs =
      run_on_logits({.num_experts = 5, .top_k = 3}, {1, 2, 2, 1, 2, 0, 0, 0, 0, 0});
  EXPECT_THAT(experts_of(outputs), ElementsAre(1, 2, 4, 0, 1, 2));
  const RouterSpec grouped{.num_experts = 6, .top_k = 2, .num_groups = 3, .top_groups = 1};
  EXPECT_THAT(experts_of(run_on_logits(grouped, {0, 0, 1, 2, 2, 1})), ElementsAre(3, 2));
}

TEST(Router, BadLogitsGiveValidDistinctExpertsAndShowInTheLosses) {
  constexpr float kHuge = 1e30F;  // whose square is infinite
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> rows{{nan, 0, 0, 0, 0, 0},
                                             {kHuge, -kHuge, kHuge, 0, 0, 1},
                                             {-kHuge, -kHuge, -kHuge, -kHuge, -kHuge, -kHuge},
                                             {kHuge, kHuge, kHuge, kHuge, kHuge, kHuge}};
  for (RouterSpec spec : published_specs()) {
    spec.num_experts = 6;
    spec.top_k = std::min<int64_t>(spec.top_k, 3);
    spec.expert_bias = spec.logit_bias = false;
    spec.num_groups = spec.num_groups > 1 ? 3 : 1;
    spec.balance_group_size = 1;
    for (const auto& row : rows) {
      const auto outputs = run_on_logits(spec, row, kHuge);
      const auto experts = experts_of(outputs);
      const std::set<int32_t> distinct(experts.begin(), experts.end());
      EXPECT_EQ(distinct.size(), experts.size());
      EXPECT_GE(*distinct.begin(), 0);
      EXPECT_LT(*distinct.rbegin(), 6);
      EXPECT_FALSE(std::isfinite(testing::to_doubles(outputs[RouterOutput::kZLoss])[0]));
    }
  }
}

TEST(Router, BiasChangesTheChoiceButNoProbability) {
  Case c{.spec = {.num_experts = 4, .top_k = 2, .score = ScoreFunction::kSigmoid}, .num_tokens = 9};
  Random random(5, 0);
  auto inputs = make_inputs(c, random);
  c.spec.expert_bias = true;
  inputs.push_back({testing::tensor_of({4}, {0, 0, 0, 10}), Role::kConstant, "bias"});
  const auto outputs = run(c, inputs);
  const auto logits = outputs[RouterOutput::kLogits].get().span<float>();
  const auto probs = outputs[RouterOutput::kProbs].get().span<float>();
  const auto experts = experts_of(outputs);
  for (size_t t = 0; t < 9; ++t) {
    EXPECT_EQ(experts[2 * t], 3) << "a bias of 10 puts expert 3 first";
    EXPECT_NEAR(probs[2 * t], 1 / (1 + std::exp(-logits[4 * t + 3])), 1e-6);
  }
}

TEST(Router, ForcedBalanceGoesRoundAndHasABalanceLossOfOne) {
  Case c{.spec = {.num_experts = 8, .top_k = 3, .force_balanced = true}, .num_tokens = 16};
  Random random(6, 0);
  const auto outputs = run(c, make_inputs(c, random));
  const auto experts = experts_of(outputs);
  for (size_t i = 0; i < experts.size(); ++i) EXPECT_EQ(experts[i], static_cast<int32_t>(i % 8));
  EXPECT_NEAR(testing::to_doubles(outputs[RouterOutput::kBalanceLoss])[0], 1.0, 1e-6);
}

void expect_refused(const RouterSpec& spec, const std::string& message) {
  try {
    make_router(spec);
    ADD_FAILURE() << "accepted; expected: " << message;
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

TEST(Router, RefusesImpossibleSpecs) {
  expect_refused({.num_experts = 4, .top_k = 5}, "top_k is 5, expected from 1 to the 4 experts");
  expect_refused({.num_experts = 0}, "num_experts is 0");
  expect_refused(
      {.num_experts = 4, .score = ScoreFunction::kSigmoid, .order = ScoreOrder::kAfterTopK},
      "take them before top-k");
  expect_refused({.num_experts = 6, .num_groups = 4}, "6 experts do not fall into 4 equal groups");
  expect_refused({.num_experts = 6, .num_groups = 3, .top_groups = 4}, "top_groups is 4");
  expect_refused({.num_experts = 6, .top_k = 3, .num_groups = 3, .top_groups = 1},
                 "leave only 2 to choose from");
  expect_refused({.num_experts = 4, .num_groups = 4, .group_score = GroupScore::kTopTwoSum},
                 "at least 2 experts");
  expect_refused({.num_experts = 4, .scaling_factor = std::nan("")}, "scaling factor");
  expect_refused({.num_experts = 6, .balance_group_size = 4},
                 "6 experts do not fall into groups of 4 for the balance loss");
}

TEST(Router, RefusesWrongInputs) {
  Case c{.spec = {.num_experts = 4, .top_k = 2, .balance_scope = BalanceScope::kSequence},
         .num_tokens = 6,
         .cu_seqlens = {0, 2, 5}};
  Random random(1, 1);
  EXPECT_THROW(run(c, make_inputs(c, random)), InternalError) << "sequences stop before the end";
  auto inputs = make_inputs(c, random);
  inputs.pop_back();
  EXPECT_THROW(run(c, inputs), UserError) << "an input is missing";
  c.spec.num_experts = 3;
  EXPECT_THROW(make_router(c.spec)->infer(
                   std::vector<ValueType>{{.dtype = DType::kF32, .shape = {6, router::kHidden}},
                                          {.dtype = DType::kF32, .shape = {4, router::kHidden}},
                                          {.dtype = DType::kI32, .shape = {3}}}),
               UserError)
      << "weights for 4 of 3 experts";
}

/// The choice of force_balanced, for the tokens that `is_given` says; -1 for others.
template <typename IsGiven>
std::vector<int32_t> balanced_choice(const Case& c, const IsGiven& is_given) {
  std::vector<int32_t> given;
  for (int64_t t = 0; t < c.num_tokens; ++t) {
    for (int64_t k = 0; k < c.spec.top_k; ++k) {
      const auto expert = static_cast<int32_t>((t * c.spec.top_k + k) % c.spec.num_experts);
      given.push_back(is_given(t) ? expert : -1);
    }
  }
  return given;
}

TEST(Router, RefusesToReplayExpertsThatThereAreNot) {
  for (const int32_t wrong : {4, -2}) {
    const Case c{.spec = {.num_experts = 4, .top_k = 2, .replay = true},
                 .num_tokens = 2,
                 .replayed = {-1, -1, 0, wrong}};
    Random values(1, 0);
    try {
      run(c, make_inputs(c, values));
      ADD_FAILURE() << wrong << " was taken";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("token 1 is to take expert {}", wrong)));
    }
  }
}

/// Tokens that fill a micro-batch, the last ten here, might as well not be there.
TEST(Router, PaddingCountsNowhere) {
  Random random(61, 0);
  for (const RouterSpec& spec : published_specs()) {
    Case padded = make_case(spec, BalanceScope::kMicroBatch, 80, random);
    padded.spec.padding = true;
    padded.segments.assign(80, 3);
    std::fill(padded.segments.begin() + 70, padded.segments.end(), -1);
    SCOPED_TRACE(make_router(padded.spec)->attributes());
    Random values(5, 0);
    auto inputs = make_inputs(padded, values);
    const auto actual = run(padded, inputs);
    Case without = padded;
    without.spec.padding = false;
    without.num_tokens = 70;
    auto fewer = make_inputs(without, values);
    for (size_t i = 0; i < fewer.size(); ++i)
      std::copy_n(inputs[i].tensor.get().as<float>(), fewer[i].tensor.get().num_elements(),
                  fewer[i].tensor.get().as<float>());
    const auto expected = run(without, fewer);
    const auto first = [&](RouterOutput::Output output) {
      const Tensor whole = actual[output];
      return Tensor{whole.data, whole.dtype, expected[output].get().shape};
    };
    testing::expect_bitwise_equal(first(RouterOutput::kProbs), expected[RouterOutput::kProbs], "p");
    testing::expect_bitwise_equal(first(RouterOutput::kExpertIdx),
                                  expected[RouterOutput::kExpertIdx], "idx");
    testing::expect_bitwise_equal(actual[RouterOutput::kCounts], expected[RouterOutput::kCounts],
                                  "counts");
    EXPECT_EQ(actual[RouterOutput::kExpertIdx].get().as<int32_t>()[70 * spec.top_k], -1);
    const auto value = [](const OwnedTensor& tensor) { return tensor.get().as<float>()[0]; };
    EXPECT_NEAR(value(actual[RouterOutput::kZLoss]) * 80,
                value(expected[RouterOutput::kZLoss]) * 70, 1e-3);
    EXPECT_NEAR(value(actual[RouterOutput::kScoreMeans]) * 80,
                value(expected[RouterOutput::kScoreMeans]) * 70, 1e-4);
  }
}

TEST(Router, ReplaysAChoice) {
  Random random(51, 0);
  uint64_t seed = 900;
  for (const RouterSpec& spec : published_specs()) {
    for (const BalanceScope scope : router::kScopes) {
      const Case c = make_case(spec, scope, 70, random);
      SCOPED_TRACE(make_router(c.spec)->attributes());
      ++seed;
      const auto outputs_of = [&](const Case& which) {
        Random values(seed, 0);
        return run(which, make_inputs(which, values));
      };
      Case forced = c;
      forced.spec.force_balanced = true;
      Case replayed = c;
      replayed.spec.replay = true;
      replayed.replayed = balanced_choice(c, [](int64_t) { return true; });
      const auto expected = outputs_of(forced);
      const auto all = outputs_of(replayed);
      replayed.replayed = balanced_choice(c, [](int64_t) { return false; });
      const auto own = outputs_of(c);
      const auto none = outputs_of(replayed);
      replayed.replayed = balanced_choice(c, [](int64_t t) { return t % 2 == 0; });
      const auto half = outputs_of(replayed);
      for (size_t i = 0; i < all.size(); ++i) {
        testing::expect_bitwise_equal(all[i], expected[i], fmt::format("output {}", i));
        testing::expect_bitwise_equal(none[i], own[i], fmt::format("own output {}", i));
      }
      for (int64_t i = 0; i < c.num_tokens * c.spec.top_k; ++i) {
        const auto& from = i / c.spec.top_k % 2 == 0 ? expected : own;
        EXPECT_EQ(half[RouterOutput::kExpertIdx].get().as<int32_t>()[i],
                  from[RouterOutput::kExpertIdx].get().as<int32_t>()[i]);
        EXPECT_EQ(half[RouterOutput::kProbs].get().as<float>()[i],
                  from[RouterOutput::kProbs].get().as<float>()[i]);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
