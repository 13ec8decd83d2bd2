// Steps that a device repeats, beside steps on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/option_families.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using testing::expect_same_state;
using testing::make_trainer;

class StepRuns : public ::testing::Test {
 protected:
  std::unique_ptr<Trainer> make_recording(Settings settings) {
    worlds_.push_back(make_single_world());
    TrainingData data = open_training_data(settings);
    auto trainer = std::make_unique<Trainer>(std::move(settings), std::move(data), *worlds_.back(),
                                             testing::choose_recording_shadow);
    trainer->resume("");
    return trainer;
  }
  /// `steps` steps of both, which give the same.
  static void run(Trainer& host, Trainer& recording, int steps) {
    for (int i = 0; i < steps; ++i) {
      const StepOutcome expected = host.step();
      const StepOutcome found = recording.step();
      ASSERT_EQ(found.loss, expected.loss) << "step " << host.position().step;
      EXPECT_EQ(found.update.grad_norm, expected.update.grad_norm);
      EXPECT_EQ(found.update.clip_factor, expected.update.clip_factor);
      EXPECT_EQ(found.mtp_loss, expected.mtp_loss);
      EXPECT_EQ(recording.expert_loads(), host.expert_loads());
    }
  }
  /// Short ones of random lengths, which attention keeps apart.
  void use_documents(Settings& settings) const {
    settings.model.vocab_size = 320;
    settings.data.text.clear();
    settings.data.tokens = folder_.file("tokens");
    settings.data.split_documents = true;
    testing::write_tokens(settings);
  }
  static int64_t repeated(const Trainer& trainer) {
    return trainer.backend().control().num_operations;
  }

  const testing::TemporaryFolder folder_;
  std::vector<std::unique_ptr<World>> worlds_;
};

TEST_F(StepRuns, AreRepeatedWithTheBitsOfTheHost) {
  for (const int64_t micro_batch : {1, 4}) {
    Settings settings = testing::tiny_settings(folder_);
    settings.train.micro_batch = micro_batch;
    settings.train.max_grad_norm = 0.5;
    settings.train.steps = 20;
    settings.model.moe.bias_update_speed = 0.01;
    const auto host = make_trainer(settings);
    const auto recording = make_recording(settings);
    run(*host, *recording, 2);
    const int64_t one = repeated(*recording);
    EXPECT_GT(one, 0);
    run(*host, *recording, 3);
    EXPECT_EQ(repeated(*recording), 4 * one);
    expect_same_state(*host, *recording);
  }
}

/// The thread that runs a repeated step copies no inputs, whatever these are: documents side by
/// side that begin elsewhere in each row, several micro-batches, shifted tokens.
TEST_F(StepRuns, AreGivenWhatWasReadBesideTheStepBefore) {
  for (const Packing packing : {Packing::kStream, Packing::kBestFit}) {
    for (const int64_t micro_batch : {1, 4}) {
      Settings settings = testing::tiny_settings(folder_);
      use_documents(settings);
      settings.data.packing = packing;
      settings.model.mtp_layers = 1;
      settings.train.micro_batch = micro_batch;
      settings.train.steps = 9;
      const auto host = make_trainer(settings);
      const auto recording = make_recording(settings);
      run(*host, *recording, 2);
      EXPECT_EQ(recording->num_read_ahead(), 0);
      run(*host, *recording, 7);
      EXPECT_EQ(recording->num_read_ahead(), 7);
      EXPECT_EQ(host->num_read_ahead(), 0);
      expect_same_state(*host, *recording);
    }
  }
}

std::vector<Batch> fetch_batches(const Trainer& trainer, int64_t step) {
  std::vector<Batch> batches(trainer.layout().num_micro_batches);
  for (size_t i = 0; i < batches.size(); ++i)
    trainer.data().train->fetch(step, static_cast<int64_t>(i), batches[i]);
  return batches;
}

/// A step that is given its batches has these, though others were read for it, perhaps with as many
/// labels; so has the step behind it its own.
TEST_F(StepRuns, HaveTheBatchesThatTheyAreGiven) {
  for (const bool documents : {false, true}) {
    Settings settings = testing::tiny_settings(folder_);
    if (documents) use_documents(settings);
    settings.train.micro_batch = 1;
    settings.train.steps = 20;
    const auto host = make_trainer(settings);
    const auto recording = make_recording(settings);
    run(*host, *recording, 4);
    EXPECT_EQ(recording->num_read_ahead(), 2);
    for (const int64_t step : {100, 101}) {
      for (Trainer* trainer : {host.get(), recording.get()})
        trainer->give_batches(fetch_batches(*trainer, step));
      run(*host, *recording, 1);
    }
    EXPECT_EQ(recording->num_read_ahead(), 2);
    run(*host, *recording, 3);
    EXPECT_EQ(recording->num_read_ahead(), 4);
    expect_same_state(*host, *recording);
  }
}

