#include "step/check_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "step/build/reorder_plan.h"
#include "step/plan_testing.h"
#include "step/print_plan.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::small_plan;

/// What a check throws; "" where it does not.
template <typename Check>
std::string message_of(const Check& check) {
  try {
    check();
    return "";
  } catch (const InternalError& error) {
    return error.what();
  }
}
std::string message_of(const StepPlan& plan) {
  return message_of([&] { check_plan(plan); });
}
std::string message_of(const StepPlan& first, const StepPlan& second) {
  return message_of([&] { check_ranks(std::vector{first, second}); });
}

TaskId at(int32_t idx) {
  return TaskId{idx};
}

TEST(CheckPlan, TakesWhatIsRight) {
  EXPECT_EQ(message_of(small_plan(0), small_plan(1)), "");
  EXPECT_EQ(message_of(StepPlan()), "");
}

TEST(CheckPlan, FindsAReaderInFrontOfItsWriter) {
  const StepPlan plan = small_plan(0);
  EXPECT_THAT(message_of(reorder(plan, {at(1), at(0), at(2), at(3), at(4)})),
              AllOf(HasSubstr("'send hidden' reads 'hidden'"), HasSubstr("nothing has written")));
  const StepPlan second = small_plan(1);
  EXPECT_THAT(message_of(reorder(second, {at(0), at(2), at(1), at(3), at(4)})),
              AllOf(HasSubstr("'forward' reads 'hidden'"), HasSubstr("is under way")));
}

TEST(CheckPlan, FindsWhatIsTouchedDuringItsExchange) {
  StepPlan plan = small_plan(0);
  Task task = plan.tasks[at(0)];
  task.name = "too early";
  const TaskId added = plan.tasks.add(task);
  EXPECT_THAT(message_of(reorder(plan, {at(0), at(1), added, at(2), at(3), at(4)})),
              HasSubstr("'too early' writes 'hidden' while 'send hidden' is under way"));
  EXPECT_EQ(message_of(plan), "");
}

TEST(CheckPlan, FindsWhatIsOverwrittenEarly) {
  StepPlan plan = small_plan(0);
  const BufferId other =
      plan.buffers.add({"other", 32, plan.buffers[plan.tasks[at(0)].writes[0]].storage});
  const TaskId added =
      plan.tasks.add({.kind = TaskKind::kRun, .name = "overwrite", .writes = {other}});
  EXPECT_EQ(message_of(plan), "");
  EXPECT_THAT(message_of(reorder(plan, {at(0), added, at(1), at(2), at(3), at(4)})),
              AllOf(HasSubstr("'overwrite' overwrites 'hidden' with 'other'"),
                    HasSubstr("its last reader 'wait: send hidden'")));
}

TEST(CheckPlan, FindsBuffersThatDoNotFit) {
  StepPlan plan = small_plan(0);
  plan.buffers[plan.tasks[at(0)].writes[0]].bytes = 65;
  EXPECT_THAT(message_of(plan), HasSubstr("'hidden' of 65 bytes is in 'stream', which has 64"));
}

TEST(CheckPlan, FindsStoragesThatShareMemory) {
  StepPlan plan = small_plan(0);
  StepStorage storage{"placed", 64, Purpose::kSaved, Home::kDevice, 0};
  const StorageId first = plan.storages.add(storage);
  storage.offset = 32;
  const StorageId second = plan.storages.add(storage);
  const BufferId one = plan.buffers.add({"one", 64, first});
  const BufferId other = plan.buffers.add({"other", 64, second});
  plan.tasks[at(0)].writes.push_back(one);
  plan.tasks.add({.kind = TaskKind::kRun, .name = "later", .writes = {other}});
  EXPECT_EQ(message_of(plan), "");
  plan.tasks.add({.kind = TaskKind::kRun, .name = "last", .reads = {one}});
  EXPECT_THAT(message_of(plan), HasSubstr("'one' are alive together and share memory"));
}

TEST(CheckPlan, FindsExchangesThatNobodyWaitsFor) {
  StepPlan plan = small_plan(0);
  plan.tasks[at(4)].phase = TaskPhase::kWhole;
  EXPECT_THAT(message_of(plan), HasSubstr("'sum' is started and not waited for"));
  plan = small_plan(0);
  plan.tasks[at(4)].started_by = at(1);
  EXPECT_THAT(message_of(plan), HasSubstr("'send hidden' is waited for twice"));
  plan.tasks[at(4)].started_by = at(0);
  EXPECT_THAT(message_of(plan), HasSubstr("waits for nothing that a task starts"));
}

TEST(CheckPlan, FindsDependenciesTheWrongWayRound) {
  StepPlan plan = small_plan(0);
  plan.tasks[at(1)].after = {at(3)};
  EXPECT_THAT(message_of(plan), HasSubstr("'send hidden' comes before 'wait: send hidden'"));
}

