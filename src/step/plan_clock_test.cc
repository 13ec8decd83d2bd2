#include "step/plan_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "step/build/reorder_plan.h"
#include "step/plan_testing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::small_plan;
using ::testing::ThrowsMessage;

/// Programs take `seconds`, messages 0.5 and sums 2.
PlanWork work_of(const StepPlan& plan, double seconds) {
  PlanWork work;
  for (const Task& task : plan.tasks) {
    double own = 0;
    if (task.kind == TaskKind::kRun) own = seconds;
    if (task.phase == TaskPhase::kStart) own = task.kind == TaskKind::kExchange ? 2 : 0.5;
    work.add({.seconds = own});
  }
  return work;
}

std::vector<RankClock> run_small(double first, double second) {
  const std::vector<StepPlan> plans = {small_plan(0), small_plan(1)};
  const std::vector<PlanWork> works = {work_of(plans[0], first), work_of(plans[1], second)};
  return run_clocks(plans, works);
}

TEST(PlanClock, RanksWaitForEachOther) {
  // Rank 0 computes to 3 and sends to 3.5; rank 1 computes from there to 4.5; both sum to 6.5.
  const std::vector<RankClock> clocks = run_small(3, 1);
  EXPECT_DOUBLE_EQ(clocks[0].end, 6.5);
  EXPECT_DOUBLE_EQ(clocks[1].end, 6.5);
  EXPECT_DOUBLE_EQ(clocks[0].computed, 3);
  EXPECT_DOUBLE_EQ(clocks[0].waited_for_wires.at("pp"), 0.5);
  EXPECT_DOUBLE_EQ(clocks[0].waited_for_ranks.at("dp"), 1);
  EXPECT_DOUBLE_EQ(clocks[0].waited_for_wires.at("dp"), 2);
  EXPECT_DOUBLE_EQ(clocks[1].waited_for_ranks.at("pp"), 3);
  EXPECT_DOUBLE_EQ(clocks[1].waited_for_wires.at("pp"), 0.5);
  EXPECT_FALSE(clocks[1].waited_for_ranks.contains("dp"));
  EXPECT_DOUBLE_EQ(clocks[0].exchanged.at("dp"), 2);
}

TEST(PlanClock, RanksThatComputeAtATimeShareProcessors) {
  const std::vector<StepPlan> plans = {small_plan(0), small_plan(1)};
  const std::vector<PlanWork> works = {work_of(plans[0], 3), work_of(plans[1], 1)};
  // Never at the same time: as with processors of their own.
  for (const RankClock& clock : run_clocks(plans, works, {.processor_share = 0.5}))
    EXPECT_DOUBLE_EQ(clock.end, 6.5);
  // A third of a processor each: of two, one alone computes with two thirds of one.
  const std::vector<RankClock> slow = run_clocks(plans, works, {.processor_share = 1.0 / 3});
  EXPECT_DOUBLE_EQ(slow[0].computed, 4.5);
  EXPECT_DOUBLE_EQ(slow[1].computed, 1.5);
  EXPECT_DOUBLE_EQ(slow[1].end, 4.5 + 0.5 + 1.5 + 2);
}

TEST(PlanClock, SharesComeToTheWhole) {
  for (const double first : {0.0, 1.0, 7.0}) {
    for (const RankClock& clock : run_small(first, 2)) {
      double sum = clock.computed + clock.waited_for_copies;
      for (const auto& [lane, seconds] : clock.waited_for_ranks) sum += seconds;
      for (const auto& [lane, seconds] : clock.waited_for_wires) sum += seconds;
      EXPECT_DOUBLE_EQ(sum, clock.end);
    }
  }
}

/// A program that starts an exchange of a second, computes beside it, and waits.
TaskWork overlapped(double beside) {
  ProgramTimes program;
  program.groups = {{"ep", {0, 1}}};
  using Kind = ProgramMoment::Kind;
  program.moments = {{.kind = Kind::kCompute, .seconds = 1},
                     {.kind = Kind::kStart, .seconds = 1, .exchange = 0, .group = 0},
                     {.kind = Kind::kCompute, .seconds = beside},
                     {.kind = Kind::kWait, .exchange = 0}};
  return {.program = std::make_shared<const ProgramTimes>(std::move(program))};
}

std::vector<RankClock> run_programs(const TaskWork& first, const TaskWork& second, double share,
                                    double processor_share = 1) {
  std::vector<StepPlan> plans(2);
  std::vector<PlanWork> works(2);
  for (size_t i = 0; i < 2; ++i) {
    plans[i].rank = static_cast<int64_t>(i);
    const LaneId compute = plans[i].lanes.add({LaneKind::kCompute, "compute"});
    plans[i].tasks.add({.kind = TaskKind::kRun,
                        .action = TaskAction::kRunProgram,
                        .lane = compute,
                        .name = "run"});
    works[i].add(i == 0 ? first : second);
  }
  return run_clocks(plans, works, {.exchange_share = share, .processor_share = processor_share});
}

