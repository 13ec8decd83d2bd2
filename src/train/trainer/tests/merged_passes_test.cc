// Runs whose forward passes are merged with backward passes, beside runs with one behind the other.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "core/error.h"
#include "core/file/file.h"
#include "core/random.h"
#include "core/testing/case_share.h"
#include "parallel/pipeline_order.h"
#include "step/check_plan.h"
#include "train/memory/planned_rank.h"
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
  merged.train.schedule = "merged";
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
    settings.train.schedule = kAsBuilt;
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
  settings.train.schedule = "merged";
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
  settings.train.schedule = "merged";
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

/// The first layout that has stages.
NamedLayout two_stages(int64_t chunks) {
  NamedLayout layout{"stages", 2, {}, {}};
  layout.parallel.layout.pp = 2;
  layout.parallel.chunks_per_stage = chunks;
  if (chunks > 1) layout.parallel.schedule = PipelineKind::kInterleaved;
  return layout;
}

/// Orders that the program does not have itself: as late as can be, and of merged passes.
TEST(ScheduleFile, GivesTheBitsOfPassesAsBuilt) {
  const TemporaryFolder folder;
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder.file("run");
  settings.train.global_batch = 4 * settings.train.micro_batch;
  settings.model.mtp_layers = 0;  // its embedding is the head's weight, of the same stage
  const NamedLayout layout = two_stages(1);
  const RunEnd as_built = testing::run_steps(settings, layout, 2, false);
  settings.train.schedule = folder.file("order");
  for (const char* text : {"stage 0 F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3\n"
                           "stage 1 F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3\n",
                           "stage 0 F0.0 F0.1 F0.2 F0.3|B0.0 B0.1 B0.2 B0.3\n"
                           "stage 1 F0.0 F0.1|B0.0 F0.2|B0.1 B0.2 F0.3 B0.3\n"}) {
    replace_file(settings.train.schedule, text);
    testing::expect_same_end(testing::run_steps(settings, layout, 2, false), as_built);
    testing::expect_same_end(testing::run_steps(settings, layout, 2, false, testing::choose_shadow),
                             as_built);
  }
}

/// With chunks, and weight gradients by themselves.
TEST(ScheduleFile, TakesWhatInspectLists) {
  const TemporaryFolder folder;
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder.file("run");
  settings.model.num_layers = 4;
  settings.train.global_batch = 4 * settings.train.micro_batch;
  for (const bool split : {false, true}) {
    NamedLayout layout = two_stages(2);
    layout.parallel.split_weights = split;
    settings.train.schedule = kAsBuilt;
    const RunEnd as_built = testing::run_steps(settings, layout, 2, false);
    settings.train.schedule = folder.file("order");
    replace_file(settings.train.schedule,
                 list_pipeline(make_pipeline_schedule({.kind = PipelineKind::kInterleaved,
                                                       .num_stages = 2,
                                                       .num_chunks = 2,
                                                       .num_micro_batches = 4,
                                                       .split_weights = split})));
    testing::expect_same_end(testing::run_steps(settings, layout, 2, false), as_built);
  }
}

/// Each stage's passes in any order of its own, now and then merged.
PipelineOrder draw_order(Random& random, const PipelineSpec& spec) {
  PipelineOrder order(spec.num_stages);
  for (std::vector<PipelineStep>& steps : order) {
    int64_t forward = 0;
    for (int64_t backward = 0; backward < spec.num_micro_batches;) {
      const bool may_run_backward = backward < forward;
      if (forward < spec.num_micro_batches && (!may_run_backward || random.next_below(2) == 0)) {
        steps.push_back({PipelinePass::kForward, 0, forward});
        if (!may_run_backward || random.next_below(2) == 0) {
          ++forward;
          continue;
        }
        ++forward;
        steps.back().merged = true;
      }
      steps.push_back({PipelinePass::kBackward, 0, backward++});
    }
  }
  return order;
}

/// The plans of all ranks fit together, whatever order of the file passes the check.
TEST(ScheduleFile, OrdersThatPassFitTogether) {
  const TemporaryFolder folder;
  Settings settings = spread_experts();
  settings.parallel.layout = {.ep = 2, .pp = 2};
  settings.model.num_layers = 4;
  settings.train.schedule = folder.file("order");
  const PipelineSpec spec{.num_stages = 2, .num_micro_batches = 4};
  Random random(11, 0);
  int64_t num_taken = 0;
  for (int i = 0; i < 200; ++i) {
    const PipelineOrder order = draw_order(random, spec);
    try {
      check_pipeline(spec, order, "order");
    } catch (const UserError&) {
      continue;
    }
    ++num_taken;
    replace_file(settings.train.schedule, list_pipeline(order));
    std::vector<StepPlan> plans;
    for (int64_t rank = 0; rank < 4; ++rank)
      plans.push_back(plan_step(settings, plan_rank(settings, rank, 4)));
    EXPECT_NO_THROW(check_ranks(plans)) << list_pipeline(order);
  }
  EXPECT_GT(num_taken, 5);
}

TEST(ScheduleFile, RefusesWhatIsNone) {
  Settings settings = spread_experts();
  settings.train.schedule = "mergd";
  EXPECT_THAT([&] { plan_rank(settings, 0, 2); },
              ThrowsMessage<UserError>(
                  ::testing::AllOf(HasSubstr("\"mergd\""), HasSubstr("did you mean 'merged'"))));
}

}  // namespace
}  // namespace tessera
