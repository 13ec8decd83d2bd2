#include "train/plan/choose_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "core/file/file.h"
#include "ops/registry/cpu_kernels.h"
#include "train/plan/plan_testing.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::settings_to_plan;
using testing::small_machine;
using ::testing::ThrowsMessage;

/// Ranks of experts, whose tokens take a good part of the step.
Hardware slow_links() {
  Hardware hardware = small_machine();
  hardware.node.gbs = 0.5;
  return hardware;
}

TEST(ChooseSchedule, MergesWhereExchangesTakeTime) {
  const Settings settings = settings_to_plan({"--parallel.ep=4", "--train.schedule=auto"});
  const ScheduleChoice slow = choose_schedule(settings, 4, slow_links());
  EXPECT_EQ(slow.schedule, "merged");
  EXPECT_LT(slow.merged_seconds, slow.as_built_seconds);
  EXPECT_THAT(describe(slow), HasSubstr("schedule merged, simulated on small"));
  Hardware fast = small_machine();
  fast.node = {.microseconds = 0.01, .gbs = 1e5};
  EXPECT_EQ(choose_schedule(settings, 4, fast).schedule, "as_built");
}

TEST(ChooseSchedule, IsWhatTheClockSays) {
  const std::vector<std::string> layout = {"--parallel.ep=2", "--parallel.pp=2"};
  const ScheduleChoice choice = choose_schedule(settings_to_plan(layout), 4, slow_links());
  const StepWork work(slow_links());
  std::vector<std::string> merged = layout;
  merged.emplace_back("--train.schedule=merged");
  EXPECT_EQ(choice.as_built_seconds, simulate_step(settings_to_plan(layout), 4, work, 0).seconds);
  EXPECT_EQ(choice.merged_seconds, simulate_step(settings_to_plan(merged), 4, work, 0).seconds);
}

TEST(ChooseSchedule, KeepsPassesApartWhereTheyMustBe) {
  const ScheduleChoice refused = choose_schedule(
      settings_to_plan({"--parallel.ep=4", "--optim.gradients=bf16"}), 4, slow_links());
  EXPECT_EQ(refused.schedule, "as_built");
  EXPECT_TRUE(std::isinf(refused.merged_seconds));
  EXPECT_THAT(describe(refused), HasSubstr("optim.gradients"));
}

TEST(ChooseSchedule, HasHardwareOnlyWhereItIsNamed) {
  const Backend host = make_cpu_kernels();
  EXPECT_FALSE(choose_schedule(settings_to_plan({"--train.schedule=merged"}), 4, host));
  Settings settings = settings_to_plan({"--parallel.ep=4", "--train.schedule=auto"});
  const auto unknown = choose_schedule(settings, 4, host);
  ASSERT_TRUE(unknown);
  EXPECT_EQ(unknown->schedule, "as_built");
  EXPECT_THAT(describe(*unknown), HasSubstr("train.hardware"));

  const testing::TemporaryFolder folder;
  settings.train.hardware = folder.file("slow.toml");
  replace_file(settings.train.hardware, write_hardware(slow_links()));
  EXPECT_EQ(apply_schedule(settings, 4, host)->schedule, "merged");
  EXPECT_EQ(settings.train.schedule, "merged");

  settings = settings_to_plan({"--train.schedule=auto", "--train.hardware=h100-ib"});
  EXPECT_EQ(choose_schedule(settings, 1, host)->schedule, "as_built") << "one rank";
  EXPECT_THAT([&] { choose_schedule(settings, 4, host); },
              ThrowsMessage<UserError>(HasSubstr("h100-ib")));
}

}  // namespace
}  // namespace tessera
