// Runs whose optimizer state is in the host's memory, and runs that release gradients, beside runs
// that do neither.
#include <gmock/gmock.h>

#include <cmath>

#include "train/setup/replica_groups.h"
#include "train/testing/option_families.h"
#include "train/trainer/tests/host_state_testing.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using testing::expect_same_state;
using ::testing::HasSubstr;
using testing::make_trainer;
using testing::may_offload;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

class HostState : public ::testing::TestWithParam<NamedLayout> {};

/// Buckets of few elements, so that many share the windows; on a device that spoils what is under
/// way, too.
TEST_P(HostState, GivesTheBitsOfTheDevices) {
  if (!may_offload(GetParam().shard, GetParam().num_ranks)) GTEST_SKIP() << "full sharding";
  const TemporaryFolder folder;
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder.file("run");
  NamedLayout layout = GetParam();
  for (const int64_t bucket_bytes : {int64_t{1} << 12, int64_t{1} << 25}) {
    layout.shard.bucket_bytes = bucket_bytes;
    layout.shard.state_on_host = false;
    const RunEnd on_device = testing::run_steps(settings, layout, 3, false);
    layout.shard.state_on_host = true;
    testing::expect_same_end(testing::run_steps(settings, layout, 3, false), on_device);
    testing::expect_same_end(testing::run_steps(settings, layout, 3, false, testing::choose_shadow),
                             on_device);
  }
}

/// A run goes on from a checkpoint of the other, in both directions.
TEST_P(HostState, ContinuesFromTheDevicesAndBack) {
  if (!may_offload(GetParam().shard, GetParam().num_ranks)) GTEST_SKIP() << "full sharding";
  const TemporaryFolder folder;
  NamedLayout on_device = GetParam();
  on_device.shard.state_on_host = false;
  NamedLayout on_host = GetParam();
  on_host.shard.state_on_host = true;
  testing::expect_same_when_changed(testing::settings_for_layouts(folder.file("")), folder,
                                    on_device, on_host, choose_host);
}

INSTANTIATE_TEST_SUITE_P(
    All, HostState,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 1)),
    [](const auto& info) { return info.param.name; });

/// All layouts and optimizers, formats of their state, masters.
TEST(RandomHostState, GivesTheBitsOfTheDevices) {
  testing::expect_same_on_random_layouts(
      901, 20, 2, [](const Settings& /*all*/) { return true; },
      [](ShardSettings& shard) { shard.state_on_host = true; });
}

/// A run on one rank whose steps need nothing that released gradients lack, and whose sums come in
/// their order: a tied head's are all there before the first of the embedding.
Settings release_settings(const TemporaryFolder& folder) {
  Settings settings = testing::tiny_settings(folder);
  settings.train.micro_batch = 1;
  settings.train.max_grad_norm = 0;
  settings.parallel.schedule = PipelineKind::kGpipe;
  return settings;
}

class ReleasedRuns : public ::testing::Test {
 protected:
  std::unique_ptr<Trainer> make(Settings settings, const DeviceChooser& choose) {
    TrainingData data = open_training_data(settings);
    auto trainer = std::make_unique<Trainer>(std::move(settings), std::move(data), *world_, choose);
    trainer->resume("");
    return trainer;
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<World> world_ = make_single_world();
};

class ReleasedGradients : public ReleasedRuns,
                          public ::testing::WithParamInterface<testing::OptionFamily> {};

/// With state on the device and on the host, in steps that a device repeats, on a device that
/// spoils what is under way. The norms are sums in another order.
TEST_P(ReleasedGradients, GiveTheBitsOfThoseThatStay) {
  Settings settings = testing::settings_of(GetParam());
  settings.run.device = DeviceChoice::kCpu;
  settings.run.folder = folder_.file("run");
  settings.data.tokens = folder_.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 4;
  settings.train.max_grad_norm = 0;
  settings.parallel.split_weights = false;
  // Multi-token prediction's embeddings come before the model's, those of all micro-batches.
  if (settings.model.mtp_layers > 0) settings.train.micro_batch = settings.train.global_batch;
  settings.parallel.schedule = PipelineKind::kGpipe;
  settings.shard.release_gradients = settings.shard.state_on_host = false;
  settings.shard.updates_on_host = false;
  settings.shard.gradients = DType::kF32;
  settings.qk_clip = 0;
  testing::write_tokens(settings);
  const auto kept = make(settings, choose_host);
  settings.shard.release_gradients = true;
  const auto released = make(settings, choose_host);
  settings.shard.state_on_host = true;
  ::testing::internal::CaptureStderr();
  const auto repeated = make(settings, testing::choose_recording_shadow);
  for (int i = 0; i < 4; ++i) {
    const StepOutcome expected = kept->step();
    for (Trainer* trainer : {released.get(), repeated.get()}) {
      const StepOutcome found = trainer->step();
      ASSERT_EQ(found.loss, expected.loss) << "step " << i + 1;
      EXPECT_NEAR(found.update.grad_norm, expected.update.grad_norm,
                  1e-12 * expected.update.grad_norm);
      EXPECT_EQ(trainer->expert_loads(), kept->expert_loads());
    }
  }
  const std::string notes = ::testing::internal::GetCapturedStderr();
  const bool records = settings.model.moe.balance_scope != BalanceTokens::kModel;
  EXPECT_EQ(notes.find("steps are not recorded") == std::string::npos, records) << notes;
  expect_same_state(*kept, *released);
  expect_same_state(*kept, *repeated);
}

INSTANTIATE_TEST_SUITE_P(All, ReleasedGradients,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     1)),
                         [](const auto& info) { return std::string(info.param.name); });

