// Runs in FP16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/testing/case_share.h"
#include "train/infer/loaded_model.h"
#include "train/testing/option_families.h"
#include "train/testing/shadow_devices.h"
#include "train/trainer/tests/half_precision_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using testing::distance;
using testing::expect_same_state;
using testing::HalfPrecision;
using testing::kProduct;
using testing::make_trainer;
using testing::moments_of;
using testing::NamedLayout;
using testing::RunEnd;
using testing::state_of;

NamedLayout layout_of(const std::string& name) {
  const std::vector<NamedLayout> all = testing::layouts_for_checkpoints();
  return *std::ranges::find(all, name, &NamedLayout::name);
}

/// Where no product is rounded, nothing is, and scales, being powers of two, change no bit.
TEST_F(HalfPrecision, WithoutProductsIsF32) {
  Settings settings = fp16();
  settings.precision.plain = {"all"};
  const auto plain = run(settings);
  settings.run.folder = folder_.file("f32");
  settings.precision = {};
  settings.train.precision = Precision::kF32;
  expect_same_state(*run(settings), *plain);
}

/// Gradients of a step are those of F32 to within the eleven digits of F16.
TEST_F(HalfPrecision, LearnsAsF32) {
  const auto half = run(fp16(), 1);
  const std::vector<float> found = moments_of(*half, kProduct);
  Settings settings = fp16("f32");
  settings.train.precision = Precision::kF32;
  const auto whole = run(settings, 1);
  const std::vector<float> expected = moments_of(*whole, kProduct);
  EXPECT_NE(found, expected);
  EXPECT_LT(distance(found, expected), 4e-3);
  take_losses();
  settings.run.resume = ResumeMode::kNever;
  run(settings);
  const std::vector<double> f32 = take_losses();
  run(fp16("again"));
  const std::vector<double> f16 = take_losses();
  EXPECT_NE(f16, f32);
  for (size_t i = 0; i < f32.size(); ++i) EXPECT_NEAR(f16[i], f32[i], 4e-3 * f32[i]) << i;
  EXPECT_LT(f16.back(), 0.8 * f16.front());
}

/// What products read is kept for the backward pass in F16.
TEST_F(HalfPrecision, KeepsHalves) {
  Settings settings = fp16();
  const auto half = make_trainer(settings);
  settings.train.precision = Precision::kF32;
  const auto whole = make_trainer(settings);
  EXPECT_LT(half->prediction().activations.saved,
            static_cast<int64_t>(0.9 * whole->prediction().activations.saved));
}

TEST_F(HalfPrecision, RecomputationKeepsTheBits) {
  Settings settings = fp16("kept");
  const auto kept = run(settings, 4);
  int number = 0;
  for (const std::vector<std::string>& recomputed :
       {std::vector<std::string>{"all"}, {"expert_in", "expert_act"}, {"expert_pre"}}) {
    settings.run.folder = folder_.file(fmt::format("again-{}", ++number));
    settings.train.recompute = recomputed;
    expect_same_state(*kept, *run(settings, 4));
  }
}

/// Where weights are rounded once a step, and gradients of weights are not rounded.
TEST_F(HalfPrecision, CopiesKeepTheBits) {
  Settings settings = fp16("copies");
  const auto copies = run(settings, 4);
  settings.run.folder = folder_.file("rounded-anew");
  settings.precision.weight_copies = false;
  expect_same_state(*copies, *run(settings, 4));
  settings.run.folder = folder_.file("plain-gradients");
  settings.precision.weight_gradients = false;
  const auto plain = run(settings, 4);
  EXPECT_NE(state_of(*plain), state_of(*copies));
}

/// All layouts have one rank's losses, to within the order of sums, and all ranks its scales.
TEST_F(HalfPrecision, LayoutsAgree) {
  const auto settings_of = [this](const std::string& name) {
    Settings settings = of_layouts(name);
    settings.train.steps = 6;
    settings.precision.loss_scaling = {.initial = 0x1p24, .window = 2};
    return settings;
  };
  const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
  const auto run_on = [&](const NamedLayout& layout, std::vector<double>& scales) {
    RunEnd end;
    std::mutex mutex;
    end.weights = testing::run_ranks(settings_of(layout.name), layout, choose_host,
                                     [&](Trainer& trainer, int64_t rank) {
                                       std::vector<double> own;
                                       while (trainer.position().step < 6) {
                                         const StepOutcome outcome = trainer.step();
                                         own.push_back(outcome.loss_scale);
                                         if (rank == 0) end.losses.push_back(outcome.loss);
                                       }
                                       const std::scoped_lock lock(mutex);
                                       if (scales.empty()) scales = own;
                                       EXPECT_EQ(own, scales) << "rank " << rank;
                                     });
    return end;
  };
  std::vector<double> expected;
  const RunEnd one = run_on(layouts[0], expected);
  EXPECT_GT(expected.front(), expected.back());
  for (const NamedLayout& layout : testing::share_of_cases(layouts, 1)) {
    SCOPED_TRACE(layout.name);
    std::vector<double> scales;
    const RunEnd end = run_on(layout, scales);
    EXPECT_EQ(scales, expected);
    ASSERT_EQ(end.losses.size(), one.losses.size());
    for (size_t i = 0; i < one.losses.size(); ++i)
      EXPECT_NEAR(end.losses[i], one.losses[i], 0.01 * one.losses[i]) << "step " << i;
  }
}

