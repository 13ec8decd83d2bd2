// Runs whose optimizer state the host's threads update, beside runs whose device does.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "train/setup/replica_groups.h"
#include "train/testing/option_families.h"
#include "train/trainer/tests/host_state_testing.h"

namespace tessera {
namespace {

using testing::expect_same_state;
using ::testing::HasSubstr;
using testing::may_offload;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

void update_on_host(ShardSettings& shard) {
  shard.state_on_host = shard.updates_on_host = true;
}

class HostUpdatesOfLayouts : public ::testing::TestWithParam<NamedLayout> {
 protected:
  void SetUp() override {
    if (!may_offload(GetParam().shard, GetParam().num_ranks)) GTEST_SKIP() << "full sharding";
    settings_ = testing::settings_for_layouts(folder_.file(""));
  }

  const TemporaryFolder folder_;
  Settings settings_;
};

/// Buckets of few elements, so that many share the windows; on a device that spoils what is under
/// way, too, and whose memory the host's threads cannot reach.
TEST_P(HostUpdatesOfLayouts, GiveTheBitsOfTheDevices) {
  settings_.run.resume = ResumeMode::kNever;
  settings_.run.folder = folder_.file("run");
  settings_.train.max_grad_norm = 0.5;
  NamedLayout layout = GetParam();
  for (const int64_t bucket_bytes : {int64_t{1} << 12, int64_t{1} << 25}) {
    layout.shard = GetParam().shard;
    layout.shard.bucket_bytes = bucket_bytes;
    const RunEnd on_device = testing::run_steps(settings_, layout, 3, false);
    update_on_host(layout.shard);
    testing::expect_same_end(testing::run_steps(settings_, layout, 3, false), on_device);
    testing::expect_same_end(
        testing::run_steps(settings_, layout, 3, false, testing::choose_shadow), on_device);
  }
}

/// A run goes on from a checkpoint of the other, in both directions.
TEST_P(HostUpdatesOfLayouts, ContinueFromTheDevicesAndBack) {
  NamedLayout on_host = GetParam();
  update_on_host(on_host.shard);
  testing::expect_same_when_changed(settings_, folder_, GetParam(), on_host,
                                    testing::choose_shadow);
}

INSTANTIATE_TEST_SUITE_P(
    All, HostUpdatesOfLayouts,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 1)),
    [](const auto& info) { return info.param.name; });

/// All layouts, formats of the state, masters.
TEST(RandomHostUpdates, GiveTheBitsOfTheDevices) {
  const auto by_adamw = [](const Settings& settings) {
    return settings.optimizer_kind == OptimizerKind::kAdamW;
  };
  testing::expect_same_on_random_layouts(1101, 32, 3, by_adamw, update_on_host);
}

class HostUpdatesAlone : public ::testing::Test {
 protected:
  std::unique_ptr<Trainer> make(Settings settings, const DeviceChooser& choose) {
    TrainingData data = open_training_data(settings);
    auto trainer = std::make_unique<Trainer>(std::move(settings), std::move(data), *world_, choose);
    trainer->resume("");
    return trainer;
  }
  /// One that updates on the device, and the others, which do not, with the same bits.
  void expect_same_steps(Settings settings, int num_steps, bool releases = false) {
    settings.run.resume = ResumeMode::kNever;
    const auto expected = make(settings, choose_host);
    settings.shard.release_gradients = releases;
    update_on_host(settings.shard);
    for (const DeviceChooser& choose :
         {DeviceChooser(choose_host), DeviceChooser(testing::choose_shadow)}) {
      const auto found = make(settings, choose);
      for (int i = 0; i < num_steps; ++i) {
        if (found->position().step >= expected->position().step)
          outcomes_.push_back(expected->step());
        const StepOutcome& wanted = outcomes_.at(i);
        const StepOutcome outcome = found->step();
        ASSERT_EQ(outcome.loss, wanted.loss) << "step " << i + 1;
        EXPECT_EQ(outcome.skipped(), wanted.skipped());
        if (wanted.skipped()) continue;
        EXPECT_NEAR(outcome.update.grad_norm, wanted.update.grad_norm,
                    releases ? 1e-12 * wanted.update.grad_norm : 0);
      }
      expect_same_state(*expected, *found);
    }
    outcomes_.clear();
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<World> world_ = make_single_world();
  std::vector<StepOutcome> outcomes_;
};

/// What every update reads and writes of a weight: its own master, one beside it, part of one, or
/// none; moments in any format; gradients in BF16.
TEST_F(HostUpdatesAlone, GiveTheSameBitsInEveryFormat) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    for (const MasterKind master :
         {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone}) {
      if (precision == Precision::kF32 && master != MasterKind::kF32) continue;
      for (const MomentKind moment : {MomentKind::kF32, MomentKind::kBF16, MomentKind::kFp8}) {
        Settings settings = testing::tiny_settings(folder_);
        settings.train.precision = precision;
        settings.train.max_grad_norm = 0.3;
        settings.train.micro_batch = 1;
        settings.shard.bucket_bytes = 1 << 13;
        settings.optimizer.formats = {moment, moment, master};
        SCOPED_TRACE(fmt::format("{} {} {}", precision_name(precision), moment_name(moment),
                                 master_suffix(master)));
        expect_same_steps(settings, 3);
        if (precision == Precision::kF32) continue;
        settings.shard.gradients = DType::kBF16;
        expect_same_steps(settings, 3);
      }
    }
  }
}

TEST_F(HostUpdatesAlone, ReleaseGradientsWithTheSameBits) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Settings settings = testing::tiny_settings(folder_);
    settings.train.precision = precision;
    settings.train.max_grad_norm = 0;
    settings.train.micro_batch = 1;
    settings.parallel.schedule = PipelineKind::kGpipe;
    settings.model.num_layers = 5;
    expect_same_steps(settings, 4, /*releases=*/true);
  }
}

class HostUpdatesOfFamilies : public HostUpdatesAlone,
                              public ::testing::WithParamInterface<testing::OptionFamily> {};

TEST_P(HostUpdatesOfFamilies, GiveTheSameBits) {
  Settings settings = testing::settings_of(GetParam());
  if (settings.optimizer_kind != OptimizerKind::kAdamW) GTEST_SKIP() << "Muon";
  settings.run.device = DeviceChoice::kCpu;
  settings.run.folder = folder_.file("run");
  settings.data.tokens = folder_.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 3;
  settings.shard.state_on_host = settings.shard.updates_on_host = false;
  settings.shard.release_gradients = false;
  testing::write_tokens(settings);
  expect_same_steps(settings, 3);
}

INSTANTIATE_TEST_SUITE_P(All, HostUpdatesOfFamilies,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     1)),
                         [](const auto& info) { return std::string(info.param.name); });

/// Steps whose gradients overflow leave weights, moments and masters; the scale falls until one
/// updates.
TEST_F(HostUpdatesAlone, LeaveOutStepsThatAreNotFinite) {
  Settings settings = testing::tiny_settings(folder_);
  settings.train.precision = Precision::kFp16;
  settings.precision.loss_scaling.initial = 0x1p34;
  settings.shard.bucket_bytes = 1 << 13;
  settings.run.resume = ResumeMode::kNever;
  const auto first = make(settings, choose_host);
  EXPECT_TRUE(first->step().skipped());
  int64_t steps = 1;
  while (first->step().skipped()) ++steps;
  ASSERT_GT(steps, 1);
  expect_same_steps(settings, static_cast<int>(steps) + 2);
}

/// The same of BF16, whose weights are rounded masters and do not travel: those of such a step are
/// what they were, to the bit.
TEST_F(HostUpdatesAlone, LeaveWeightsWhoseMastersStay) {
  Settings settings = testing::tiny_settings(folder_);
  settings.train.precision = Precision::kBF16;
  settings.train.on_nonfinite = NonFinite::kSkip;
  settings.shard.bucket_bytes = 1 << 13;
  update_on_host(settings.shard);
  const auto trainer = make(settings, testing::choose_shadow);
  EXPECT_FALSE(trainer->step().skipped());
  const auto state_of = [&] {
    std::vector<std::byte> bytes;
    for (const auto& slices :
         {trainer->state().owned_model(), trainer->state().owned_optimizer()}) {
      for (const NamedSlice& slice : slices) {
        const HostTensor host(slice.tensor, HostTensor::Access::kRead);
        const auto* const data = static_cast<const std::byte*>(host.get().data);
        bytes.insert(bytes.end(), data, data + host.get().num_bytes());
      }
    }
    return bytes;
  };
  const auto spoil = [&](uint16_t bits) {
    const Tensor weight = trainer->state().parameters().all()[0].weight;
    const std::vector<uint16_t> values(static_cast<size_t>(weight.num_elements()), bits);
    std::vector<uint16_t> before(values.size());
    Device& device = trainer->backend().device();
    device.copy(before.data(), weight.data, weight.num_bytes());
    device.copy(weight.data, values.data(), weight.num_bytes());
    return before;
  };
  const auto expected = state_of();
  const std::vector<uint16_t> embedding = spoil(0x7fc0);  // NaN
  EXPECT_TRUE(trainer->step().skipped());
  trainer->state().wait_weights();
  // The spoilt weight came back from its master.
  EXPECT_EQ(state_of(), expected);
  EXPECT_EQ(spoil(0), embedding);
}

/// Nothing of the state takes the device's memory, and the host's is what was foreseen.
TEST_F(HostUpdatesAlone, TakeTheMemoryThatWasPredicted) {
  Settings settings = testing::tiny_settings(folder_);
  settings.train.precision = Precision::kBF16;
  const ModelState::Bytes on_device = make(settings, testing::choose_shadow)->state().bytes();
  settings.shard.state_on_host = true;
  const ModelState::Bytes streamed = make(settings, testing::choose_shadow)->state().bytes();
  settings.shard.updates_on_host = true;
  const auto trainer = make(settings, testing::choose_shadow);
  const ModelState::Bytes bytes = trainer->state().bytes();
  EXPECT_EQ(bytes, trainer->prediction().state);
  EXPECT_GE(bytes.on_host, streamed.on_host);
  EXPECT_LT(bytes.optimizer, streamed.optimizer);
  EXPECT_LE(on_device.optimizer - bytes.optimizer, streamed.on_host);
  EXPECT_GE(on_device.optimizer - bytes.optimizer, streamed.on_host * 9 / 10);
}

/// Each update is told, as one of the operator's calls.
TEST_F(HostUpdatesAlone, AreObserved) {
  Settings settings = testing::tiny_settings(folder_);
  settings.shard.bucket_bytes = 1 << 13;
  update_on_host(settings.shard);
  const auto trainer = make(settings, testing::choose_shadow);
  int64_t num_updates = 0;
  const UpdateObserver observer = [&](std::string_view what, auto begin, auto end) {
    EXPECT_LE(begin, end);
    num_updates += what == Optimizer::kOnHost ? 1 : 0;
  };
  const auto is_update = [](const Task& task) {
    return task.action == TaskAction::kUpdate && task.phase == TaskPhase::kStart;
  };
  const int64_t expected = std::ranges::count_if(trainer->plan().tasks, is_update);
  EXPECT_GT(expected, 3);
  trainer->step({}, observer);
  EXPECT_EQ(num_updates, 0);
  trainer->step({}, observer);  // behind whose waits the first step's are known
  EXPECT_EQ(num_updates, expected);
  trainer->state().wait_weights();
  EXPECT_EQ(num_updates, 2 * expected);
}

TEST_F(HostUpdatesAlone, AreRefusedWhereTheyCannotBe) {
  Settings settings = testing::tiny_settings(folder_);
  update_on_host(settings.shard);
  EXPECT_NO_THROW(validate(settings));
  EXPECT_NO_THROW(check_sharding(settings, Layout({}, 2)));
  settings.shard.scope = ShardScope::kFull;
  EXPECT_THAT([&] { check_sharding(settings, Layout({}, 2)); },
              ThrowsMessage<UserError>(HasSubstr("optim.offload does not go with")));
  settings.shard.scope = ShardScope::kState;
  settings.optimizer_kind = OptimizerKind::kMuon;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("set optim.update = \"device\"")));
  settings.optimizer_kind = OptimizerKind::kAdamW;
  settings.shard.state_on_host = false;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("set optim.offload = true")));
}

}  // namespace
}  // namespace tessera
