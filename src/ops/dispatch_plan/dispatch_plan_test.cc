#include "ops/dispatch_plan/dispatch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// One routed row: where it comes from and which expert it is for.
struct Row {
  int64_t ep_rank, etp_rank, number, expert;
  bool operator==(const Row&) const = default;
};
using Rows = std::vector<Row>;

/// All ranks of EP x ETP with random rows, and the exchange carried out row by row.
struct Simulation {
  DispatchPlanSpec spec;
  std::vector<int64_t> counts;  ///< [EP · ETP · E]

  int64_t num_ranks() const { return spec.ep_size() * spec.etp_size; }
  int64_t count(int64_t ep_rank, int64_t etp_rank, int64_t expert) const {
    return counts[(ep_rank * spec.etp_size + etp_rank) * spec.num_experts() + expert];
  }
  /// What a rank has before the exchange: by expert.
  Rows own_rows(int64_t ep_rank, int64_t etp_rank) const {
    Rows rows;
    for (int64_t e = 0; e < spec.num_experts(); ++e) {
      for (int64_t i = 0; i < count(ep_rank, etp_rank, e); ++i) {
        rows.push_back({ep_rank, etp_rank, std::ssize(rows), e});
      }
    }
    return rows;
  }
  bool holds(int64_t ep_rank, int64_t expert) const {
    return spec.first_experts[ep_rank] <= expert && expert < spec.first_experts[ep_rank + 1];
  }
  /// The rows of one rank for another of its EP group.
  Rows sent(int64_t from, int64_t to, int64_t etp_rank) const {
    Rows rows = own_rows(from, etp_rank);
    std::erase_if(rows, [&](const Row& row) { return !holds(to, row.expert); });
    return rows;
  }
  Rows received(int64_t ep_rank, int64_t etp_rank) const {
    Rows rows;
    for (int64_t from = 0; from < spec.ep_size(); ++from) {
      std::ranges::copy(sent(from, ep_rank, etp_rank), std::back_inserter(rows));
    }
    return rows;
  }
};

struct Plan {
  std::vector<int64_t> send_rows, receive_rows, gather_rows;
  int64_t received = 0;
  int64_t gathered = 0;
  std::vector<int32_t> expert_idx;
};

template <typename T>
std::vector<T> elements(const OwnedTensor& tensor) {
  const auto span = tensor.get().span<T>();
  return {span.begin(), span.end()};
}

Plan run(const DispatchPlanSpec& spec, const std::vector<int64_t>& counts) {
  KernelTable kernels;
  add_dispatch_plan_cpu(kernels);
  const auto outputs = testing::run_operator(
      *make_dispatch_plan(spec), kernels,
      testing::list_inputs(testing::TestInput{testing::tensor_of_i64({std::ssize(counts)}, counts),
                                              testing::Role::kConstant, "counts"}));
  return {.send_rows = elements<int64_t>(outputs[DispatchPlanOutput::kSendRows]),
          .receive_rows = elements<int64_t>(outputs[DispatchPlanOutput::kReceiveRows]),
          .gather_rows = elements<int64_t>(outputs[DispatchPlanOutput::kGatherRows]),
          .received = elements<int64_t>(outputs[DispatchPlanOutput::kReceived])[0],
          .gathered = elements<int64_t>(outputs[DispatchPlanOutput::kGathered])[0],
          .expert_idx = elements<int32_t>(outputs[DispatchPlanOutput::kExpertIdx])};
}