/// Muon's matrices, state in fewer bits.
TEST_F(ReleasedRuns, GiveTheBitsOfThoseThatStayToOtherOptimizers) {
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kMuon}) {
    for (const MasterKind master : {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kNone}) {
      Settings settings = release_settings(folder_);
      settings.run.resume = ResumeMode::kNever;
      settings.train.precision = Precision::kBF16;
      settings.optimizer_kind = kind;
      settings.optimizer.formats = {
          .first_moment = MomentKind::kBF16, .second_moment = MomentKind::kBF16, .master = master};
      const auto kept = make(settings, choose_host);
      settings.shard.release_gradients = settings.shard.state_on_host = true;
      const auto released = make(settings, testing::choose_shadow);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(released->step().loss, kept->step().loss);
      expect_same_state(*kept, *released);
    }
  }
}

TEST(ReleasedGradientsMemory, IsThatOfALayerAndCountedBefore) {
  const TemporaryFolder folder;
  Settings settings = release_settings(folder);
  settings.model.num_layers = 8;
  const ModelState::Bytes kept = make_trainer(settings)->state().bytes();
  settings.shard.release_gradients = true;
  const auto released = make_trainer(settings);
  const ModelState::Bytes bytes = released->state().bytes();
  EXPECT_EQ(bytes, released->prediction().state);
  int64_t ends = 0;
  for (const ModelParameter& parameter : released->state().parameters().all()) {
    if (!parameter.spec.layer) ends += align_up(parameter.grad.num_bytes());
  }
  EXPECT_EQ(8 * (bytes.gradients - ends), kept.gradients - ends);
  settings.shard.state_on_host = true;
  const auto on_host = make_trainer(settings);
  EXPECT_EQ(on_host->state().bytes(), on_host->prediction().state);
  EXPECT_EQ(on_host->state().bytes().on_host, bytes.optimizer);
  // Two windows, each with what a layer, or an end of the model, has.
  EXPECT_LT(on_host->state().bytes().optimizer, bytes.optimizer / 2);
}

/// A step whose gradients are not finite leaves the weights that they would spoil.
TEST_F(ReleasedRuns, StopARunThatIsNotFinite) {
  Settings settings = release_settings(folder_);
  settings.shard.release_gradients = true;
  const auto trainer = make(settings, testing::choose_recording_shadow);
  for (int i = 0; i < 3; ++i) trainer->step();
  const Tensor weight = trainer->state().parameters().all()[0].weight;
  const std::vector<float> bad(static_cast<size_t>(weight.num_elements()), NAN);
  trainer->backend().device().copy(weight.data, bad.data(), weight.num_bytes());
  EXPECT_THAT([&] { trainer->step(); },
              ThrowsMessage<UserError>(HasSubstr("layers with finite gradients were updated")));
  for (const NamedSlice& slice : trainer->state().owned_model()) {
    if (slice.name == "embedding.weight") continue;
    const HostTensor host(slice.tensor, HostTensor::Access::kRead);
    for (const float value : host.get().span<float>()) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST_F(ReleasedRuns, GoOnFromACheckpointWithTheSameBits) {
  Settings settings = release_settings(folder_);
  const auto kept = make_trainer(settings);
  for (int i = 0; i < 5; ++i) kept->step();
  settings.shard.release_gradients = settings.shard.state_on_host = true;
  settings.run.folder = folder_.file("released");
  const auto first = make(settings, testing::choose_recording_shadow);
  for (int i = 0; i < 3; ++i) first->step();
  first->save("");
  const auto second = make(settings, testing::choose_recording_shadow);
  EXPECT_EQ(second->position().step, 3);
  for (int i = 0; i < 2; ++i) second->step();
  expect_same_state(*kept, *second);
}

TEST_F(ReleasedRuns, RefuseWhatNeedsAllOfThem) {
  Settings settings = release_settings(folder_);
  settings.shard.release_gradients = true;
  EXPECT_NO_THROW(validate(settings));
  const auto refuses = [&](const auto& change, const char* message) {
    Settings changed = settings;
    change(changed);
    EXPECT_THAT([&] { validate(changed); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  refuses([](Settings& s) { s.train.max_grad_norm = 1; }, "set train.max_grad_norm = 0");
  refuses([](Settings& s) { s.parallel.split_weights = true; }, "parallel.split_weights is set");
  refuses([](Settings& s) { s.train.on_nonfinite = NonFinite::kSkip; }, "\"stop\"");
  EXPECT_NO_THROW(check_sharding(settings, Layout({}, 2)));
  EXPECT_THAT([&] { check_sharding(settings, Layout({.pp = 2}, 2)); },
              ThrowsMessage<UserError>(HasSubstr("set parallel.pp = 1")));
  settings.shard.scope = ShardScope::kNone;
  EXPECT_NO_THROW(check_sharding(settings, Layout({}, 1)));
  EXPECT_THAT([&] { check_sharding(settings, Layout({}, 2)); },
              ThrowsMessage<UserError>(HasSubstr("is for optim.shard = \"state\"")));
  settings.shard = {.scope = ShardScope::kFull, .state_on_host = true};
  EXPECT_THAT([&] { check_sharding(settings, Layout({}, 2)); },
              ThrowsMessage<UserError>(HasSubstr("optim.offload does not go with")));
  settings.shard = {.release_gradients = true};
  EXPECT_THAT([&] { verify_layout({.settings = settings}); },
              ThrowsMessage<UserError>(HasSubstr("optim.release_gradients")));
}

}  // namespace
}  // namespace tessera
