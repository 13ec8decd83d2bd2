#include "ops/balance/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera {
namespace {

using testing::ProgramRun;
using testing::Role;
using testing::TestInput;

constexpr int64_t kHidden = 16;

KernelTable kernels() {
  KernelTable table;
  add_router_cpu(table);
  add_balance_cpu(table);
  return table;
}

/// A micro-batch, by sequences, and what is asked of its routers.
struct Case {
  RouterSpec spec;
  std::vector<int32_t> cu_seqlens;       ///< one segment where the scope is no sequence
  std::vector<float> prior_counts = {};  ///< of the step's micro-batches before; empty: not counted

  int64_t num_tokens() const { return cu_seqlens.back(); }
  int64_t num_segments() const {
    return spec.balance_scope == BalanceScope::kSequence ? std::ssize(cu_seqlens) - 1 : 1;
  }
  int32_t segment_of(int64_t token) const {
    if (num_segments() == 1) return 0;
    const auto after = std::ranges::upper_bound(cu_seqlens, token);
    return static_cast<int32_t>(after - cu_seqlens.begin()) - 1;
  }
  BalanceStatisticsSpec statistics() const {
    return {.num_experts = spec.num_experts,
            .top_k = spec.top_k,
            .score = spec.score,
            .num_segments = num_segments()};
  }
  BalanceLossSpec loss() const {
    return {.total_tokens = num_tokens(),
            .group_size = spec.balance_group_size,
            .has_prior_counts = !prior_counts.empty()};
  }
};

/// The whole micro-batch's values.
struct Values {
  OwnedTensor x, weight, grad_probs;

