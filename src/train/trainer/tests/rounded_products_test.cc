// Runs whose products read rounded numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "train/infer/loaded_model.h"
#include "train/testing/layout_runs.h"
#include "train/testing/option_families.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using testing::expect_same_state;
using testing::make_trainer;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;
using testing::tiny_settings;

class RoundedProducts : public ::testing::Test {
 protected:
  Settings fp8(const std::string& recipe = "blockwise") const {
    Settings settings = tiny_settings(folder_);
    settings.train.precision = Precision::kFp8;
    settings.precision.recipe = recipe;
    settings.run.resume = ResumeMode::kNever;
    return settings;
  }
  std::unique_ptr<Trainer> run(const Settings& settings) const {
    validate(settings);
    auto trainer = make_trainer(settings);
    for (int64_t i = 0; i < settings.train.steps; ++i) losses_.push_back(trainer->step().loss);
    return trainer;
  }
  /// The losses of the runs since the last call.
  std::vector<double> take_losses() const { return std::exchange(losses_, {}); }

  const TemporaryFolder folder_;
  mutable std::vector<double> losses_;
};

/// Where no product is rounded, nothing is.
TEST_F(RoundedProducts, WithoutAnyAreThoseOfBf16) {
  Settings settings = fp8();
  settings.precision.plain = {"attn", "moe.experts@0", "all@1"};
  const auto plain = run(settings);
  settings.precision = {};
  settings.train.precision = Precision::kBF16;
  expect_same_state(*run(settings), *plain);
}

/// Every recipe learns as BF16 does, by other numbers.
TEST_F(RoundedProducts, EveryRecipeLearns) {
  Settings bf16 = fp8();
  bf16.train.precision = Precision::kBF16;
  run(bf16);
  const std::vector<double> expected = take_losses();
  for (const Recipe& recipe : recipes()) {
    SCOPED_TRACE(recipe.name);
    run(fp8(std::string(recipe.name)));
    const std::vector<double> found = take_losses();
    EXPECT_NE(found, expected);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 0.04 * expected[i]) << "step " << i;
    EXPECT_LT(found.back(), 0.8 * found.front());
  }
}

/// Gradients of weights then read what was rounded for others, in less memory. Rounded again, with
/// scales that are powers of two too, it differs only where it was too small for its row.
TEST_F(RoundedProducts, WhatIsSavedInFp8IsSmaller) {
  for (const std::string recipe : {"rowwise", "blockwise", "mxfp8"}) {
    for (const bool rounds_gradients : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {}", recipe, rounds_gradients));
      Settings settings = fp8(recipe);
      settings.precision.weight_gradients = rounds_gradients;
      const auto bf16 = run(settings);
      const std::vector<double> expected = take_losses();
      settings.precision.saved = SavedPrecision::kFp8;
      const auto kept = run(settings);
      const std::vector<double> found = take_losses();
      EXPECT_TRUE(rounds_gradients || found != expected);
      const double tolerance = rounds_gradients ? 2e-3 : 2e-2;
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << "step " << i;
      EXPECT_LT(kept->prediction().activations.saved,
                static_cast<int64_t>(0.9 * bf16->prediction().activations.saved));
      settings.precision.saved = SavedPrecision::kFp8All;
      const auto all = run(settings);
      const std::vector<double> coarse = take_losses();
      EXPECT_NE(coarse, found);
      EXPECT_EQ(coarse[0], found[0]) << "forward passes read what is not rounded";
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_NEAR(coarse[i], expected[i], 2e-2 * expected[i]) << "step " << i;
      EXPECT_LT(all->prediction().activations.saved,
                static_cast<int64_t>(0.9 * kept->prediction().activations.saved));
    }
  }
}

/// What is computed again is rounded again.
TEST_F(RoundedProducts, RecomputationKeepsTheBits) {
  for (const std::string recipe : {"blockwise", "nvfp4"}) {
    for (const auto saved :
         {SavedPrecision::kBf16, SavedPrecision::kFp8, SavedPrecision::kFp8All}) {
      if (recipe == "nvfp4" && saved != SavedPrecision::kBf16) continue;
      Settings settings = fp8(recipe);
      settings.precision.saved = saved;
      const auto kept = run(settings);
      settings.train.recompute = {"all"};
      expect_same_state(*kept, *run(settings));
      settings.train.recompute = {"expert_in", "expert_act"};
      expect_same_state(*kept, *run(settings));
      settings.train.recompute = {"expert_pre"};
      expect_same_state(*kept, *run(settings));
    }
  }
}

/// Where ranks compute what one rank does, in the same order, the bits are the same: stages, split
/// weight gradients, sharded state. Blocks of neighbouring tokens are others where tokens are
/// spread, blocks of features where weights are cut off the blocks' borders.
TEST_F(RoundedProducts, LayoutsAgree) {
  const std::vector<std::pair<std::string, SavedPrecision>> cases = {
      {"blockwise", SavedPrecision::kBf16},
      {"tensorwise", SavedPrecision::kBf16},
      {"tensorwise_delayed", SavedPrecision::kBf16},
      {"rowwise", SavedPrecision::kFp8},
      {"rowwise", SavedPrecision::kFp8All}};
  int number = 0;
  for (const auto& [recipe, saved] : testing::share_of_cases(cases, 0)) {
    ++number;
    Settings settings = testing::settings_for_layouts(folder_.file(""));
    settings.train.precision = Precision::kFp8;
    settings.precision.recipe = recipe;
    settings.precision.saved = saved;
    settings.run.resume = ResumeMode::kNever;
    const auto run_on = [&](const NamedLayout& layout) {
      settings.run.folder = folder_.file(fmt::format("{}-{}", number, layout.name));
      return testing::run_steps(settings, layout, 3, false);
    };
    const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
    const RunEnd one = run_on(layouts[0]);
    for (const NamedLayout& layout : testing::share_of_cases(layouts, 1)) {
      SCOPED_TRACE(fmt::format("case {}, {} on {}", number, recipe, layout.name));
      const RunEnd end = run_on(layout);
      if (layout.name == "pp2") testing::expect_same_end(end, one);
      ASSERT_EQ(end.losses.size(), one.losses.size());
      for (size_t i = 0; i < one.losses.size(); ++i)
        EXPECT_NEAR(end.losses[i], one.losses[i], 0.01 * one.losses[i]) << "step " << i;
    }
  }
}