TEST(PlanClock, WhoJoinsAndLeavesASharedProcessorChangesTheOthersSpeed) {
  // Both compute 1 to 2, and what is beside the exchange: 1 to 4, while 2 of 3 are left to the
  // other, alone.
  const auto clocks = run_programs(overlapped(1), overlapped(3), 0, 0.5);
  EXPECT_DOUBLE_EQ(clocks[0].end, 4);
  EXPECT_DOUBLE_EQ(clocks[1].end, 6);
  EXPECT_DOUBLE_EQ(clocks[0].computed, 4);
  EXPECT_DOUBLE_EQ(clocks[1].computed, 6);
}

TEST(PlanClock, ExchangesAreHiddenUnderWhatIsBesideThem) {
  const auto exposed = run_programs(overlapped(0.25), overlapped(0.25), 0);
  EXPECT_DOUBLE_EQ(exposed[0].end, 2);
  EXPECT_DOUBLE_EQ(exposed[0].waited_for_wires.at("ep"), 0.75);
  const auto hidden = run_programs(overlapped(3), overlapped(3), 0);
  EXPECT_DOUBLE_EQ(hidden[0].end, 4);
  EXPECT_TRUE(hidden[0].waited_for_wires.empty());
  EXPECT_DOUBLE_EQ(hidden[0].exchanged.at("ep"), 1);
}

TEST(PlanClock, ExchangesTakeAShareOfTheDevice) {
  // The second rank knows when the exchange begins: as it starts it.
  const RankClock clock = run_programs(overlapped(3), overlapped(3), 0.25)[1];
  EXPECT_DOUBLE_EQ(clock.end, 4.25);
  EXPECT_DOUBLE_EQ(clock.computed, 4.25);
}

/// A rank by itself whose program starts exchanges of two groups of four seconds each, computes for
/// `beside` seconds, and waits for both.
RankClock run_two_groups(LinkKind first, LinkKind second, double beside,
                         std::vector<std::string> exposed = {}) {
  using Kind = ProgramMoment::Kind;
  ProgramTimes program;
  program.groups = {{"ep_inner", {0, 1}}, {"experts", {0, 1}}};
  program.moments = {
      {.kind = Kind::kStart, .seconds = 4, .exchange = 0, .group = 0, .link = first},
      {.kind = Kind::kStart, .seconds = 4, .exchange = 1, .group = 1, .link = second},
      {.kind = Kind::kCompute, .seconds = beside},
      {.kind = Kind::kWait, .exchange = 0},
      {.kind = Kind::kWait, .exchange = 1}};
  StepPlan plan;
  const LaneId compute = plan.lanes.add({LaneKind::kCompute, "compute"});
  plan.tasks.add(
      {.kind = TaskKind::kRun, .action = TaskAction::kRunProgram, .lane = compute, .name = "run"});
  PlanWork work;
  work.add({.program = std::make_shared<const ProgramTimes>(std::move(program))});
  return run_clocks({&plan, 1}, {&work, 1}, {.exposed = std::move(exposed)}).front();
}

TEST(PlanClock, GroupsOfARankShareItsLinks) {
  const RankClock apart = run_two_groups(LinkKind::kNode, LinkKind::kNetwork, 1);
  EXPECT_DOUBLE_EQ(apart.end, 4);
  const RankClock shared = run_two_groups(LinkKind::kNode, LinkKind::kNode, 1);
  EXPECT_DOUBLE_EQ(shared.end, 8);
  EXPECT_DOUBLE_EQ(shared.computed, 1);
  EXPECT_DOUBLE_EQ(shared.waited_for_wires.at("ep_inner"), 7);
  EXPECT_DOUBLE_EQ(run_two_groups(LinkKind::kNode, LinkKind::kNode, 9).end, 9);
}

TEST(PlanClock, NothingIsComputedBesideExposedExchanges) {
  const LinkKind node = LinkKind::kNode;
  const RankClock one = run_two_groups(node, LinkKind::kNetwork, 3, {"ep"});
  EXPECT_DOUBLE_EQ(one.end, 4 + 4);  // the other begins behind it
  EXPECT_DOUBLE_EQ(one.waited_for_wires.at("ep_inner"), 4);
  EXPECT_DOUBLE_EQ(one.waited_for_wires.at("experts"), 1);
  const RankClock both = run_two_groups(node, LinkKind::kNetwork, 3, {"ep", "experts"});
  EXPECT_DOUBLE_EQ(both.end, 4 + 4 + 3);
  // "ep" is no beginning of "experts", nor "exp" a name.
  EXPECT_DOUBLE_EQ(run_two_groups(node, LinkKind::kNetwork, 3, {"exp"}).end, 4);
}