  Values(const Case& c, uint64_t seed) {
    Random random(seed, 5);
    x = testing::random_tensor(DType::kF32, {c.num_tokens(), kHidden}, random);
    weight = testing::random_tensor(DType::kF32, {c.spec.num_experts, kHidden}, random, 0.4);
    grad_probs = testing::random_tensor(DType::kF32, {c.num_tokens(), c.spec.top_k}, random);
  }
};

/// Losses and the gradients of the router's inputs.
struct Result {
  double balance = 0;
  double z = 0;
  std::vector<float> grad_x;
  std::vector<double> grad_weight;
};

constexpr float kGradBalance = 0.7F;
constexpr float kGradZ = 0.3F;

void copy(const Tensor& to, const float* from) {
  if (to.num_bytes() > 0) std::memcpy(to.data, from, to.num_bytes());
}

void collect(const Tensor& grad_x, const Tensor& grad_weight, Result& result) {
  for (const float g : grad_x.span<float>()) result.grad_x.push_back(g);
  result.grad_weight.resize(grad_weight.num_elements(), 0.0);
  for (size_t i = 0; i < result.grad_weight.size(); ++i) {
    result.grad_weight[i] += static_cast<double>(grad_weight.span<float>()[i]);
  }
}

/// The gradient of the loss over the step so far by the score means, and its value: D · Σ_d f_d·P_d
/// with f of the counts and those before.
double balance_with_prior(const Case& c, std::span<const float> counts,
                          std::span<const float> score_means, std::span<float> grad_means) {
  const size_t group_size = c.spec.balance_group_size;
  std::vector<double> total(counts.begin(), counts.end());
  for (size_t e = 0; e < total.size(); ++e) total[e] += static_cast<double>(c.prior_counts[e]);
  const double sum = std::accumulate(total.begin(), total.end(), 0.0);
  const double num_groups = static_cast<double>(total.size() / group_size);
  double loss = 0;
  for (size_t e = 0; e < total.size(); ++e) {
    const auto first = total.begin() + static_cast<ptrdiff_t>(e / group_size * group_size);
    const double group = std::accumulate(first, first + static_cast<ptrdiff_t>(group_size), 0.0);
    loss += num_groups * group / sum * static_cast<double>(score_means[e]);
    grad_means[e] = static_cast<float>(kGradBalance * num_groups * group / sum);
  }
  return loss;
}

/// One router over all tokens, with its own losses; with counts before, by its score means.
Result run_whole(const Case& c, const Values& values) {
  Program program("whole");
  std::vector<ValueId> inputs = {
      program.add_input("x", {DType::kF32, {c.num_tokens(), kHidden}}),
      program.add_weight("weight", {DType::kF32, {c.spec.num_experts, kHidden}})};
  if (c.spec.balance_scope == BalanceScope::kSequence) {
    inputs.push_back(program.add_input("cu", {DType::kI32, {std::ssize(c.cu_seqlens)}}));
  }
  const auto routed = program.add(make_router(c.spec), inputs);
  const ValueId probs = routed[RouterOutput::kProbs];
  const bool by_means = !c.prior_counts.empty();
  const ValueId counts = routed[RouterOutput::kCounts];
  const ValueId balance = routed[by_means ? RouterOutput::kScoreMeans : RouterOutput::kBalanceLoss];
  const ValueId z = routed[RouterOutput::kZLoss];
  program.set_outputs({probs, counts, balance, z});
  const ProgramRun run(program, {{probs, balance, z}, {inputs[0]}}, kernels());
  copy(run.value(inputs[0]), values.x.get().as<float>());
  copy(run.value(inputs[1]), values.weight.get().as<float>());
  if (c.spec.balance_scope == BalanceScope::kSequence) {
    std::ranges::copy(c.cu_seqlens, run.value(inputs[2]).as<int32_t>());
  }
  copy(run.grad(probs), values.grad_probs.get().as<float>());
  *run.grad(balance).as<float>() = kGradBalance;
  *run.grad(z).as<float>() = kGradZ;
  run.run_forward();
  double loss = *run.value(balance).as<float>();
  if (by_means) {
    loss = balance_with_prior(c, run.value(counts).span<float>(), run.value(balance).span<float>(),
                              run.grad(balance).span<float>());
  }
  run.run_backward();
  Result result{loss, *run.value(z).as<float>(), {}, {}};
  collect(run.grad(inputs[0]), run.grad(inputs[1]), result);
  return result;
}

/// A rank's router over its tokens [first, first + count), with the losses composed.
struct Rank {
  int64_t first, count;
  ValueId x, weight, segments, all_counts, prior = -1;
  ValueId probs, z, counts, balance;
  std::unique_ptr<ProgramRun> run;

  Rank(const Case& c, const Values& values, int64_t first_token, int64_t num_tokens)
      : first(first_token), count(num_tokens) {
    Program program("rank");
    x = program.add_input("x", {DType::kF32, {count, kHidden}});
    weight = program.add_weight("weight", {DType::kF32, {c.spec.num_experts, kHidden}});
    segments = program.add_input("segments", {DType::kI32, {count}});
    // Stands for the sum over ranks that an all-reduce makes.
    all_counts =
        program.add_input("all_counts", {DType::kF32, {c.num_segments(), c.spec.num_experts}});
    RouterSpec spec = c.spec;
    spec.balance_scope = BalanceScope::kMicroBatch;  // its own balance loss is not used
    const auto routed = program.add(make_router(spec), {x, weight});
    probs = routed[RouterOutput::kProbs];
    z = routed[RouterOutput::kZLoss];
    const auto statistics =
        program.add(make_balance_statistics(c.statistics()),
                    {routed[RouterOutput::kLogits], routed[RouterOutput::kExpertIdx], segments});
    counts = statistics[BalanceOutput::kCounts];
    std::vector<ValueId> inputs = {all_counts, statistics[BalanceOutput::kScoreSums]};
    if (c.loss().has_prior_counts) {
      prior = program.add_input("prior", {DType::kF32, {c.spec.num_experts}});
      inputs.push_back(prior);
    }
    balance = program.add1(make_balance_loss(c.loss()), inputs, "balance");
    program.set_outputs({probs, z, counts, balance});
    run = std::make_unique<ProgramRun>(program, DifferentiateRequest{{probs, z, balance}, {x}},
                                       kernels());
    fill(c, values);
  }

