// Runs whose products read numbers rounded by scales of earlier steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "train/infer/loaded_model.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

using testing::expect_same_state;
using testing::list_roundings;
using testing::make_trainer;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;
using testing::tiny_settings;

void use_delayed_scales(Settings& settings, int64_t history = 16) {
  settings.train.precision = Precision::kFp8;
  settings.precision.recipe = "tensorwise_delayed";
  settings.precision.delayed.history = history;
}

class DelayedScales : public ::testing::Test {
 protected:
  Settings delayed(const std::string& run = "run") const {
    Settings settings = tiny_settings(folder_);
    use_delayed_scales(settings);
    settings.run.folder = folder_.file(run);
    return settings;
  }
  Settings of_layouts(const std::string& run) const {
    Settings settings = testing::settings_for_layouts(folder_.file(""));
    use_delayed_scales(settings);
    settings.run.folder = folder_.file(run);
    return settings;
  }
  static std::unique_ptr<Trainer> run(const Settings& settings, int64_t steps) {
    validate(settings);
    auto trainer = make_trainer(settings);
    while (trainer->position().step < steps) trainer->step();
    return trainer;
  }
  static std::string to_toml(Settings settings) { return make_schema(settings).to_toml(); }
  static void save(Trainer& trainer) { trainer.save(to_toml(trainer.settings())); }

  static void expect_near(const std::vector<float>& found, const std::vector<float>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 0.03 * expected[i] + 1e-7) << i;
  }

  const TemporaryFolder folder_;
};

/// The first step rounds nothing, and later ones do.
TEST_F(DelayedScales, TheFirstStepIsThatOfBf16) {
  Settings bf16 = delayed("bf16");
  bf16.train.precision = Precision::kBF16;
  bf16.precision = {};
  const auto expected = make_trainer(bf16);
  const auto found = make_trainer(delayed());
  EXPECT_EQ(found->step().loss, expected->step().loss);
  EXPECT_NE(found->step().loss, expected->step().loss);
}

/// All of a step's micro-batches count, and no others.
TEST_F(DelayedScales, TheLargestValuesAreOfTheStep) {
  Settings whole = delayed("whole");
  whole.train.micro_batch = 4;
  Settings parts = delayed("parts");
  parts.train.micro_batch = 1;
  const auto one = run(whole, 1);
  const auto several = run(parts, 1);
  const std::vector<float> expected = list_roundings(one->state().roundings());
  expect_near(list_roundings(several->state().roundings()), expected);
  EXPECT_THAT(expected, Not(Each(0)));
  // What a validation sees is not looked back at.
  one->validate();
  EXPECT_EQ(list_roundings(one->state().roundings()), expected);
}

TEST_F(DelayedScales, RecomputationKeepsTheBits) {
  Settings settings = delayed("kept");
  const auto kept = run(settings, 4);
  settings.run.folder = folder_.file("again");
  settings.train.recompute = {"all"};
  expect_same_state(*kept, *run(settings, 4));
}

TEST_F(DelayedScales, ResumedRunsHaveTheSameBits) {
  const auto whole = run(delayed("whole"), 6);
  save(*run(delayed("parts"), 3));
  expect_same_state(*whole, *run(delayed("parts"), 6));
}

/// Stages and split gradients have the bits of one rank; where sums have another order, scales are
/// as near as the values that they are of.
TEST_F(DelayedScales, LayoutsHaveTheSameScales) {
  const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
  const RunEnd first = testing::run_steps(of_layouts("first"), layouts[0], 1, false);
  const RunEnd one = testing::run_steps(of_layouts("one"), layouts[0], 3, false);
  EXPECT_THAT(first.roundings, Not(IsEmpty()));
  for (const NamedLayout& layout : testing::share_of_cases(layouts, 3)) {
    SCOPED_TRACE(layout.name);
    expect_near(testing::run_steps(of_layouts("first-" + layout.name), layout, 1, false).roundings,
                first.roundings);
    const RunEnd end = testing::run_steps(of_layouts(layout.name), layout, 3, false);
    if (layout.name == "pp2") testing::expect_same_end(end, one);
    ASSERT_EQ(end.losses.size(), one.losses.size());
    for (size_t i = 0; i < one.losses.size(); ++i)
      EXPECT_NEAR(end.losses[i], one.losses[i], 0.01 * one.losses[i]) << "step " << i;
  }
}