/// What a step starts may be waited for in the next one; until then nothing may touch it.
TEST(CheckPlan, TakesExchangesFromStepToStep) {
  const StepPlan plan = small_plan(0);
  const StepPlan carried = reorder(plan, {at(4), at(0), at(1), at(3), at(2)});
  EXPECT_EQ(message_of(carried), "");
  StepPlan touched = carried;
  const BufferId gradients = touched.tasks[at(0)].writes[0];
  const TaskId early = touched.tasks.add(
      {.kind = TaskKind::kRun, .name = "early", .reads = {gradients}, .writes = {}});
  EXPECT_THAT(message_of(reorder(touched, {early, at(0), at(1), at(2), at(3), at(4)})),
              HasSubstr("'early' reads 'gradients' while 'sum' is under way"));
}

TEST(CheckRanks, FindsOtherOrders) {
  StepPlan second = small_plan(1);
  second.tasks[at(3)].name = "another sum";
  EXPECT_THAT(message_of(small_plan(0), second),
              AllOf(HasSubstr("exchange 0 of group 'dp'"), HasSubstr("'another sum'"),
                    HasSubstr("'sum'"), HasSubstr("rank 1")));
  second.tasks[at(3)].kind = TaskKind::kHost;
  second.tasks[at(3)].lane = second.tasks[at(2)].lane;
  EXPECT_THAT(message_of(small_plan(0), second), HasSubstr("'nothing' on rank 1"));
}

TEST(CheckRanks, FindsMessagesThatDoNotMeet) {
  StepPlan second = small_plan(1);
  second.tasks[at(0)].subject.micro_batch = 1;
  EXPECT_THAT(message_of(small_plan(0), second),
              AllOf(HasSubstr("message 0 of group 'pp' from rank 0 to rank 1"),
                    HasSubstr("of micro-batch 1")));
}

TEST(CheckRanks, FindsRanksThatWaitForever) {
  // Each waits for the other's sum before it takes part in the message.
  const StepPlan first = reorder(small_plan(0), {at(0), at(2), at(4), at(1), at(3)});
  const std::string message = message_of(first, small_plan(1));
  EXPECT_THAT(message, AllOf(HasSubstr("wait forever"), HasSubstr("rank 0 at 'wait: sum'"),
                             HasSubstr("rank 1 at 'wait: receive hidden'")));
}

TEST(Reorder, RefusesWhatIsNoPermutation) {
  const StepPlan plan = small_plan(0);
  EXPECT_THROW(reorder(plan, {at(0)}), InternalError);
  EXPECT_THROW(reorder(plan, {at(0), at(0), at(1), at(2), at(3)}), InternalError);
}

TEST(StepPlan, KnowsDependenciesAndLives) {
  const StepPlan plan = small_plan(0);
  const auto dependencies = find_dependencies(plan);
  EXPECT_THAT(dependencies[at(0)], ElementsAre());
  EXPECT_THAT(dependencies[at(1)], ElementsAre(at(0)));
  EXPECT_THAT(dependencies[at(3)], ElementsAre(at(0), at(1)));
  EXPECT_THAT(dependencies[at(4)], ElementsAre(at(2)));
  const auto lives = find_lives(plan);
  EXPECT_EQ(lives[BufferId{0}].first, at(0));
  EXPECT_EQ(lives[BufferId{0}].last, at(3));
  EXPECT_EQ(lives[BufferId{1}].last, at(4));
}

TEST(StepMemory, CountsWhatIsAlive) {
  StepPlan plan = small_plan(0);
  const StorageId storage = plan.storages.add({"saved", 256, Purpose::kSaved});
  const BufferId saved = plan.buffers.add({"saved", 256, storage});
  plan.tasks.add({.kind = TaskKind::kRun, .name = "late", .writes = {saved}});
  const StepMemory memory = find_step_memory(plan);
  EXPECT_EQ(memory.slabs, 64 + 256);
  EXPECT_EQ(memory.most, 256);
  EXPECT_EQ(memory.placed, 256);
  EXPECT_EQ(plan.tasks[memory.fullest].name, "late");
  EXPECT_EQ(memory.purposes[number_of(Purpose::kHidden)].most, 64);
}

TEST(PrintPlan, IsOneLineATask) {
  const std::vector<StepPlan> plans = {small_plan(0), small_plan(1)};
  const MachineRates rates = {
      .flops = 1e12, .memory_bytes = 1e12, .link_bytes = 64e3, .exchange_seconds = 0};
  const auto times = simulate_plans(plans, rates);
  EXPECT_EQ(
      print_plan(plans[1], times[1], 100),
      "rank 1: 5 tasks, 2 buffers, estimated 6.000 ms; lanes compute, pp (2 ranks), dp (2 ranks)\n"
      " task  lane               kind           what                                              "
      "                work      bytes     at ms  after\n"
      "    0  pp                 receive start  receive hidden                                    "
      "                           64 B     2.000\n"
      "    1  pp                 receive wait   wait: receive hidden                              "
      "                                    0.000  0\n"
      "    2  compute            run            forward                                           "
      "             2 GFLOP      2 KiB     3.000  1\n"
      "    3  dp                 exchange start sum                                               "
      "                           64 B     5.000  2\n"
      "    4  dp                 exchange wait  wait: sum                                         "
      "                                    5.000  3\n");
  EXPECT_THAT(print_plan(plans[1], times[1], 3), HasSubstr("... 2 more tasks; --all prints them"));
}

}  // namespace
}  // namespace tessera