  void fill(const Case& c, const Values& values) const {
    copy(run->value(x), values.x.get().as<float>() + first * kHidden);
    copy(run->value(weight), values.weight.get().as<float>());
    for (int64_t t = 0; t < count; ++t) {
      run->value(segments).as<int32_t>()[t] = c.segment_of(first + t);
    }
    if (prior >= 0) copy(run->value(prior), c.prior_counts.data());
    copy(run->grad(probs), values.grad_probs.get().as<float>() + first * c.spec.top_k);
    *run->grad(balance).as<float>() = kGradBalance;
    // z_loss is a mean over the rank's tokens: the caller gives it the rank's share.
    *run->grad(z).as<float>() = kGradZ * static_cast<float>(count) /
                                static_cast<float>(std::max<int64_t>(c.num_tokens(), 1));
  }
};

Result run_ranks(const Case& c, const Values& values, const std::vector<int64_t>& sizes) {
  std::vector<Rank> ranks;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    ranks.emplace_back(c, values, first, size);
    first += size;
  }
  std::vector<float> all_counts(c.num_segments() * c.spec.num_experts, 0.0F);
  for (const Rank& rank : ranks) {
    rank.run->run_forward();
    const auto counts = rank.run->value(rank.counts).span<float>();
    for (size_t i = 0; i < all_counts.size(); ++i) all_counts[i] += counts[i];
  }
  Result result;
  for (const Rank& rank : ranks) {
    copy(rank.run->value(rank.all_counts), all_counts.data());
    rank.run->run_forward();
    rank.run->run_backward();
    const double share =
        static_cast<double>(rank.count) / static_cast<double>(std::max<int64_t>(c.num_tokens(), 1));
    result.balance += *rank.run->value(rank.balance).as<float>();
    result.z += share * *rank.run->value(rank.z).as<float>();
    collect(rank.run->grad(rank.x), rank.run->grad(rank.weight), result);
  }
  return result;
}

void expect_ranks_make_the_whole(const Case& c, const std::vector<int64_t>& sizes, uint64_t seed) {
  const Values values(c, seed);
  const Result whole = run_whole(c, values);
  const Result parts = run_ranks(c, values, sizes);
  EXPECT_NEAR(parts.balance, whole.balance, 3e-6 * std::max(1.0, whole.balance));
  EXPECT_NEAR(parts.z, whole.z, 3e-6 * std::max(1.0, whole.z));
  ASSERT_EQ(parts.grad_x.size(), whole.grad_x.size());
  const OwnedTensor expected_x = testing::tensor_of({c.num_tokens(), kHidden}, whole.grad_x);
  const OwnedTensor actual_x = testing::tensor_of({c.num_tokens(), kHidden}, parts.grad_x);
  testing::expect_rows_near(actual_x, expected_x, 2e-5, "dx");
  for (size_t i = 0; i < whole.grad_weight.size(); ++i) {
    EXPECT_NEAR(parts.grad_weight[i], whole.grad_weight[i], 2e-5) << "dweight[" << i << "]";
  }
}

constexpr ScoreFunction kScores[] = {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid,
                                     ScoreFunction::kSqrtSoftplus};

enum class Tokens { kMicroBatch, kSequence, kStepSoFar };

Case make_case(Tokens tokens, ScoreFunction score, int64_t group_size, Random& random) {
  Case c{.spec = {.num_experts = 12,
                  .top_k = 3,
                  .score = score,
                  .normalize_top_k = true,
                  .balance_scope = tokens == Tokens::kSequence ? BalanceScope::kSequence
                                                               : BalanceScope::kMicroBatch,
                  .balance_group_size = group_size},
         .cu_seqlens = {0, 4, 4, 19, 41}};
  for (int e = 0; e < 12 && tokens == Tokens::kStepSoFar; ++e) {
    c.prior_counts.push_back(static_cast<float>(random.next_below(40)));
  }
  return c;
}

