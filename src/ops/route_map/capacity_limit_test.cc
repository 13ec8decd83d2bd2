#include "ops/route_map/capacity_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

struct Batch {
  int64_t num_tokens;
  int64_t top_k;
  std::vector<int32_t> expert_idx;
  std::vector<float> probs;
};

KernelTable kernels() {
  KernelTable table;
  add_route_map_cpu(table);
  return table;
}

testing::TestInput constant(OwnedTensor tensor, const std::string& name) {
  return {std::move(tensor), testing::Role::kConstant, name};
}

std::vector<testing::TestInput> inputs_of(const Batch& batch) {
  const Shape shape{batch.num_tokens, batch.top_k};
  return testing::list_inputs(constant(testing::tensor_of_i32(shape, batch.expert_idx), "idx"),
                              constant(testing::tensor_of(shape, batch.probs), "probs"));
}

Batch random_batch(const RouteMapSpec& spec, int64_t num_tokens, Random& random) {
  Batch batch{num_tokens, spec.top_k, {}, {}};
  std::vector<int32_t> experts(spec.num_experts);
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::iota(experts.begin(), experts.end(), 0);
    for (size_t k = 0; k < static_cast<size_t>(spec.top_k); ++k) {
      std::swap(experts[k], experts[k + random.next_below(experts.size() - k) / 2]);
      batch.expert_idx.push_back(random.next_below(9) == 0 ? -1 : experts[k]);
      batch.probs.push_back(static_cast<float>(random.next_below(6)) / 6.0F);
    }
  }
  return batch;
}

/// What route_map over the whole micro-batch keeps: -1 in place of what it drops.
std::vector<int32_t> kept_by_route_map(const RouteMapSpec& spec, const Batch& batch,
                                       int64_t& dropped) {
  const auto outputs = testing::run_operator(*make_route_map(spec), kernels(), inputs_of(batch));
  const auto row_of = outputs[RouteMapOutput::kRowOfTK].get().span<int32_t>();
  std::vector<int32_t> kept = batch.expert_idx;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (row_of[i] < 0) kept[i] = -1;
  }
  dropped = *outputs[RouteMapOutput::kDropped].get().as<int64_t>();
  return kept;
}

/// The batch as a rank gathers it: row r is token positions[r].
Batch shuffle(const Batch& batch, const std::vector<int32_t>& positions) {
  Batch result{batch.num_tokens, batch.top_k, {}, {}};
  for (const int32_t token : positions) {
    for (int64_t k = 0; k < batch.top_k; ++k) {
      const size_t i = token * batch.top_k + k;
      result.expert_idx.push_back(batch.expert_idx[i]);
      result.probs.push_back(batch.probs[i]);
    }
  }
  return result;
}

std::vector<int32_t> random_order(int64_t num_tokens, Random& random) {
  std::vector<int32_t> order(num_tokens);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.next_below(i)]);
  return order;
}

/// The limit for every one of `num_ranks` ranks against the whole micro-batch's.
void expect_ranks_agree(const RouteMapSpec& spec, int64_t num_ranks, int64_t tokens_each,
                        bool has_positions, Random& random) {
  const Batch batch = random_batch(spec, num_ranks * tokens_each, random);
  int64_t dropped = 0;
  const auto expected = kept_by_route_map(spec, batch, dropped);
  auto positions = random_order(batch.num_tokens, random);
  if (!has_positions) std::ranges::sort(positions);
  const Batch gathered = shuffle(batch, positions);
  int64_t dropped_here = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const IndexRange own{rank * tokens_each, tokens_each};
    auto inputs = inputs_of(gathered);
    if (has_positions) {
      inputs.push_back(
          constant(testing::tensor_of_i32({batch.num_tokens}, positions), "positions"));
    }
    const auto outputs =
        testing::run_operator(*make_capacity_limit({spec, own, has_positions}), kernels(), inputs);
    dropped_here += *outputs[1].get().as<int64_t>();
    const auto kept = outputs[0].get().span<int32_t>();
    for (int64_t i = 0; i < own.count * spec.top_k; ++i) {
      const int64_t token = positions[own.begin + i / spec.top_k];
      EXPECT_EQ(kept[i], expected[token * spec.top_k + i % spec.top_k])
          << "rank " << rank << ", assignment " << i;
    }
  }
  EXPECT_EQ(dropped_here, dropped);
}

TEST(CapacityLimit, EveryRankKeepsWhatRouteMapKeepsOfTheWholeMicroBatch) {
  Random random(3, 7);
  for (int trial = 0; trial < 120; ++trial) {
    const int64_t group = 1 + static_cast<int64_t>(random.next_below(3));
    const int64_t experts = group * (1 + static_cast<int64_t>(random.next_below(4)));
    RouteMapSpec spec{
        .num_experts = experts,
        .top_k = 1 + static_cast<int64_t>(random.next_below(static_cast<uint64_t>(experts))),
        .drop_policy = random.next_below(2) == 0 ? DropPolicy::kProbs : DropPolicy::kPosition,
        .capacity_group_size = group};
    const auto num_ranks = 1 + static_cast<int64_t>(random.next_below(4));
    const auto tokens_each = static_cast<int64_t>(random.next_below(12));
    const auto assignments = std::max<int64_t>(num_ranks * tokens_each * spec.top_k, 1);
    spec.capacity_factor = 0.2 + random.next_uniform() +
                           static_cast<double>(experts) / static_cast<double>(assignments);
    SCOPED_TRACE(fmt::format("trial {}: {} ranks of {} tokens, {}", trial, num_ranks, tokens_each,
                             make_route_map(spec)->attributes()));
    expect_ranks_agree(spec, num_ranks, tokens_each, random.next_below(2) == 0, random);
  }
}

TEST(CapacityLimit, RefusesWhatCannotWork) {
  const RouteMapSpec route{.num_experts = 2, .top_k = 1, .capacity_factor = 1};
  try {
    make_capacity_limit({.route = {.num_experts = 2}});
    ADD_FAILURE() << "accepted";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("needs a capacity factor above 0"));
  }
  const Batch batch{2, 1, {0, 1}, {1, 1}};
  EXPECT_THROW(
      testing::run_operator(*make_capacity_limit({route, {1, 2}}), kernels(), inputs_of(batch)),
      UserError)
      << "token 2 of 2";
  auto inputs = inputs_of(batch);
  inputs.push_back(constant(testing::tensor_of_i32({2}, {1, 1}), "positions"));
  EXPECT_THROW(
      testing::run_operator(*make_capacity_limit({route, {0, 1}, true}), kernels(), inputs),
      InternalError)
      << "no permutation";
}

}  // namespace
}  // namespace tessera
