// How losses of runs in FP16 are scaled.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/trainer/tests/half_precision_testing.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using testing::distance;
using testing::expect_same_state;
using testing::HalfPrecision;
using testing::kProduct;
using testing::make_trainer;
using testing::moments_of;
using testing::state_of;

class LossScale : public HalfPrecision {};

/// All losses have the scale, gradients lose it exactly, and so do norms and clipping: with weights
/// for each of them, accumulation, and multi-token prediction. In F32, where nothing underflows.
TEST_F(LossScale, ScalesChangeNoBit) {
  for (const bool whole_model : {false, true}) {
    Settings settings = of_layouts(fmt::format("low-{}", whole_model));
    settings.model.moe.balance_coefficient = 0.1;
    settings.model.moe.z_loss_coefficient = 0.1;
    if (whole_model) settings.model.moe.balance_scope = BalanceTokens::kModel;
    settings.train.max_grad_norm = 0.5;
    settings.precision.plain = {"all"};
    settings.precision.loss_scaling.constant = 0x1p12;
    const auto low = run(settings, 3);
    const auto outcome = low->step();
    settings.run.folder = folder_.file(fmt::format("high-{}", whole_model));
    settings.precision.loss_scaling.constant = 0x1p15;
    const auto high = run(settings, 3);
    const auto other = high->step();
    EXPECT_EQ(outcome.loss, other.loss);
    EXPECT_EQ(outcome.mtp_loss, other.mtp_loss);
    EXPECT_EQ(outcome.balance_loss, other.balance_loss);
    EXPECT_EQ(outcome.z_loss, other.z_loss);
    EXPECT_EQ(outcome.update.grad_norm, other.update.grad_norm);
    EXPECT_EQ(outcome.update.clip_factor, other.update.clip_factor);
    EXPECT_LT(outcome.update.clip_factor, 1);
    expect_same_state(*low, *high);
  }
}

/// Muon and released gradients multiply by what undoes the scale, too.
TEST_F(LossScale, ScalesChangeNoBitOfOtherUpdates) {
  const auto expect_same = [&](const std::string& name, void (*change)(Settings&)) {
    SCOPED_TRACE(name);
    Settings settings = fp16(name + "-low");
    change(settings);
    settings.precision.plain = {"all"};
    settings.precision.loss_scaling.constant = 0x1p12;
    const auto low = run(settings, 3);
    settings.run.folder = folder_.file(name + "-high");
    settings.precision.loss_scaling.constant = 0x1p15;
    const auto high = run(settings, 3);
    expect_same_state(*low, *high);
  };
  expect_same("muon", [](Settings& s) { s.optimizer_kind = OptimizerKind::kMuon; });
  expect_same("released", [](Settings& s) {
    s.shard.release_gradients = true;
    s.train.max_grad_norm = 0;
  });
  expect_same("bf16", [](Settings& s) { s.shard.gradients = DType::kBF16; });
  expect_same("host", [](Settings& s) { s.shard.state_on_host = true; });
  expect_same("updates",
              [](Settings& s) { s.shard.state_on_host = s.shard.updates_on_host = true; });
}

/// Without a scale gradients below 2^-24 are zeros in F16; with it they are those of F32.
TEST_F(LossScale, SmallGradientsNeedTheScale) {
  Settings settings = fp16("unscaled");
  settings.model.logits_divisor = 1e8;
  settings.model.moe.balance_coefficient = 0;
  settings.optimizer.eps = 1e-30;
  settings.precision.loss_scaling.constant = 1;
  const auto unscaled = run(settings, 1);
  EXPECT_THAT(moments_of(*unscaled, kProduct), Each(0.0F));
  settings.run.folder = folder_.file("scaled");
  settings.precision.loss_scaling = {.initial = 0x1p30};
  const auto scaled = run(settings, 1);
  settings.run.folder = folder_.file("f32");
  settings.train.precision = Precision::kF32;
  settings.precision = {};
  const auto whole = run(settings, 1);
  EXPECT_LT(distance(moments_of(*scaled, kProduct), moments_of(*whole, kProduct)), 1e-2);
}

/// A step whose gradients overflow leaves everything as it was, and halves the scale.
TEST_F(LossScale, OverflowSkipsAndHalves) {
  Settings settings = fp16();
  settings.model.moe.bias_update_speed = 0.01;
  settings.precision.loss_scaling.initial = 0x1p40;
  const auto trainer = make_trainer(settings);
  const std::vector<float> before = state_of(*trainer);
  double scale = 0x1p40;
  int64_t skipped = 0;
  while (true) {
    const StepOutcome outcome = trainer->step();
    EXPECT_EQ(outcome.loss_scale, scale);
    EXPECT_TRUE(std::isfinite(outcome.loss));
    if (!outcome.skipped()) break;
    ++skipped;
    scale /= 2;
    EXPECT_EQ(trainer->loss_scale(), scale);
    EXPECT_FALSE(std::isfinite(outcome.update.grad_norm));
    EXPECT_EQ(state_of(*trainer), before);
  }
  EXPECT_GE(skipped, 3);
  EXPECT_LE(skipped, 30);
  EXPECT_EQ(trainer->position().skipped_steps, skipped);
  EXPECT_EQ(trainer->loss_scale(), scale);
  EXPECT_NE(state_of(*trainer), before);
}