/// Tokens travel as halves by every exchange.
TEST_F(HalfPrecision, ExchangesKeepTheBits) {
  for (const DispatcherRequest dispatcher :
       {DispatcherRequest::kAllToAll, DispatcherRequest::kDeduplicated}) {
    NamedLayout layout = layout_of("ep2");
    layout.parallel.dispatcher = dispatcher;
    const auto run_on = [&](ExchangeSizes exchange) {
      layout.parallel.exchange = exchange;
      const Settings settings = of_layouts(fmt::format("exchange-{}", static_cast<int>(exchange)));
      return testing::run_steps(settings, layout, 2, false);
    };
    const RunEnd exact = run_on(ExchangeSizes::kExact);
    testing::expect_same_end(run_on(ExchangeSizes::kBounded), exact);
  }
}

/// However weights and state are spread, a step that overflows changes no bit of them.
TEST_F(HalfPrecision, NoRankUpdatesWhatOverflows) {
  for (const NamedLayout& layout : testing::share_of_cases(testing::layouts_for_checkpoints(), 2)) {
    SCOPED_TRACE(layout.name);
    Settings settings = of_layouts(layout.name);
    settings.precision.loss_scaling = {.initial = 0x1p60};
    const std::vector<float> before =
        testing::run_ranks(settings, layout, choose_host, [](Trainer&, int64_t) {});
    const std::vector<float> after =
        testing::run_ranks(settings, layout, choose_host, [](Trainer& trainer, int64_t) {
          for (int step = 0; step < 2; ++step) EXPECT_TRUE(trainer.step().skipped());
          EXPECT_EQ(trainer.loss_scale(), 0x1p58);
        });
    EXPECT_EQ(after, before);
  }
}

TEST_F(HalfPrecision, AnyLayoutGoesOnFromAnyOther) {
  const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
  const auto settings_of = [this](const std::string& name) {
    Settings settings = of_layouts(name);
    settings.precision.loss_scaling = {.initial = 1024, .window = 1};
    return settings;
  };
  for (const NamedLayout& layout : testing::share_of_cases(layouts, 4)) {
    SCOPED_TRACE(layout.name);
    testing::run_steps(settings_of(layout.name), layout, 2, true);
    testing::run_ranks(
        settings_of(layout.name), layouts[0], choose_host,
        [&](Trainer& trainer, int64_t /*rank*/) { EXPECT_EQ(trainer.loss_scale(), 4096); });
  }
}

/// A device's memory is not the host's; one that repeats what it recorded sees each step's scale.
TEST_F(HalfPrecision, DevicesHaveTheBitsOfTheHost) {
  const std::vector<NamedLayout> layouts = testing::layouts_for_checkpoints();
  const auto settings_of = [this](const std::string& name) {
    Settings settings = of_layouts(name);
    settings.train.steps = 8;
    settings.precision.loss_scaling = {.initial = 0x1p24, .window = 2};
    return settings;
  };
  const RunEnd host = testing::run_steps(settings_of("host"), layouts[0], 8, false);
  testing::expect_same_end(
      testing::run_steps(settings_of("shadow"), layouts[0], 8, false, testing::choose_shadow),
      host);
  testing::expect_same_end(testing::run_steps(settings_of("recording"), layouts[0], 8, false,
                                              testing::choose_recording_shadow),
                           host);
}

