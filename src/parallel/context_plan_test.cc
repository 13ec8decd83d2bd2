#include "parallel/context_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

/// Lengths of a log-normal distribution, from 1 to `longest`.
std::vector<int64_t> draw_lengths(uint64_t seed, int64_t count, int64_t median, double sigma,
                                  int64_t longest) {
  Random random(seed, 5);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) {
    const double a = (static_cast<double>(random.next_below(1 << 20)) + 1) / (1 << 20);
    const double b = static_cast<double>(random.next_below(1 << 20)) / (1 << 20);
    const double normal = std::sqrt(-2 * std::log(a)) * std::cos(2 * 3.14159265358979 * b);
    const double length = static_cast<double>(median) * std::exp(sigma * normal);
    lengths.push_back(std::clamp(static_cast<int64_t>(length), int64_t{1}, longest));
  }
  return lengths;
}

void expect_group_fits(const ContextGroup& group, const std::vector<int64_t>& lengths,
                       const ContextPlanSpec& spec) {
  EXPECT_EQ(group.degree & (group.degree - 1), 0) << group.degree;
  EXPECT_LE(group.degree, spec.max_degree);
  EXPECT_EQ(group.first_rank % group.degree, 0);
  EXPECT_LE(std::ssize(group.documents), spec.max_documents);
  int64_t tokens = 0;
  for (const int32_t document : group.documents)
    tokens += padded_length(lengths[document], group.degree);
  EXPECT_LE(tokens, group.degree * spec.rank_tokens);
}

/// Every document once, in groups that fit and fill every micro-batch's ranks.
void expect_whole(const ContextPlan& plan, const std::vector<int64_t>& lengths,
                  const ContextPlanSpec& spec) {
  std::vector<int> seen(lengths.size(), 0);
  for (const auto& groups : plan.micro_batches) {
    int64_t next = 0;
    for (const ContextGroup& group : groups) {
      EXPECT_EQ(group.first_rank, next);
      next += group.degree;
      expect_group_fits(group, lengths, spec);
      for (const int32_t document : group.documents) ++seen[document];
    }
    EXPECT_EQ(next, spec.num_ranks);
  }
  EXPECT_TRUE(std::ranges::all_of(seen, [](int times) { return times == 1; }));
}

ContextPlanSpec spec_of(int64_t num_ranks, int64_t rank_tokens) {
  return {.num_ranks = num_ranks,
          .rank_tokens = rank_tokens,
          .max_degree = largest_context(num_ranks),
          .max_documents = rank_tokens,
          .costs = {.token = 1, .pair = 0.01}};
}

TEST(ContextPlan, PadsDocumentsToWholeChunks) {
  EXPECT_EQ(padded_length(7, 1), 7);
  EXPECT_EQ(padded_length(7, 2), 8);
  EXPECT_EQ(padded_length(8, 2), 8);
  EXPECT_EQ(padded_length(9, 8), 16);
  EXPECT_EQ(largest_context(12), 4);
  EXPECT_EQ(largest_context(7), 1);
  EXPECT_EQ(largest_context(8), 8);
}

TEST(ContextPlan, HoldsEveryDocumentOnce) {
  for (const int64_t ranks : {1, 2, 4, 6, 8}) {
    for (const bool meets : {false, true}) {
      for (uint64_t seed = 0; seed < 10; ++seed) {
        ContextPlanSpec spec = spec_of(ranks, 64);
        spec.meets = meets;
        spec.max_documents = 1 + static_cast<int64_t>(seed);
        const auto lengths = draw_lengths(seed, 40, 20, 1.2, 64 * spec.max_degree);
        SCOPED_TRACE(seed);
        const ContextPlan plan = plan_contexts(lengths, spec);
        expect_whole(plan, lengths, spec);
        EXPECT_EQ(plan.cost, cost_of(plan, lengths, spec));
        EXPECT_EQ(plan.micro_batches, plan_contexts(lengths, spec).micro_batches);
      }
    }
  }
}

/// Of two ranks, as in figure 38 of the report on Megatron-Core MoE: the long document is shared,
/// the short ones are not.
TEST(ContextPlan, SharesOnlyTheLongDocument) {
  const std::vector<int64_t> lengths = {128, 60, 64};
  const ContextPlan plan = plan_contexts(lengths, spec_of(2, 64));
  ASSERT_EQ(plan.num_micro_batches(), 2);
  std::vector<std::vector<ContextGroup>> expected = {
      {{.degree = 2, .first_rank = 0, .documents = {0}}},
      {{.degree = 1, .first_rank = 0, .documents = {2}},
       {.degree = 1, .first_rank = 1, .documents = {1}}}};
  EXPECT_EQ(plan.micro_batches, expected);
}

/// A document that a rank could hold is shared all the same where the others would wait for it.
TEST(ContextPlan, SharesWhatOneRankWouldTakeTooLongFor) {
  ContextPlanSpec spec = spec_of(4, 1024);
  spec.costs = {.token = 1, .pair = 1};
  const std::vector<int64_t> lengths = {1000, 10, 10, 10};
  const ContextPlan plan = plan_contexts(lengths, spec);
  EXPECT_EQ(plan.group_of(0, 0).degree, 4);
  spec.costs.pair = 0;
  spec.costs.exchange = 1;
  EXPECT_EQ(plan_contexts(lengths, spec).group_of(0, 0).degree, 1);
}

TEST(ContextPlan, EvensOutHeavyTails) {
  for (const bool meets : {false, true}) {
    ContextPlanSpec spec = spec_of(16, 4096);
    spec.meets = meets;
    const auto lengths = draw_lengths(3, 800, 1200, 1.3, 32768);
    const ContextPlan plan = plan_contexts(lengths, spec);
    expect_whole(plan, lengths, spec);
    double pairs = 0;
    for (const int64_t n : lengths) pairs += 0.5 * static_cast<double>(n) * static_cast<double>(n);
    const double even =
        pairs * spec.costs.pair / 16 + static_cast<double>(plan.num_micro_batches()) * 4096;
    EXPECT_LT(plan.cost, (meets ? 1.35 : 1.1) * even) << meets;
  }
}

TEST(ContextPlan, StepWithoutDocumentsIsOneEmptyMicroBatch) {
  const ContextPlan plan = plan_contexts({}, spec_of(4, 16));
  ASSERT_EQ(plan.num_micro_batches(), 1);
  expect_whole(plan, {}, spec_of(4, 16));
}

TEST(ContextPlan, RefusesDocumentsThatNoRanksHold) {
  const std::vector<int64_t> lengths = {65};
  EXPECT_THROW(plan_contexts(lengths, spec_of(4, 16)), InternalError);
}

}  // namespace
}  // namespace tessera
