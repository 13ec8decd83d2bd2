#include "parallel/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<PipelineSpec> random_specs(int count) {
  Random random(4, 0);
  std::vector<PipelineSpec> specs;
  for (int i = 0; i < count; ++i) {
    PipelineSpec spec;
    spec.kind = static_cast<PipelineKind>(random.next_below(3));
    spec.num_stages = 1 + static_cast<int64_t>(random.next_below(8));
    spec.num_micro_batches = 1 + static_cast<int64_t>(random.next_below(20));
    if (spec.kind == PipelineKind::kInterleaved)
      spec.num_chunks = 1 + static_cast<int64_t>(random.next_below(4));
    spec.split_weights = random.next_below(2) == 0;
    spec.merges_passes =
        spec.kind != PipelineKind::kGpipe && !spec.split_weights && random.next_below(2) == 0;
    specs.push_back(spec);
  }
  return specs;
}

std::string describe(const PipelineSpec& spec) {
  return fmt::format("kind {} stages {} chunks {} micro-batches {} split {} merges {}",
                     static_cast<int>(spec.kind), spec.num_stages, spec.num_chunks,
                     spec.num_micro_batches, spec.split_weights, spec.merges_passes);
}

TEST(PipelineSchedule, DoesEveryPassOnceAndNeverWaitsForever) {
  for (const PipelineSpec& spec : random_specs(500)) {
    SCOPED_TRACE(describe(spec));
    const auto schedule = make_pipeline_schedule(spec);
    ASSERT_EQ(std::ssize(schedule), spec.num_stages);
    for (const auto& steps : schedule) {
      std::map<std::tuple<PipelinePass, int64_t, int64_t>, int> seen;
      for (const PipelineStep& s : steps) ++seen[{s.pass, s.chunk, s.micro_batch}];
      const int64_t passes = spec.split_weights ? 3 : 2;
      EXPECT_EQ(std::ssize(seen), passes * spec.num_chunks * spec.num_micro_batches);
      for (const auto& [step, times] : seen) EXPECT_EQ(times, 1);
    }
    simulate_pipeline(spec, schedule);  // throws where a stage would wait forever
  }
}

/// Passes that are merged are of micro-batches, or chunks, that do not need each other, and once a
/// pipeline is full no stage waits.
TEST(PipelineSchedule, MergedPassesNeedNotWait) {
  for (const int64_t chunks : {1, 2}) {
    PipelineSpec spec{.kind = PipelineKind::kInterleaved,
                      .num_stages = 4,
                      .num_chunks = chunks,
                      .num_micro_batches = 24,
                      .merges_passes = true};
    const auto timeline = simulate_pipeline(spec, make_pipeline_schedule(spec));
    for (const std::vector<TimedStep>& stage : timeline.stages) {
      std::set<std::pair<int64_t, int64_t>> forward;
      std::optional<size_t> first;
      size_t last = 0;
      for (size_t i = 0; i < stage.size(); ++i) {
        const PipelineStep& step = stage[i].step;
        if (step.pass == PipelinePass::kForward && !step.merged)
          forward.emplace(step.chunk, step.micro_batch);
        if (!step.merged) continue;
        const PipelineStep& beside = stage[i + 1].step;
        ASSERT_EQ(beside.pass, PipelinePass::kBackward);
        EXPECT_TRUE(forward.contains({beside.chunk, beside.micro_batch}));
        forward.emplace(step.chunk, step.micro_batch);
        if (!first) first = i;
        last = i + 1;
      }
      ASSERT_TRUE(first.has_value());
      for (size_t i = *first; i < last; ++i)
        EXPECT_EQ(stage[i].end, stage[i + 1].begin) << list_pipeline(make_pipeline_schedule(spec));
    }
  }
}

TEST(PipelineSchedule, RefusesToMergeWhatIsKeptApart) {
  EXPECT_THAT([] { make_pipeline_schedule({.kind = PipelineKind::kGpipe, .merges_passes = true}); },
              ThrowsMessage<UserError>(HasSubstr("GPipe's schedule keeps apart")));
  EXPECT_THAT([] { make_pipeline_schedule({.split_weights = true, .merges_passes = true}); },
              ThrowsMessage<UserError>(HasSubstr("weight gradients are split off")));
}

TEST(PipelineSchedule, TimelinesKeepTheOrderOfTheModel) {
  for (const PipelineSpec& spec : random_specs(60)) {
    SCOPED_TRACE(describe(spec));
    const auto timeline = simulate_pipeline(spec, make_pipeline_schedule(spec));
    // (pass, micro-batch, place in the model) -> (begin, end)
    std::map<std::tuple<PipelinePass, int64_t, int64_t>, std::pair<double, double>> at;
    for (size_t stage = 0; stage < timeline.stages.size(); ++stage) {
      for (const TimedStep& t : timeline.stages[stage]) {
        const int64_t place = t.step.chunk * spec.num_stages + static_cast<int64_t>(stage);
        at[{t.step.pass, t.step.micro_batch, place}] = {t.begin, t.end};
      }
    }
    for (const auto& [key, time] : at) {
      const auto [pass, micro_batch, place] = key;
      if (pass == PipelinePass::kForward && place > 0) {
        EXPECT_GE(time.first, (at[{pass, micro_batch, place - 1}].second));
      }
      if (pass == PipelinePass::kBackward) {
        EXPECT_GE(time.first, (at[{PipelinePass::kForward, micro_batch, place}].second));
        if (place + 1 < spec.num_stages * spec.num_chunks) {
          EXPECT_GE(time.first, (at[{pass, micro_batch, place + 1}].second));
        }
      }
      if (pass == PipelinePass::kWeight) {
        EXPECT_GE(time.first, (at[{PipelinePass::kBackward, micro_batch, place}].second));
      }
    }
  }
}