TEST_F(LossScale, GrowsWhileGradientsAreFinite) {
  Settings settings = fp16();
  settings.precision.loss_scaling = {.initial = 1024, .window = 3};
  const auto trainer = make_trainer(settings);
  std::vector<double> scales;
  for (int i = 0; i < 8; ++i) scales.push_back(trainer->step().loss_scale);
  EXPECT_THAT(scales, ElementsAre(1024, 1024, 1024, 2048, 2048, 2048, 4096, 4096));
}

/// The scale and what is counted for it are the checkpoint's.
TEST_F(LossScale, ResumedRunsHaveTheSameBits) {
  const auto scaled = [this](const std::string& name) {
    Settings settings = fp16(name);
    settings.train.steps = settings.schedule.num_steps = 40;
    settings.precision.loss_scaling = {.initial = 0x1p36, .window = 3, .hysteresis = 2};
    return settings;
  };
  constexpr int64_t kSteps = 40;
  const auto whole = run(scaled("whole"), kSteps);
  EXPECT_GT(whole->position().skipped_steps, 3);
  for (const int64_t cut : {1, 17, 30, 38}) {
    const std::string name = fmt::format("cut-{}", cut);
    save(*run(scaled(name), cut));
    const auto resumed = run(scaled(name), kSteps);
    EXPECT_EQ(resumed->loss_scale(), whole->loss_scale());
    EXPECT_EQ(resumed->position().skipped_steps, whole->position().skipped_steps);
    expect_same_state(*whole, *resumed);
  }
}

/// A run may go on in another precision, or with a scale that does not change.
TEST_F(LossScale, PrecisionsFollowOneAnother) {
  Settings settings = fp16();
  settings.precision.loss_scaling = {.initial = 1024, .window = 1};
  save(*run(settings, 2));
  EXPECT_EQ(make_trainer(settings)->loss_scale(), 4096);
  Settings constant = settings;
  constant.precision.loss_scaling = {.constant = 8};
  EXPECT_EQ(make_trainer(constant)->loss_scale(), 8);
  Settings f32 = settings;
  f32.train.precision = Precision::kF32;
  f32.precision = {};
  const auto other = run(f32, 3);
  EXPECT_EQ(other->loss_scale(), std::nullopt);
  save(*other);
  EXPECT_EQ(make_trainer(settings)->loss_scale(), 1024);
}

/// At the smallest scale a run stops before anything has changed, or goes on where it is told to.
TEST_F(LossScale, StopsAtTheSmallestScale) {
  Settings settings = fp16();
  settings.precision.loss_scaling = {.initial = 0x1p40, .minimum = 0x1p39, .hysteresis = 2};
  {
    const auto trainer = make_trainer(settings);
    const std::vector<float> before = state_of(*trainer);
    EXPECT_TRUE(trainer->step().skipped());
    EXPECT_TRUE(trainer->step().skipped());
    EXPECT_EQ(trainer->loss_scale(), 0x1p39);
    EXPECT_THAT([&] { trainer->step(); }, ThrowsMessage<TrainingStopped>(::testing::AllOf(
                                              HasSubstr("step 3: gradients are NaN or infinite"),
                                              HasSubstr("precision.min_loss_scale"))));
    EXPECT_EQ(state_of(*trainer), before);
    EXPECT_EQ(trainer->position().step, 2);
  }
  settings.train.on_nonfinite = NonFinite::kSkip;
  const auto trainer = make_trainer(settings);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(trainer->step().skipped());
  EXPECT_EQ(trainer->position().skipped_steps, 5);
  settings.precision.loss_scaling = {.constant = 0x1p40};
  settings.train.on_nonfinite = NonFinite::kStop;
  EXPECT_THROW(make_trainer(settings)->step(), TrainingStopped);
}

/// A loss that is not finite is not mended by a scale.
TEST_F(LossScale, ALossThatIsNotFiniteStops) {
  Settings settings = fp16();
  settings.model.init_deviation = 10;
  settings.schedule.peak_lr = 1e38;
  const auto trainer = make_trainer(settings);
  EXPECT_THAT(
      [&] {
        for (int i = 0; i < 8; ++i) trainer->step();
      },
      ThrowsMessage<TrainingStopped>(HasSubstr("the loss is")));
}

}  // namespace
}  // namespace tessera