/// A rank whose program computes for a second, what its host takes `host` for, then waits on the
/// host where told, and again computes for three seconds in one operator and one in another.
RankClock run_launched(double host, bool waits) {
  using Kind = ProgramMoment::Kind;
  ProgramTimes program;
  program.moments = {
      {.kind = Kind::kCompute, .seconds = 1, .host_seconds = host, .launched_seconds = host + 1},
      {.kind = Kind::kCompute,
       .seconds = 4,
       .host_seconds = 2 * host,
       .launched_seconds = std::max(host + 3, 2 * host) + 1}};
  if (waits) program.moments.insert(program.moments.begin() + 1, {.kind = Kind::kHostWait});
  StepPlan plan;
  const LaneId compute = plan.lanes.add({LaneKind::kCompute, "compute"});
  plan.tasks.add(
      {.kind = TaskKind::kRun, .action = TaskAction::kRunProgram, .lane = compute, .name = "run"});
  PlanWork work;
  work.add({.program = std::make_shared<const ProgramTimes>(std::move(program))});
  return run_clocks({&plan, 1}, {&work, 1}).front();
}

TEST(PlanClock, DevicesWaitForWhatTheHostGivesThem) {
  EXPECT_DOUBLE_EQ(run_launched(0, false).end, 5);
  EXPECT_DOUBLE_EQ(run_launched(0, false).waited_for_host, 0);
  // The first operator comes after half a second; the others come while it is computed.
  const RankClock ahead = run_launched(0.5, false);
  EXPECT_DOUBLE_EQ(ahead.end, 5.5);
  EXPECT_DOUBLE_EQ(ahead.waited_for_host, 0.5);
  EXPECT_DOUBLE_EQ(ahead.computed, 5);
  // A host that is slower than the device: its three operators' times, and the last is computed.
  EXPECT_DOUBLE_EQ(run_launched(10, false).end, 31);
}

TEST(PlanClock, HostsThatWaitForTheDeviceGiveNothingAhead) {
  EXPECT_DOUBLE_EQ(run_launched(0.5, true).end, 6);
  EXPECT_DOUBLE_EQ(run_launched(0.5, true).waited_for_host, 1);
}

/// Gradients to the host, its update, and weights back, for which the next step waits.
struct HostUpdate {
  StepPlan plan;
  PlanWork work;

  explicit HostUpdate(double compute, double update) {
    const LaneId device = plan.lanes.add({LaneKind::kCompute, "compute"});
    const LaneId lanes[] = {plan.lanes.add({LaneKind::kStores, "stores"}),
                            plan.lanes.add({LaneKind::kHostUpdates, "host updates"}),
                            plan.lanes.add({LaneKind::kReloads, "reloads"})};
    const double seconds[] = {0.5, update, 0.25};
    add({.kind = TaskKind::kRun, .lane = device, .name = "first pass"}, 2);
    const TaskId wait = add({.phase = TaskPhase::kWait, .lane = lanes[2], .name = "wait"}, 0);
    add({.kind = TaskKind::kRun, .lane = device, .name = "passes"}, compute);
    TaskId last{};
    for (size_t i = 0; i < 3; ++i) {
      std::vector<TaskId> after;
      if (i > 0) after = {last};
      last = add({.phase = TaskPhase::kStart, .lane = lanes[i], .name = "part", .after = after},
                 seconds[i]);
    }
    plan.tasks[wait].started_by = last;
  }
  TaskId add(Task task, double seconds) {
    work.add({.seconds = seconds});
    return plan.tasks.add(std::move(task));
  }
  RankClock run(bool beside = true) const {
    return run_clocks({&plan, 1}, {&work, 1}, {.updates_beside = beside}).front();
  }
};

TEST(PlanClock, StepsAreLongerByWhatTheHostHasNotUpdatedInTime) {
  const RankClock hidden = HostUpdate(3, 1).run();
  EXPECT_DOUBLE_EQ(hidden.end, 5);
  EXPECT_DOUBLE_EQ(hidden.waited_for_copies, 0);
  const HostUpdate slow(3, 7);
  const RankClock waits = slow.run();
  EXPECT_DOUBLE_EQ(waits.times[TaskId{4}].begin, 5.5);
  EXPECT_DOUBLE_EQ(waits.times[TaskId{5}].end, 12.75);
  // The next step's first pass runs beside; its wait ends at 12.75, 5.75 later than it begins.
  EXPECT_DOUBLE_EQ(waits.end, 5 + 5.75);
  EXPECT_DOUBLE_EQ(waits.waited_for_copies, 5.75);
  // Processors that compute do nothing beside.
  EXPECT_DOUBLE_EQ(slow.run(false).end, 5 + 7);
  EXPECT_DOUBLE_EQ(slow.run(false).computed, 5 + 7);
}

TEST(PlanClock, NamesRanksThatWaitForever) {
  // Rank 0 sums before it sends, and rank 1 after it has received.
  const StepPlan plan = small_plan(0);
  const std::vector<StepPlan> plans = {
      reorder(plan, {TaskId{0}, TaskId{2}, TaskId{4}, TaskId{1}, TaskId{3}}), small_plan(1)};
  const std::vector<PlanWork> works = {work_of(plans[0], 1), work_of(plans[1], 1)};
  EXPECT_THAT([&] { run_clocks(plans, works); },
              ThrowsMessage<InternalError>(AllOf(HasSubstr("ranks wait forever"),
                                                 HasSubstr("rank 0 at 'wait: sum'"),
                                                 HasSubstr("rank 1 at 'wait: receive hidden'"))));
}

}  // namespace
}  // namespace tessera