void expect_rank_right(const Simulation& simulation) {
  const DispatchPlanSpec& spec = simulation.spec;
  const Plan plan = run(spec, simulation.counts);
  for (int64_t peer = 0; peer < spec.ep_size(); ++peer) {
    EXPECT_EQ(plan.send_rows[peer], std::ssize(simulation.sent(spec.ep_rank, peer, spec.etp_rank)));
    EXPECT_EQ(plan.receive_rows[peer],
              std::ssize(simulation.sent(peer, spec.ep_rank, spec.etp_rank)));
  }
  EXPECT_EQ(plan.received, std::ssize(simulation.received(spec.ep_rank, spec.etp_rank)));
  std::vector<int32_t> expert_idx;
  for (int64_t etp_rank = 0; etp_rank < spec.etp_size; ++etp_rank) {
    const Rows rows = simulation.received(spec.ep_rank, etp_rank);
    EXPECT_EQ(plan.gather_rows[etp_rank], std::ssize(rows));
    for (const Row& row : rows) {
      expert_idx.push_back(static_cast<int32_t>(row.expert - spec.first_local()));
    }
  }
  EXPECT_EQ(plan.gathered, std::ssize(expert_idx));
  EXPECT_EQ(plan.expert_idx, expert_idx);
}

Simulation random_simulation(int64_t ep_size, int64_t etp_size, Random& random) {
  Simulation result;
  result.spec.etp_size = etp_size;
  result.spec.first_experts = {0};
  for (int64_t e = 0; e < ep_size; ++e) {
    result.spec.first_experts.push_back(result.spec.first_experts.back() + 1 +
                                        static_cast<int64_t>(random.next_below(4)));
  }
  for (int64_t rank = 0; rank < result.num_ranks(); ++rank) {
    const bool empty = random.next_below(4) == 0;
    for (int64_t e = 0; e < result.spec.num_experts(); ++e) {
      const bool none = empty || random.next_below(3) == 0;
      result.counts.push_back(none ? 0 : static_cast<int64_t>(random.next_below(6)));
    }
  }
  return result;
}

TEST(DispatchPlan, AgreesWithASimulationOfTheRanks) {
  Random random(2, 2);
  for (int trial = 0; trial < 60; ++trial) {
    const auto ep_size = 1 + static_cast<int64_t>(random.next_below(5));
    const auto etp_size = 1 + static_cast<int64_t>(random.next_below(3));
    Simulation simulation = random_simulation(ep_size, etp_size, random);
    simulation.spec.max_received = simulation.spec.max_gathered = 1000;
    for (int64_t ep_rank = 0; ep_rank < ep_size; ++ep_rank) {
      for (int64_t etp_rank = 0; etp_rank < etp_size; ++etp_rank) {
        simulation.spec.ep_rank = ep_rank;
        simulation.spec.etp_rank = etp_rank;
        SCOPED_TRACE(fmt::format("trial {}, rank {}, {} of {}", trial, ep_rank, etp_rank,
                                 make_dispatch_plan(simulation.spec)->attributes()));
        expect_rank_right(simulation);
      }
    }
  }
}

TEST(DispatchPlan, TwoRanksOfTwoExperts) {
  const DispatchPlanSpec spec{
      .first_experts = {0, 2, 4}, .ep_rank = 1, .max_received = 9, .max_gathered = 9};
  const Plan plan = run(spec, {1, 0, 2, 3, /* rank 1 */ 4, 1, 0, 2});
  EXPECT_THAT(plan.send_rows, ElementsAre(5, 2));
  EXPECT_THAT(plan.receive_rows, ElementsAre(5, 2));
  EXPECT_THAT(plan.expert_idx, ElementsAre(0, 0, 1, 1, 1, 1, 1));
}

TEST(DispatchPlan, RefusesWhatCannotWork) {
  const auto message_of = [](const DispatchPlanSpec& spec) -> std::string {
    try {
      make_dispatch_plan(spec);
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message_of({.first_experts = {0, 2, 2}}), HasSubstr("begin at 0, 2, 2"));
  EXPECT_THAT(message_of({.first_experts = {0, 2}, .ep_rank = 1}),
              HasSubstr("rank 1, 0 is not among 1 x 1"));
  EXPECT_THROW(run({.max_received = 2, .max_gathered = 2}, {3}), InternalError) << "too many rows";
  EXPECT_THROW(run({.max_received = 2, .max_gathered = 2}, {-1}), InternalError);
  EXPECT_THROW(run({.max_received = 2, .max_gathered = 2}, {1, 1}), UserError) << "two experts";
}

}  // namespace
}  // namespace tessera