/// Adapters' products, and those that they stand beside, read halves.
TEST_F(HalfPrecision, AdaptersLearnAsF32) {
  Settings base = fp16("base");
  base.model.vocab_size = 320;
  save(*run(base, 2));
  Settings settings = base;
  settings.run.init_from = base.run.folder;
  settings.run.folder = folder_.file("half");
  settings.model.lora = {.rank = 4, .alpha = 8};
  take_losses();
  const auto half = run(settings);
  const std::vector<double> found = take_losses();
  settings.run.folder = folder_.file("whole");
  settings.train.precision = Precision::kF32;
  const auto whole = run(settings);
  const std::vector<double> expected = take_losses();
  EXPECT_NE(found, expected);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 4e-3 * expected[i]) << i;
  EXPECT_LT(distance(moments_of(*half, "layers.0.attn.o.lora_b.weight"),
                     moments_of(*whole, "layers.0.attn.o.lora_b.weight")),
            0.05);
}

/// Text is scored as in training.
TEST_F(HalfPrecision, EvaluationRoundsToo) {
  const Settings settings = fp16();
  auto trainer = run(settings, 4);
  save(*trainer);
  const double in_training = trainer->validate();
  LoadedModel model(settings.run.folder, DeviceChoice::kCpu);
  EXPECT_EQ(model.products().recipe, &f16_recipe());
  const double loss = evaluate(model, {.batch_size = settings.train.micro_batch,
                                       .max_batches = settings.train.validation_batches})
                          .loss;
  EXPECT_NEAR(loss, in_training, 1e-6 * in_training) << "weights of the last step";
}

class HalfPrecisionFamilies : public HalfPrecision,
                              public ::testing::WithParamInterface<testing::OptionFamily> {};

/// Every option that changes which operators run: refused by name, or near F32.
TEST_P(HalfPrecisionFamilies, AreNearF32) {
  Settings settings = testing::settings_of(GetParam());
  settings.run.device = DeviceChoice::kCpu;
  settings.run.folder = folder_.file("run");
  settings.run.resume = ResumeMode::kNever;
  settings.data.tokens = folder_.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 2;
  testing::write_tokens(settings);
  settings.train.precision = Precision::kF32;
  run(settings, 2);
  const std::vector<double> norms = norms_;
  const std::vector<double> expected = take_losses();
  settings.train.precision = Precision::kFp16;
  try {
    validate(settings);
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("train.precision = \"fp16\""));
    return;
  }
  run(settings, 2);
  EXPECT_NEAR(norms_[0], norms[0], 0.02 * norms[0]);
  const std::vector<double> found = take_losses();
  EXPECT_NE(found, expected);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 5e-3 * expected[i]) << "step " << i;
}

INSTANTIATE_TEST_SUITE_P(All, HalfPrecisionFamilies,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     1)),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(HalfPrecision, RefusesWhatCannotBe) {
  const auto expect_refusal = [this](void (*change)(Settings&), const std::string& message) {
    Settings settings = fp16();
    change(settings);
    EXPECT_THAT([&] { validate(settings); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  expect_refusal([](Settings& s) { s.precision.recipe = "mxfp8"; },
                 "precision.recipe is set, but train.precision is \"fp16\", and it is for \"fp8\"");
  expect_refusal([](Settings& s) { s.precision.saved = SavedPrecision::kFp8; },
                 "precision.saved is set");
  expect_refusal([](Settings& s) { s.precision.fp8_weights = true; },
                 "precision.primary_weights is set");
  expect_refusal([](Settings& s) { s.precision.emulate = true; }, "precision.emulate is set");
  expect_refusal([](Settings& s) { s.precision.delayed.history = 3; },
                 "precision.amax_history is set");
  expect_refusal(
      [](Settings& s) {
        s.train.precision = Precision::kBF16;
        s.precision.loss_scaling.constant = 2;
      },
      "precision.loss_scale is set, but train.precision is \"bf16\", and it is for \"fp16\"");
  expect_refusal(
      [](Settings& s) {
        s.train.precision = Precision::kFp8;
        s.precision.loss_scaling.hysteresis = 2;
      },
      "precision.hysteresis is set");
  expect_refusal([](Settings& s) { s.precision.loss_scaling.constant = 1000; },
                 "precision.loss_scale is 1000; it must be a power of two");
  expect_refusal(
      [](Settings& s) {
        s.shard.release_gradients = true;
        s.train.max_grad_norm = 0;
      },
      "set precision.loss_scale to a constant");
  expect_refusal([](Settings& s) { s.model.moe.fuse_activation = true; },
                 "leave moe.fuse_activation out");
  expect_refusal([](Settings& s) { s.model.moe.experts = ExpertPath::kBlockSparse; },
                 "train.precision = \"fp16\"");
  expect_refusal([](Settings& s) { s.optimizer.formats.master = MasterKind::kNone; },
                 "train.precision is \"fp16\"");
}

}  // namespace
}  // namespace tessera
