// Runs whose forward passes are merged with backward passes, beside runs with one behind the other.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "core/error.h"
#include "step/check_plan.h"
#include "train/state/planned_rank.h"
#include "train/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

/// Runs that were cut, of which others stand between the parts.
int64_t count_parts(const StepPlan& plan) {
  return std::ranges::count_if(plan.tasks,
                               [](const Task& task) { return !task.subject.part.is_first(); });
}

class MergedPasses : public ::testing::TestWithParam<NamedLayout> {
 protected:
  Settings settings() const {
    Settings settings = testing::settings_for_layouts(folder_.file(""));
    settings.train.global_batch *= 2;
    settings.run.resume = ResumeMode::kNever;
    settings.run.folder = folder_.file("run");
    return settings;
  }

  const TemporaryFolder folder_;
};

/// On a device that spoils what is under way, too.
TEST_P(MergedPasses, GiveTheBitsOfPassesOneBehindTheOther) {
  if (GetParam().shard.scope == ShardScope::kFull) GTEST_SKIP() << "refused";
  const RunEnd apart = testing::run_steps(settings(), GetParam(), 2, false);
  Settings merged = settings();
  merged.train.schedule = StepSchedule::kMerged;
  testing::expect_same_end(testing::run_steps(merged, GetParam(), 2, false), apart);
  testing::expect_same_end(testing::run_steps(merged, GetParam(), 2, false, testing::choose_shadow),
                           apart);
}

INSTANTIATE_TEST_SUITE_P(
    All, MergedPasses,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 0)),
    [](const auto& info) { return info.param.name; });

/// Pipelines, interleaved and not, recomputation, prediction, any exchange of tokens.
TEST(RandomMergedPasses, GiveTheBitsOfPassesOneBehindTheOther) {
  const TemporaryFolder folder;
  int64_t num_parts = 0;
  for (uint64_t seed = 1501; seed < 1501 + testing::share_of_count<uint64_t>(20); ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 6);
    Settings& settings = layout.settings;
    testing::merge_passes(settings);
    testing::prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    const NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    num_parts += count_parts(plan_step(settings, plan_rank(settings, 0, layout.num_ranks)));
    const RunEnd merged = testing::run_steps(settings, named, 2, false);
    settings.train.schedule = StepSchedule::kAsBuilt;
    testing::expect_same_end(testing::run_steps(settings, named, 2, false), merged);
  }
  EXPECT_GT(num_parts, 0);
}

Settings spread_experts() {
  Settings settings = without_data({});
  settings.model.vocab_size = 64;
  settings.model.hidden_size = 32;
  settings.model.num_layers = 3;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 16};
  settings.data.sequence_length = 16;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 8;
  settings.train.schedule = StepSchedule::kMerged;
  settings.run.device = DeviceChoice::kCpu;
  settings.parallel.layout.ep = 2;
  return settings;
}

/// Each run has all of its nodes once, in order, whatever stands between its parts.
TEST(MergedPlan, PartsOfARunFollowEachOther) {
  const Settings settings = spread_experts();
  const StepPlan plan = plan_step(settings, plan_rank(settings, 0, 2));
  using Key = std::tuple<ProgramPart, PassDirection, int64_t, int64_t>;
  std::map<Key, int> next;
  int64_t num_interrupted = 0;
  Key before;
  for (const Task& task : plan.tasks) {
    if (task.action != TaskAction::kRunProgram) continue;
    const ProgramRef& ref = task.subject.program;
    const Key key{ref.part, ref.direction, ref.idx, task.subject.micro_batch};
    EXPECT_EQ(task.subject.part.begin, next[key]) << task.name;
    next[key] = task.subject.part.end;
    if (!task.subject.part.is_first() && key != before) ++num_interrupted;
    before = key;
  }
  for (const auto& [key, end] : next) EXPECT_EQ(end, RunPart::kToTheEnd);
  EXPECT_GT(num_interrupted, 20);
}

/// Ranks whose experts differ in size take as long as they like, and come to one order.
TEST(MergedPlan, RanksOfUnequalExpertsFitTogether) {
  Settings settings = spread_experts();
  settings.model.moe.inner_sizes = {2048, 2048, 8, 8};
  std::vector<StepPlan> plans;
  for (int64_t rank = 0; rank < 2; ++rank)
    plans.push_back(plan_step(settings, plan_rank(settings, rank, 2)));
  EXPECT_NO_THROW(check_ranks(plans));
  ASSERT_EQ(plans[0].tasks.size(), plans[1].tasks.size());
  for (const TaskId id : plans[0].tasks.ids())
    EXPECT_EQ(plans[0].tasks[id].name, plans[1].tasks[id].name);
}

void expect_refused(void (*change)(Settings&), const std::string& key) {
  Settings settings = without_data({});
  settings.data.tokens = "tokens";
  settings.train.steps = 10;
  settings.schedule.num_steps = 10;
  settings.train.schedule = StepSchedule::kMerged;
  validate(settings);
  change(settings);
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(
                  ::testing::AllOf(HasSubstr("train.schedule = \"merged\""), HasSubstr(key))));
}

TEST(MergedSettings, WhatIsPlannedForPassesApartIsRefused) {
  using S = Settings;
  expect_refused([](S& s) { s.parallel.split_weights = true; }, "parallel.split_weights");
  expect_refused([](S& s) { s.parallel.schedule = PipelineKind::kGpipe; },
                 "parallel.pipeline_schedule");
  expect_refused([](S& s) { s.shard.scope = ShardScope::kFull; }, "optim.shard");
  expect_refused([](S& s) { s.shard.gradients = DType::kBF16; }, "optim.gradients");
  expect_refused([](S& s) { s.train.offload = {"all"}; }, "train.offload");
  expect_refused(
      [](S& s) {
        s.shard.release_gradients = true;
        s.train.max_grad_norm = 0;
      },
      "optim.release_gradients");
}

}  // namespace
}  // namespace tessera
