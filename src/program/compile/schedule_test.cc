#include "program/compile/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/thread/thread_world.h"
#include "ops/registry/cpu_kernels.h"
#include "program/dependencies.h"
#include "program/memory_plan.h"
#include "program/testing/program_testing.h"
#include "program/testing/random_program.h"
#include "program/testing/tp_block_testing.h"

namespace tessera {
namespace {

KernelTable kernels() {
  KernelTable table = make_cpu_kernels();
  table["slow_copy"] = testing::slow_copy_kernel(testing::start_slow_copy);
  return table;
}

std::vector<std::string> operator_names(const Program& program) {
  std::vector<std::string> names;
  for (const Node& node : program.nodes()) names.emplace_back(node.op->name());
  return names;
}

/// Nodes between the starts and the waits of exchanges, added up.
int64_t count_overlap(const Program& program) {
  const std::vector<int> waits = find_waits(program);
  int64_t total = 0;
  for (size_t i = 0; i < waits.size(); ++i) total += waits[i] - static_cast<int64_t>(i) - 1;
  return total;
}

TEST(Schedule, RandomProgramsKeepDependenciesBitsAndMemory) {
  Random random(11, 0);
  const KernelTable table = kernels();
  int64_t overlap_before = 0;
  int64_t overlap_after = 0;
  for (int round = 0; round < 150; ++round) {
    const Program program =
        testing::make_random_program(random, 1 + static_cast<int64_t>(random.next_below(40)));
    const double growth = round % 3 == 0 ? 0.0 : 0.3 * (round % 3);
    const std::vector<int> order = find_schedule(program, {}, {.memory_growth = growth});
    std::vector<int> place(order.size());
    for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<int>(i);
    const auto dependencies = find_dependencies(program);
    for (size_t node = 0; node < order.size(); ++node) {
      for (const int before : dependencies[node]) EXPECT_LT(place[before], place[node]);
    }
    const Program scheduled = program.reordered(order);
    EXPECT_EQ(testing::run_on_noise(scheduled, table), testing::run_on_noise(program, table))
        << "round " << round;
    EXPECT_LE(static_cast<double>(plan_memory(scheduled, {}).transient_bytes),
              static_cast<double>(plan_memory(program, {}).transient_bytes) * (1 + growth));
    overlap_before += count_overlap(program);
    overlap_after += count_overlap(scheduled);
  }
  EXPECT_GT(overlap_after, 2 * overlap_before);
}

TEST(Schedule, AProgramWithoutExchangesStaysAsItIs) {
  Program program("local");
  const ValueId x = program.add_input("x", {DType::kF32, {2, 2}});
  const ValueId a = program.add1(make_add(), {x, x}, "a");
  program.set_outputs({program.add1(make_add(), {a, x}, "b")});
  EXPECT_EQ(find_schedule(program, {}), (std::vector<int>{0, 1}));
}

/// The products for the weights' gradients wait for the reduce-scatter to be started, and hide it.
TEST(Schedule, WeightGradientsStandBetweenAReduceScatterAndItsFirstUse) {
  const testing::TpBlock block(make_single_communicator("tp"), 32, 16, 48);
  const Program backward = differentiate(block.program, block.request()).program;
  EXPECT_THAT(operator_names(backward),
              ::testing::ElementsAre("all_gather", "linear_dgrad", "linear_wgrad",
                                     "activation_backward", "linear_dgrad", "linear_wgrad",
                                     "reduce_scatter", "rmsnorm_backward", "add"));
  const Program frugal = schedule(backward, {});
  EXPECT_EQ(plan_memory(frugal, {}).transient_bytes, plan_memory(backward, {}).transient_bytes);
  const auto names = operator_names(frugal);
  const auto start = std::ranges::find(names, "reduce_scatter");
  EXPECT_EQ(std::count(start, names.end(), "linear_wgrad"), 1);
  EXPECT_EQ(*(start + 1), "linear_wgrad");

  const Program generous = schedule(backward, {}, {.memory_growth = 0.5});
  EXPECT_THAT(operator_names(generous),
              ::testing::ElementsAre("all_gather", "linear_dgrad", "activation_backward",
                                     "linear_dgrad", "reduce_scatter", "linear_wgrad",
                                     "linear_wgrad", "rmsnorm_backward", "add"));
}

/// Two chains of exchanges: the second one is started before the first is waited for.
TEST(Schedule, ExchangesOfIndependentChainsAreUnderWayTogether) {
  Program program("chains");
  const ValueType type{DType::kF32, {4, 4}};
  std::vector<ValueId> results;
  for (const char* name : {"a", "b"}) {
    const ValueId x = program.add_input(name, type);
    const ValueId made = program.add1(make_add(), {x, x}, "made");
    const ValueId sent = program.add1(std::make_shared<testing::SlowCopy>(), {made}, "sent");
    results.push_back(program.add1(make_add(), {sent, sent}, "used"));
  }
  program.set_outputs(results);
  EXPECT_EQ(find_schedule(program, {}, {.memory_growth = 10}),
            (std::vector<int>{0, 1, 3, 4, 2, 5}));
}

/// A product that does not need the large exchange is kept for it, not spent on the small one.
TEST(Schedule, ComputationIsNotSpentOnASmallExchange) {
  Program program("two sizes");
  const ValueType narrow{DType::kF32, {2048, 4}};
  const ValueType wide{DType::kF32, {2048, 2048}};
  const ValueId x = program.add_input("x", narrow);
  const ValueId weight = program.add_input("weight", narrow);
  const ValueId other = program.add_input("other", wide);
  const ValueId grad = program.add_accumulator("grad", wide);
  const ValueId small = program.add1(std::make_shared<testing::SlowCopy>(), {weight}, "small");
  program.add(std::make_shared<LinearWgrad>(), {other, other}, {}, {grad});
  const ValueId large = program.add1(make_linear(), {x, small}, "large");
  const ValueId sent = program.add1(std::make_shared<testing::SlowCopy>(), {large}, "sent");
  program.set_outputs({program.add1(make_add(), {sent, sent}, "used")});
  EXPECT_EQ(find_schedule(program, {}), (std::vector<int>{0, 2, 3, 1, 4}));
}

/// Runs the block's backward program and returns its accumulators and its gradient.
std::map<ValueId, std::vector<float>> run_backward(World& world, bool scheduled) {
  const testing::TpBlock block(world.make_world_group(), 6, 8, 12);
  const Program backward = differentiate(block.program, block.request()).program;
  const KernelTable table = make_cpu_kernels();
  return testing::run_on_noise(scheduled ? schedule(backward, {}, {.memory_growth = 1}) : backward,
                               table);
}

TEST(Schedule, TheBitsOverRanksAreTheSame) {
  for (const int64_t ranks : {2, 3}) {
    run_thread_world(ranks, [](World& world) {
      EXPECT_EQ(run_backward(world, true), run_backward(world, false));
    });
  }
}

}  // namespace
}  // namespace tessera