/// How many are as near as roundings to BF16 allow.
int64_t count_near(const std::vector<float>& found, const std::vector<float>& expected) {
  int64_t near = 0;
  for (size_t i = 0; i < expected.size(); ++i)
    near += std::abs(found[i] - expected[i]) <= 0.03 * expected[i] + 1e-7 ? 1 : 0;
  return near;
}

/// Of a product's three, those of what it reads forward; one step of each is kept.
std::vector<float> without_gradients(const std::vector<float>& roundings) {
  std::vector<float> values;
  for (size_t i = 0; i < roundings.size(); ++i) {
    if (i % 3 != 2) values.push_back(roundings[i]);
  }
  return values;
}

/// The same of models and layouts that are drawn, without capacities, since layouts drop other
/// tokens, and with a KV head for each rank, since ranks that share one hold terms of its gradient.
/// A rounding may send a token to another expert.
TEST_F(DelayedScales, RandomLayoutsHaveTheScalesOfOneRank) {
  int64_t num_near = 0;
  int64_t num_compared = 0;
  int64_t num_near_values = 0;
  int64_t num_compared_values = 0;
  for (uint64_t seed = 701; seed < 701 + testing::share_of_count<uint64_t>(24); ++seed) {
    testing::RandomLayout drawn = testing::draw_layout(seed, 4);
    const std::string folder = folder_.file(fmt::format("{}", seed));
    testing::prepare_run(drawn, 1, folder);
    Settings& settings = drawn.settings;
    use_delayed_scales(settings, 1);
    settings.model.moe.capacity_factor = 0;
    settings.model.moe.capacity_group_size = 1;
    settings.model.moe.drop_policy = MoeConfig().drop_policy;
    if (settings.model.kv_heads() < settings.parallel.layout.tp) continue;
    try {
      validate(settings);
    } catch (const UserError&) {
      continue;  // what is not rounded
    }
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(drawn)));
    const auto roundings_on = [&](const NamedLayout& layout) {
      settings.run.folder = fmt::format("{}/{}", folder, layout.name);
      return testing::run_steps(settings, layout, 1, false).roundings;
    };
    const NamedLayout own{.name = "drawn",
                          .num_ranks = drawn.num_ranks,
                          .parallel = settings.parallel,
                          .shard = settings.shard};
    const std::vector<float> found = roundings_on(own);
    const std::vector<float> expected = roundings_on({.name = "one", .parallel = {}, .shard = {}});
    ASSERT_EQ(found.size(), expected.size());
    const int64_t near = count_near(found, expected);
    // Two of three are of values and weights; of gradients the largest few may be rounded apart.
    EXPECT_GE(3 * near, 2 * std::ssize(expected)) << near << " of " << expected.size();
    num_near += near;
    num_compared += std::ssize(expected);
    const int64_t near_values = count_near(without_gradients(found), without_gradients(expected));
    const int64_t num_values = std::ssize(without_gradients(expected));
    EXPECT_GT(5 * near_values, 4 * num_values) << near_values << " of " << num_values;
    num_near_values += near_values;
    num_compared_values += num_values;
  }
  EXPECT_GT(num_compared, 0);
  EXPECT_GT(10 * num_near, 9 * num_compared) << num_near << " of " << num_compared;
  EXPECT_GT(20 * num_near_values, 19 * num_compared_values)
      << num_near_values << " of " << num_compared_values;
}