TEST(Balance, PartsOfRanksMakeTheRoutersOwnLoss) {
  Random random(1, 0);
  uint64_t seed = 0;
  for (const Tokens tokens : {Tokens::kMicroBatch, Tokens::kSequence, Tokens::kStepSoFar}) {
    for (const ScoreFunction score : kScores) {
      for (const int64_t group_size : {1, 4}) {
        const Case c = make_case(tokens, score, group_size, random);
        SCOPED_TRACE(make_router(c.spec)->attributes());
        for (const auto& sizes :
             std::vector<std::vector<int64_t>>{{41}, {20, 21}, {0, 7, 34}, {11, 10, 10, 10}}) {
          expect_ranks_make_the_whole(c, sizes, ++seed);
        }
      }
    }
  }
}

TEST(Balance, NoTokensNoLoss) {
  Random random(1, 0);
  Case c = make_case(Tokens::kMicroBatch, ScoreFunction::kSoftmax, 1, random);
  c.cu_seqlens = {0, 0};
  const Values values(c, 1);
  EXPECT_EQ(run_ranks(c, values, {0, 0}).balance, 0.0);
}

std::vector<TestInput> statistics_inputs(const BalanceStatisticsSpec& spec, int64_t num_tokens,
                                         Random& random) {
  std::vector<int32_t> idx, segments;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < spec.top_k; ++k) {
      idx.push_back(
          static_cast<int32_t>(random.next_below(static_cast<uint64_t>(spec.num_experts) + 1)) - 1);
    }
    segments.push_back(
        static_cast<int32_t>(random.next_below(static_cast<uint64_t>(spec.num_segments))));
  }
  return testing::list_inputs(
      TestInput{testing::random_tensor(DType::kF32, {num_tokens, spec.num_experts}, random),
                Role::kValue, "logits"},
      TestInput{testing::tensor_of_i32({num_tokens, spec.top_k}, idx), Role::kConstant, "idx"},
      TestInput{testing::tensor_of_i32({num_tokens}, segments), Role::kConstant, "segments"});
}

TEST(Balance, GradientsOfStatisticsAndLoss) {
  Random random(4, 0);
  for (const ScoreFunction score : kScores) {
    const BalanceStatisticsSpec spec{
        .num_experts = 9, .top_k = 2, .score = score, .num_segments = 3};
    const auto inputs = statistics_inputs(spec, 13, random);
    testing::check_gradients(make_balance_statistics(spec), kernels(), inputs,
                             {.outputs = {BalanceOutput::kScoreSums}});
  }
  const auto sums = [&](Role role, const std::string& name) {
    auto tensor = testing::random_tensor(DType::kF32, {2, 6}, random);
    for (float& value : tensor.get().span<float>()) value = std::abs(value);
    return TestInput{std::move(tensor), role, name};
  };
  testing::check_gradients(
      make_balance_loss({.total_tokens = 17, .group_size = 2}), kernels(),
      testing::list_inputs(sums(Role::kConstant, "counts"), sums(Role::kValue, "score_sums")));
}

TEST(Balance, AbsentAssignmentsCountNowhere) {
  const BalanceStatisticsSpec spec{.num_experts = 3, .top_k = 2, .num_segments = 2};
  Random random(5, 0);
  auto inputs = statistics_inputs(spec, 2, random);
  std::ranges::copy(std::vector<int32_t>{2, -1, 0, 2}, inputs[1].tensor.get().as<int32_t>());
  std::ranges::copy(std::vector<int32_t>{1, 0}, inputs[2].tensor.get().as<int32_t>());
  const auto outputs = testing::run_operator(*make_balance_statistics(spec), kernels(), inputs);
  testing::expect_bitwise_equal(outputs[BalanceOutput::kCounts],
                                testing::tensor_of({2, 3}, {1, 0, 1, 0, 0, 1}), "counts");
}