TEST(PipelineSchedule, HoldsNoMoreThanItsKindAllows) {
  for (const PipelineSpec& spec : random_specs(300)) {
    SCOPED_TRACE(describe(spec));
    const auto timeline = simulate_pipeline(spec, make_pipeline_schedule(spec));
    const int64_t all = spec.num_micro_batches * spec.num_chunks;
    for (int64_t stage = 0; stage < spec.num_stages; ++stage) {
      const int64_t held = timeline.most_in_flight[stage];
      const int64_t after = spec.num_stages - stage - 1;
      const int64_t delayed = spec.split_weights ? stage : 0;
      int64_t bound = all;
      const int64_t merged = spec.merges_passes ? 1 : 0;
      if (spec.kind == PipelineKind::kOneFOneB || spec.num_chunks == 1)
        bound = (1 + merged) * (after + 1) + delayed;
      if (spec.num_chunks > 1)
        bound =
            2 * after + (spec.num_chunks - 1) * (2 * spec.num_stages - 1) + 1 + delayed + merged;
      if (spec.kind == PipelineKind::kGpipe) bound = all;
      EXPECT_LE(held, std::min(bound, all)) << "stage " << stage;
    }
  }
}

double bubble(const PipelineSpec& spec, const PassTimes& times = {}) {
  return simulate_pipeline(spec, make_pipeline_schedule(spec), times).bubble;
}

TEST(PipelineSchedule, WaitsAsLongAsThePapersSay) {
  PipelineSpec spec{.num_stages = 4, .num_micro_batches = 8};
  // (p - 1) / (m + p - 1) of the time, whatever the passes take (Narayanan et al. 2021, 2.2).
  EXPECT_NEAR(bubble(spec), 3.0 / 11, 1e-9);
  spec.kind = PipelineKind::kGpipe;
  EXPECT_NEAR(bubble(spec), 3.0 / 11, 1e-9);
  // v chunks divide it by v: each pass takes 1/v as long.
  spec.kind = PipelineKind::kInterleaved;
  spec.num_chunks = 2;
  EXPECT_NEAR(bubble(spec), 1.5 / (8 + 1.5), 1e-9);
  // ZB-H1 with equal passes: (p - 1)(f + b - w) instead of (p - 1)(f + b + w).
  spec = {.num_stages = 4, .num_micro_batches = 8, .split_weights = true};
  EXPECT_NEAR(bubble(spec), 3.0 / (24 + 3), 1e-9);
}

TEST(PipelineSchedule, OneFOneBOfTheLastStageAlternates) {
  const auto last = make_pipeline_schedule({.num_stages = 3, .num_micro_batches = 3})[2];
  ASSERT_EQ(last.size(), 6);
  for (size_t i = 0; i < last.size(); ++i) {
    EXPECT_EQ(last[i].pass, i % 2 == 0 ? PipelinePass::kForward : PipelinePass::kBackward);
    EXPECT_EQ(last[i].micro_batch, static_cast<int64_t>(i / 2));
  }
}

TEST(PipelineSchedule, DrawsItself) {
  const PipelineSpec spec{.num_stages = 2, .num_micro_batches = 2};
  const std::string text = draw_pipeline(simulate_pipeline(spec, make_pipeline_schedule(spec)));
  EXPECT_THAT(text, HasSubstr("stage  0 |F0-F1-......B0----...B1----| 2 in flight"));
  EXPECT_THAT(text, HasSubstr("stage  1 |...F0-B0----F1-B1----......| 1 in flight"));
  EXPECT_THAT(text, HasSubstr("F forward, B backward, W weight gradients, with the micro-batch's "
                              "last digit; . waits"));
}

TEST(PipelineSchedule, ListsEveryStep) {
  const std::string text = list_pipeline(make_pipeline_schedule({.kind = PipelineKind::kInterleaved,
                                                                 .num_stages = 2,
                                                                 .num_chunks = 2,
                                                                 .num_micro_batches = 2}));
  EXPECT_EQ(text,
            "stage  0 F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1\n"
            "stage  1 F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1\n"
            "# F forward, B backward, W weight gradients, with chunk.micro-batch; F|B merged\n");
  const std::string split =
      list_pipeline(make_pipeline_schedule({.num_micro_batches = 12, .split_weights = true}));
  EXPECT_THAT(split, HasSubstr(" F0.11 B0.11 W0.11\n")) << "not the last digit alone";
}

TEST(PipelineSchedule, RefusesWhatCannotBeScheduled) {
  const auto refuses = [](const PipelineSpec& spec, const char* message) {
    EXPECT_THAT([&] { make_pipeline_schedule(spec); },
                ThrowsMessage<UserError>(HasSubstr(message)));
  };
  refuses({.num_stages = 0}, "a pipeline of 0 stages");
  refuses({.num_micro_batches = 0}, "a pipeline of 0 micro-batches");
  refuses({.num_chunks = 2}, "2 chunks a stage need the interleaved schedule");
}

}  // namespace
}  // namespace tessera