TEST_F(DelayedScales, AnyLayoutGoesOnFromAnyOther) {
  const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
  const RunEnd one = testing::run_steps(of_layouts("one"), layouts[0], 3, false);
  for (const NamedLayout& layout : testing::share_of_cases(layouts, 4)) {
    SCOPED_TRACE(layout.name);
    const std::string folder = "saved-" + layout.name;
    testing::run_steps(of_layouts(folder), layout, 2, true);
    const RunEnd there = testing::run_steps(of_layouts(folder), layout, 3, false);
    const RunEnd here = testing::run_steps(of_layouts(folder), layouts[0], 3, false);
    ASSERT_EQ(here.losses.size(), 1);
    EXPECT_NEAR(here.losses[0], one.losses[2], 0.01 * one.losses[2]);
    EXPECT_NEAR(there.losses[0], one.losses[2], 0.01 * one.losses[2]);
    // Two steps of three are those that were saved.
    const size_t steps = 16;
    for (size_t i = 0; i < here.roundings.size(); i += steps) {
      EXPECT_EQ(here.roundings[i + 1], there.roundings[i + 1]) << i;
      EXPECT_EQ(here.roundings[i + 2], there.roundings[i + 2]) << i;
      EXPECT_EQ(here.roundings[i + 3], 0) << i;
    }
  }
}

/// The device's memory is not the host's.
TEST_F(DelayedScales, DevicesHaveTheBitsOfTheHost) {
  const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
  testing::expect_same_end(
      testing::run_steps(of_layouts("shadow"), layouts[0], 3, false, testing::choose_shadow),
      testing::run_steps(of_layouts("host"), layouts[0], 3, false));
}

TEST_F(DelayedScales, AHistoryOfAnotherLengthIsContinued) {
  const auto before = run(delayed(), 4);
  save(*before);
  const std::vector<float> all = list_roundings(before->state().roundings());
  for (const int64_t length : {3, 40}) {
    Settings settings = delayed();
    settings.precision.delayed.history = length;
    const std::vector<float> found = list_roundings(make_trainer(settings)->state().roundings());
    ASSERT_EQ(found.size() * 16, all.size() * length);
    for (size_t i = 0; i < found.size(); ++i) {
      const size_t step = i % length;
      EXPECT_EQ(found[i], step < 4 ? all[i / length * 16 + step] : 0) << i;
    }
  }
}

TEST_F(DelayedScales, RecipesFollowOneAnother) {
  Settings bf16 = delayed();
  bf16.train.precision = Precision::kBF16;
  bf16.precision = {};
  save(*run(bf16, 2));
  const Settings settings = delayed();
  Settings own = settings;
  TrainingData data = open_training_data(own);
  Trainer trainer(own, std::move(data));
  const auto resumed = trainer.resume(to_toml(settings));
  ASSERT_TRUE(resumed);
  EXPECT_THAT(resumed->notes, ::testing::Contains(HasSubstr("the first step is not rounded")));
  EXPECT_THAT(list_roundings(trainer.state().roundings()), Each(0));
  trainer.step();
  trainer.step();
  save(trainer);
  EXPECT_EQ(make_trainer(bf16)->position().step, 4);
  const LoadedModel model(settings.run.folder, DeviceChoice::kCpu);
  EXPECT_EQ(model.products().recipe->name, "tensorwise_delayed");
}

/// Makes the scales of one operand's kind in one layer too small for what comes.
void shrink_history(Trainer& trainer, size_t layer, OperandKind kind) {
  const RoundingHistory::Layer& of = trainer.state().roundings().layers()[layer];
  const int64_t steps = of.amax.get().shape[1];
  for (int64_t row = static_cast<int64_t>(kind); row < of.num_rows(); row += kOperandKinds) {
    float* const amax = of.amax.get().as<float>() + row * steps;
    for (int64_t step = 0; step < steps; ++step) amax[step] /= 64;
  }
}