TEST(Balance, TokensWithoutSegmentCountNowhere) {
  const BalanceStatisticsSpec spec{.num_experts = 3, .top_k = 1, .num_segments = 2};
  Random random(5, 0);
  auto inputs = statistics_inputs(spec, 3, random);
  std::ranges::copy(std::vector<int32_t>{2, 1, 0}, inputs[1].tensor.get().as<int32_t>());
  std::ranges::copy(std::vector<int32_t>{1, -1, 0}, inputs[2].tensor.get().as<int32_t>());
  const auto outputs = testing::run_operator(*make_balance_statistics(spec), kernels(), inputs);
  testing::expect_bitwise_equal(outputs[BalanceOutput::kCounts],
                                testing::tensor_of({2, 3}, {1, 0, 0, 0, 0, 1}), "counts");
  testing::check_gradients(make_balance_statistics(spec), kernels(), inputs,
                           {.outputs = {BalanceOutput::kScoreSums}});
}

TEST(Balance, CountsRunOnAsOnOneRank) {
  constexpr int64_t kRanks = 3;
  constexpr int64_t kExperts = 5;
  Random random(4, 2);
  const auto draw = [&](const Shape& shape) {
    OwnedTensor tensor(DType::kF32, shape);
    for (float& x : tensor.get().span<float>()) x = static_cast<float>(random.next_below(100));
    return tensor;
  };
  std::vector<TestInput> inputs;
  inputs.push_back({draw({kRanks, kExperts})});
  inputs.push_back({draw({kExperts})});
  const auto counts = inputs[0].tensor.get().span<float>();
  OwnedTensor expected(DType::kF32, {kExperts});
  std::ranges::copy(inputs[1].tensor.get().span<float>(), expected.get().as<float>());
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const auto outputs = testing::run_operator(*make_running_counts(rank), kernels(), inputs);
    testing::expect_bitwise_equal(outputs[RunningCountsOutput::kBefore], expected, "before");
    for (size_t e = 0; e < kExperts; ++e)
      expected.get().as<float>()[e] += counts[static_cast<size_t>(rank * kExperts) + e];
    if (rank < kRanks - 1) continue;
    testing::expect_bitwise_equal(outputs[RunningCountsOutput::kAfter], expected, "after");
  }
}

TEST(Balance, RefusesWhatDoesNotFit) {
  const BalanceStatisticsSpec spec{.num_experts = 3, .top_k = 2, .num_segments = 2};
  Random random(6, 0);
  auto inputs = statistics_inputs(spec, 4, random);
  inputs[2].tensor.get().as<int32_t>()[1] = 2;
  EXPECT_THROW(testing::run_operator(*make_balance_statistics(spec), kernels(), inputs),
               InternalError)
      << "segment 2 of 2";
  EXPECT_THROW(make_balance_statistics({.num_experts = 0}), UserError);
  EXPECT_THROW(make_balance_loss({.group_size = 0}), UserError);
  EXPECT_THROW(make_running_counts(-1), UserError);
  const ValueType sums{.dtype = DType::kF32, .shape = {2, 6}};
  const auto infer = [](const OperatorPtr& op, std::vector<ValueType> types) {
    return op->infer(types);
  };
  EXPECT_NO_THROW(infer(make_balance_loss({.group_size = 3}), {sums, sums}));
  EXPECT_THROW(infer(make_balance_loss({.group_size = 4}), {sums, sums}), UserError);
  EXPECT_THROW(infer(make_balance_loss({.has_prior_counts = true}),
                     {sums, sums, {.dtype = DType::kF32, .shape = {6}}}),
               UserError)
      << "two segments";
  const ValueType earlier{.dtype = DType::kF32, .shape = {6}};
  EXPECT_NO_THROW(infer(make_running_counts(1), {sums, earlier}));
  EXPECT_THROW(infer(make_running_counts(2), {sums, earlier}), UserError) << "two ranks";
}

}  // namespace
}  // namespace tessera