/// Text is scored as in training.
TEST_F(RoundedProducts, EvaluationRoundsToo) {
  Settings settings = fp8("tensorwise");
  auto trainer = run(settings);
  trainer->save(make_schema(settings).to_toml());
  const double in_training = trainer->validate();
  const std::string folder = settings.run.folder;
  LoadedModel model(folder, DeviceChoice::kCpu);
  const double loss = evaluate(model, {.batch_size = settings.train.micro_batch,
                                       .max_batches = settings.train.validation_batches})
                          .loss;
  EXPECT_EQ(model.products().recipe, &find_recipe("tensorwise"));
  EXPECT_NEAR(loss, in_training, 1e-6 * in_training);
}

class RoundedProductFamilies : public RoundedProducts,
                               public ::testing::WithParamInterface<testing::OptionFamily> {};

/// Every option that changes which operators run: refused by name, or as near to BF16 as numbers of
/// four digits are, with blocks that cut rows.
TEST_P(RoundedProductFamilies, AreNearBf16) {
  Settings settings = testing::settings_of(GetParam());
  settings.run.device = DeviceChoice::kCpu;
  settings.run.folder = folder_.file("run");
  settings.run.resume = ResumeMode::kNever;
  settings.data.tokens = folder_.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 2;
  testing::write_tokens(settings);
  settings.train.precision = Precision::kBF16;
  run(settings);
  const std::vector<double> expected = take_losses();
  settings.train.precision = Precision::kFp8;
  for (const auto& [recipe, saved] :
       {std::pair("mxfp8", SavedPrecision::kBf16), std::pair("mxfp8", SavedPrecision::kFp8),
        std::pair("mxfp8", SavedPrecision::kFp8All),
        std::pair("tensorwise_delayed", SavedPrecision::kBf16)}) {
    SCOPED_TRACE(recipe);
    settings.precision.recipe = recipe;
    settings.precision.saved = saved;
    try {
      validate(settings);
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("train.precision = \"fp8\""));
      return;
    }
    run(settings);
    const std::vector<double> found = take_losses();
    EXPECT_NE(found, expected);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 0.03 * expected[i]) << "step " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, RoundedProductFamilies,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     1)),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(RoundedProducts, RefuseWhatCannotBe) {
  const auto expect_refusal = [](Settings settings, void (*change)(Settings&),
                                 const std::string& message) {
    change(settings);
    EXPECT_THAT([&] { validate(settings); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  const Settings settings = fp8();
  expect_refusal(
      settings,
      [](Settings& s) { s.train.precision = Precision::kBF16, s.precision.plain = {"all"}; },
      "precision.plain is set, but train.precision is \"bf16\", and it is for \"fp8\" and "
      "\"fp16\"");
  expect_refusal(
      settings,
      [](Settings& s) { s.train.precision = Precision::kF32, s.precision.recipe = "mxfp8"; },
      "precision.recipe is set, but train.precision is \"f32\", and it is for \"fp8\"");
  expect_refusal(
      settings, [](Settings& s) { s.model.moe.experts = ExpertPath::kBlockSparse; },
      "set moe.experts = \"grouped\"");
  expect_refusal(
      settings,
      [](Settings& s) {
        s.model.moe.inner_sizes = {16, 32, 32, 16};
      },
      "leave it out");
  expect_refusal(
      settings, [](Settings& s) { s.model.moe.fuse_gather = GatherFusion::kAlways; },
      "leave moe.fuse_gather out");
  for (const char* recipe : {"tensorwise", "nvfp4"}) {
    Settings other = fp8(recipe);
    expect_refusal(
        other, [](Settings& s) { s.precision.saved = SavedPrecision::kFp8; },
        fmt::format("which precision.recipe \"{}\" does not give", recipe));
    expect_refusal(
        other, [](Settings& s) { s.precision.saved = SavedPrecision::kFp8All; },
        "precision.saved = \"fp8_all\" keeps tokens");
  }
  expect_refusal(
      settings, [](Settings& s) { s.precision.plain = {"all@2-1"}; }, "end before they begin");
  expect_refusal(
      settings, [](Settings& s) { s.precision.recipe = "blokwise"; }, "did you mean 'blockwise'");
}

TEST_F(RoundedProducts, RefuseNamesOfNothing) {
  const auto expect_refusal = [this](const std::string& entry, const std::string& message) {
    Settings settings = fp8();
    settings.precision.plain = {entry};
    EXPECT_THAT([&] { make_trainer(settings); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  expect_refusal("moe.expert", "did you mean 'moe.experts'");
  expect_refusal("moe.router", "no product of a layer has such a weight");
  expect_refusal("attn@5", "the model has layers 0 to 1");
}

}  // namespace
}  // namespace tessera