TEST_F(DelayedScales, WhatSaturatesIsCounted) {
  Settings settings = delayed();
  settings.precision.delayed.margin = 3;
  {
    const auto trainer = run(settings, 2);
    shrink_history(*trainer, 1, OperandKind::kGradient);
    save(*trainer);
  }
  const auto trainer = make_trainer(settings);
  const StepOutcome outcome = trainer->step();
  ASSERT_EQ(outcome.roundings.size(), 2);
  const size_t gradient = static_cast<size_t>(OperandKind::kGradient);
  EXPECT_GT(outcome.roundings[1].saturated[gradient], 0);
  EXPECT_LT(outcome.roundings[1].saturated[gradient], 1);
  EXPECT_EQ(outcome.roundings[1].saturated[0], 0);
  EXPECT_EQ(outcome.roundings[1].saturated[1], 0);
  EXPECT_EQ(outcome.roundings[1].most_nonfinite(), 0);
  EXPECT_FALSE(outcome.skipped());
  // The next step knows how large they are.
  EXPECT_LT(trainer->step().roundings[1].saturated[gradient],
            outcome.roundings[1].saturated[gradient]);
}

TEST_F(DelayedScales, WhatOverflowsSkipsTheStepWhereAsked) {
  Settings settings = delayed();
  settings.precision.delayed.overflows = true;
  settings.precision.delayed.margin = 2;
  settings.train.on_nonfinite = NonFinite::kSkip;
  {
    const auto trainer = run(settings, 2);
    EXPECT_EQ(trainer->position().skipped_steps, 0);
    shrink_history(*trainer, 1, OperandKind::kWeight);
    save(*trainer);
  }
  const auto trainer = make_trainer(settings);
  const std::vector<float> before = list_roundings(trainer->state().roundings());
  int64_t skipped = 0;
  while (trainer->step().skipped()) ++skipped;
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 8);
  EXPECT_EQ(trainer->position().skipped_steps, skipped);
  EXPECT_NE(list_roundings(trainer->state().roundings()), before);
}

TEST_F(DelayedScales, RefuseWhatCannotBe) {
  const auto expect_refusal = [](Settings settings, void (*change)(Settings&),
                                 const std::string& message) {
    change(settings);
    EXPECT_THAT([&] { validate(settings); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  expect_refusal(
      delayed(), [](Settings& s) { s.precision.recipe = "tensorwise"; },
      "precision.amax_history is set, but precision.recipe is \"tensorwise\"");
  expect_refusal(
      delayed(),
      [](Settings& s) {
        s.precision = {.recipe = "rowwise", .delayed = {.choice = AmaxChoice::kMostRecent}};
      },
      "precision.amax_algorithm is set, but precision.recipe is \"rowwise\"");
  expect_refusal(
      delayed(), [](Settings& s) { s.precision = {.delayed = {.margin = 1}}; },
      "precision.amax_margin is set");
  expect_refusal(
      delayed(),
      [](Settings& s) {
        s.train.precision = Precision::kBF16;
        s.precision = {.delayed = {.overflows = true}};
      },
      "precision.overflow is set, but train.precision is");
  expect_refusal(
      delayed(), [](Settings& s) { s.precision.delayed.overflows = true; },
      "set train.on_nonfinite = \"skip\"");
  const auto expect_no_value = [](const std::string& argument, const auto& message) {
    Settings settings;
    ConfigSchema schema = make_schema(settings);
    EXPECT_THAT([&] { schema.override_argument(argument); }, ThrowsMessage<UserError>(message));
  };
  expect_no_value("--precision.amax_history=0",
                  AllOf(HasSubstr("precision.amax_history"), HasSubstr("from 1 to 100000")));
  expect_no_value("--precision.amax_algorithm=most_recnt", HasSubstr("most_recent"));
  expect_no_value("--precision.recipe=tensorwise_delayd",
                  HasSubstr("did you mean 'tensorwise_delayed'"));
}

}  // namespace
}  // namespace tessera