/// Validation, saving and observing come between steps that repeat.
TEST_F(StepRuns, GiveWayToWhatComesBetween) {
  Settings settings = testing::tiny_settings(folder_);
  settings.train.steps = 20;
  settings.data.validation_fraction = 0.1;
  const auto host = make_trainer(settings);
  Settings own = settings;
  own.run.folder = folder_.file("recording");
  const auto recording = make_recording(own);
  EXPECT_EQ(recording->validate(), host->validate());
  run(*host, *recording, 1);
  EXPECT_EQ(recording->validate(), host->validate());
  run(*host, *recording, 2);
  EXPECT_EQ(recording->num_read_ahead(), 1);
  EXPECT_EQ(recording->validate(), host->validate());
  int num_nodes = 0;
  std::vector<std::string> updates;
  std::vector<std::string> tasks;
  const StepOutcome observed =
      recording->step({.nodes = [&](const NodeEvent&) { ++num_nodes; },
                       .tasks = [&](const Task& task, auto, auto) { tasks.push_back(task.name); }},
                      [&](std::string_view name, auto, auto) { updates.emplace_back(name); });
  EXPECT_EQ(observed.loss, host->step().loss);
  EXPECT_GT(num_nodes, 0);
  EXPECT_NE(std::ranges::find(updates, "adamw"), updates.end());
  EXPECT_EQ(tasks.size(), recording->plan().tasks.size());
  run(*host, *recording, 2);
  EXPECT_EQ(recording->num_read_ahead(), 2) << "nothing is read beside an observed step";
  recording->save("");
  const auto continued = make_recording(own);
  EXPECT_EQ(continued->position().step, 6);
  run(*host, *continued, 3);
  expect_same_state(*host, *continued);
}

/// Sets a weight to NaN; returns what it was.
std::vector<float> spoil(Trainer& trainer, size_t parameter) {
  const Tensor weight = trainer.state().parameters().all()[parameter].weight;
  std::vector<float> before(static_cast<size_t>(weight.num_elements()));
  Device& device = trainer.backend().device();
  device.copy(before.data(), weight.data, weight.num_bytes());
  const std::vector<float> bad(before.size(), NAN);
  device.copy(weight.data, bad.data(), weight.num_bytes());
  return before;
}

/// A step whose loss or gradients are not finite changes nothing, also where it is repeated.
TEST_F(StepRuns, SkipWhatIsNotFinite) {
  Settings settings = testing::tiny_settings(folder_);
  settings.train.steps = 20;
  settings.train.on_nonfinite = NonFinite::kSkip;
  const auto host = make_trainer(settings);
  const auto recording = make_recording(settings);
  run(*host, *recording, 3);
  for (Trainer* trainer : {host.get(), recording.get()}) {
    const std::vector<float> before = spoil(*trainer, 0);
    const StepOutcome outcome = trainer->step();
    EXPECT_TRUE(outcome.skipped());
    EXPECT_TRUE(std::isnan(outcome.update.grad_norm));
    EXPECT_EQ(outcome.update.clip_factor, 1);
    EXPECT_EQ(trainer->position().skipped_steps, 1);
    const Tensor weight = trainer->state().parameters().all()[0].weight;
    trainer->backend().device().copy(weight.data, before.data(), weight.num_bytes());
  }
  run(*host, *recording, 3);
  expect_same_state(*host, *recording);
}

TEST_F(StepRuns, StopAtWhatIsNotFinite) {
  Settings settings = testing::tiny_settings(folder_);
  const auto recording = make_recording(settings);
  for (int i = 0; i < 3; ++i) recording->step();
  spoil(*recording, 0);
  EXPECT_THROW(recording->step(), UserError);
  EXPECT_EQ(recording->position().step, 3);
}

class StepFamilies : public ::testing::TestWithParam<testing::OptionFamily> {};

TEST_P(StepFamilies, GiveTheBitsOfTheHost) {
  const testing::TemporaryFolder folder;
  Settings settings = testing::settings_of(GetParam());
  settings.run.device = DeviceChoice::kCpu;
  settings.train.steps = settings.schedule.num_steps = 4;
  settings.run.folder = folder.file("run");
  settings.data.tokens = folder.file("tokens");
  testing::write_tokens(settings);
  const bool records = settings.model.moe.balance_scope != BalanceTokens::kModel;
  const auto world = make_single_world();
  const auto make = [&](const DeviceChooser& choose) {
    auto trainer =
        std::make_unique<Trainer>(settings, open_training_data(settings), *world, choose);
    trainer->resume("");
    return trainer;
  };
  const auto host = make(choose_host);
  ::testing::internal::CaptureStderr();
  const auto recording = make(testing::choose_recording_shadow);
  for (int i = 0; i < 4; ++i) {
    const StepOutcome expected = host->step();
    const StepOutcome found = recording->step();
    ASSERT_EQ(found.loss, expected.loss) << "step " << i + 1;
    ASSERT_EQ(found.update.grad_norm, expected.update.grad_norm) << "step " << i + 1;
  }
  const std::string notes = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(notes.find("steps are not recorded") == std::string::npos, records) << notes;
  expect_same_state(*host, *recording);
}

INSTANTIATE_TEST_SUITE_P(All, StepFamilies,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     2)),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera
