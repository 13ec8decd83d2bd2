// Runs whose activations wait in the host's memory, beside runs that keep them.
#include <gmock/gmock.h>

#include <algorithm>

#include "core/out_of_memory.h"
#include "core/testing/case_share.h"
#include "core/testing/host_like_device.h"
#include "ops/registry/cpu_kernels.h"
#include "train/memory/planned_rank.h"
#include "train/setup/size_check.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;

int64_t count_copies(const StepPlan& plan) {
  return std::ranges::count(plan.tasks, TaskAction::kStore, &Task::action);
}

class Offload : public ::testing::TestWithParam<NamedLayout> {
 protected:
  Settings settings() const {
    Settings settings = testing::settings_for_layouts(folder_.file(""));
    settings.model.num_layers = 5;
    settings.run.resume = ResumeMode::kNever;
    settings.run.folder = folder_.file("run");
    return settings;
  }

  const TemporaryFolder folder_;
};

/// On a device that spoils what is under way, too.
TEST_P(Offload, GivesTheBitsOfWhatStays) {
  const RunEnd kept = testing::run_steps(settings(), GetParam(), 2, false);
  for (const double rate : {50.0, 0.05}) {
    Settings offloaded = settings();
    offloaded.train.offload = {"all"};
    offloaded.train.offload_rate = rate;
    testing::expect_same_end(testing::run_steps(offloaded, GetParam(), 2, false), kept);
    testing::expect_same_end(
        testing::run_steps(offloaded, GetParam(), 2, false, testing::choose_shadow), kept);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Offload,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 0)),
    [](const auto& info) { return info.param.name; });

/// Pipelines, interleaved and not, recomputation, weight gradients apart, full sharding,
/// prediction.
TEST(RandomOffload, GivesTheBitsOfWhatStays) {
  const TemporaryFolder folder;
  int64_t num_copies = 0;
  for (uint64_t seed = 801; seed < 801 + testing::share_of_count<uint64_t>(20); ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 6);
    Settings& settings = layout.settings;
    settings.train.offload.clear();
    testing::prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    const NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    const RunEnd kept = testing::run_steps(settings, named, 2, false);
    settings.train.offload = {"all"};
    settings.train.offload_rate = seed % 2 == 0 ? 50 : 0.1;
    num_copies += count_copies(plan_step(settings, plan_rank(settings, 0, layout.num_ranks)));
    testing::expect_same_end(testing::run_steps(settings, named, 2, false, testing::choose_shadow),
                             kept);
  }
  EXPECT_GT(num_copies, testing::share_of_count(40));
}

Settings deep_settings() {
  Settings settings = without_data({});
  settings.model.vocab_size = 64;
  settings.model.hidden_size = 64;
  settings.model.num_layers = 12;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 64};
  settings.data.sequence_length = 64;
  settings.train.offload_rate = 500;
  settings.run.device = DeviceChoice::kCpu;
  return settings;
}

ActivationBytes activation_bytes(const std::vector<std::string>& offload) {
  Settings settings = deep_settings();
  settings.train.offload = offload;
  return plan_rank(settings, 0, 1).model.activation_bytes();
}

/// Over a fast way hardly more than two layers are on the device at a time.
TEST(OffloadMemory, FallsOnTheDeviceAndIsCountedOnTheHost) {
  const ActivationBytes kept = activation_bytes({});
  EXPECT_EQ(kept.offloaded, 0);
  const ActivationBytes all = activation_bytes({"all"});
  EXPECT_LT(all.saved, kept.saved * 4 / 12);
  EXPECT_GT(all.saved, kept.saved * 3 / 24);
  EXPECT_GT(all.offloaded, kept.saved * 8 / 12);
  EXPECT_LT(all.offloaded, kept.saved);
  const ActivationBytes some = activation_bytes({"all@2-4"});
  EXPECT_NEAR(static_cast<double>(some.offloaded), static_cast<double>(kept.saved) * 3 / 12,
              static_cast<double>(kept.saved) / 100);
  EXPECT_LT(some.saved, kept.saved * 11 / 12);
  const ActivationBytes named = activation_bytes({"expert_pre"});
  EXPECT_LT(named.saved, kept.saved);
  EXPECT_LT(named.offloaded, all.offloaded);
  EXPECT_GT(named.offloaded, 0);
}

/// What would have to come back before it is away stays, whatever a slow way carries.
TEST(OffloadMemory, SlowWaysOffloadLess) {
  Settings settings = deep_settings();
  settings.train.offload = {"all"};
  int64_t last = INT64_MAX;
  for (const double rate : {500.0, 30.0, 10.0, 0.01}) {
    settings.train.offload_rate = rate;
    const int64_t offloaded = plan_rank(settings, 0, 1).model.activation_bytes().offloaded;
    EXPECT_LT(offloaded, last) << rate;
    last = offloaded;
  }
  EXPECT_EQ(last, 0);
}

/// The last layer's backward pass follows at once.
TEST(OffloadMemory, TheLastLayerStays) {
  Settings settings = deep_settings();
  settings.train.offload = {"all@11"};
  const PlannedRank rank = plan_rank(settings, 0, 1);
  EXPECT_EQ(rank.model.activation_bytes().offloaded, 0);
  EXPECT_EQ(count_copies(plan_step(settings, rank)), 0);
}

/// Steps that a device repeats copy within what it repeats.
TEST(RecordedOffload, GivesTheBitsOfTheHost) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.num_layers = 6;
  settings.train.steps = 20;
  const auto host = testing::make_trainer(settings);
  settings.train.offload = {"all"};
  const auto world = make_single_world();
  TrainingData data = open_training_data(settings);
  Trainer recording(settings, std::move(data), *world, testing::choose_recording_shadow);
  recording.resume("");
  EXPECT_GT(count_copies(recording.plan()), 0);
  for (int i = 0; i < 5; ++i) {
    const StepOutcome expected = host->step();
    EXPECT_EQ(recording.step().loss, expected.loss) << "step " << i;
  }
  EXPECT_GT(recording.backend().control().num_operations, 0) << "steps were not recorded";
  testing::expect_same_state(*host, recording);
}

/// The host, whose memory cannot be pinned.
class Unpinnable final : public testing::HostLikeDevice {
 public:
  std::string name() const override { return "a test"; }
  std::byte* allocate_shared(int64_t num_bytes) override {
    return num_bytes > kMost ? nullptr : allocate(num_bytes);
  }

 private:
  static constexpr int64_t kMost = 1 << 15;  // scalars and the like
};

TEST(PinnedMemory, ThatCannotBeHadIsRefused) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.num_layers = 6;
  const auto make = [&] {
    const auto world = make_single_world();
    Settings own = settings;
    TrainingData data = open_training_data(own);
    const Trainer trainer(own, std::move(data), *world, [](const Settings&, World&) {
      return RankDevice{.backend =
                            Backend(std::make_shared<Unpinnable>(), nullptr, make_cpu_kernels())};
    });
  };
  EXPECT_NO_THROW(make());
  settings.train.offload = {"all"};
  EXPECT_THAT(make, ::testing::ThrowsMessage<OutOfMemory>(::testing::AllOf(
                        ::testing::HasSubstr("for offloaded activations cannot be had"),
                        ::testing::HasSubstr("name less in train.offload"),
                        ::testing::HasSubstr("ulimit -l"))));
  EXPECT_NO_THROW(require_pinnable(5, 5));
  EXPECT_THAT([] { require_pinnable(int64_t{6} << 30, int64_t{5} << 30); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("6 GiB")));
}

/// Losses of a validation between steps, which stores nothing.
TEST(OffloadValidation, IsThatOfWhatStays) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.num_layers = 4;
  settings.data.validation_fraction = 0.1;
  const auto kept = testing::make_trainer(settings);
  settings.train.offload = {"all"};
  const auto offloaded = testing::make_trainer(settings);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(offloaded->step().loss, kept->step().loss);
    EXPECT_EQ(offloaded->validate(), kept->validate());
  }
}

}  // namespace
}  // namespace tessera
