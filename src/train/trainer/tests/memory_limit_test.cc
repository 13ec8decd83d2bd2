// Runs within a budget of memory, beside runs without one.
#include <gmock/gmock.h>

#include <algorithm>
#include <mutex>

#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;

/// The most that a rank takes where all that may run twice does, and some for the bounds of
/// documents that only data knows.
int64_t recomputed_bytes(Settings settings, int64_t num_ranks, const Backend& backend) {
  settings.train.recompute = {"all"};
  settings.train.memory_limit = "1000TiB";
  constexpr int64_t kBounds = 4096;
  int64_t most = 0;
  const auto choice = plan_policy(settings, num_ranks, backend, batch_shape(settings));
  for (const ChosenStage& stage : choice->stages) most = std::max(most, stage.kept.bytes());
  return most + kBounds;
}

/// Layouts that have little in common: each is planned several times. Random ones are below.
std::vector<NamedLayout> every_third_layout(size_t first) {
  const std::vector<NamedLayout> all = testing::layouts_for_checkpoints();
  std::vector<NamedLayout> some;
  for (size_t i = first; i < all.size(); i += 3) some.push_back(all[i]);
  return some;
}

class MemoryLimit : public ::testing::TestWithParam<NamedLayout> {
 protected:
  Settings settings() const {
    Settings settings = testing::settings_for_layouts(folder_.file(""));
    settings.model.num_layers = 5;
    settings.run.resume = ResumeMode::kNever;
    settings.run.folder = folder_.file("run");
    return settings;
  }
  Settings limited(const Settings& settings, const Backend& backend) const {
    Settings own = settings;
    own.parallel = GetParam().parallel;
    own.shard = GetParam().shard;
    const int64_t bytes = recomputed_bytes(own, GetParam().num_ranks, backend);
    Settings result = settings;
    result.train.memory_limit = fmt::format("{}B", bytes);
    return result;
  }

  const TemporaryFolder folder_;
};

/// On the host and on a device that can offload.
TEST_P(MemoryLimit, GivesTheBitsOfWhatStays) {
  const RunEnd kept = testing::run_steps(settings(), GetParam(), 2, false);
  testing::expect_same_end(
      testing::run_steps(limited(settings(), make_cpu_kernels()), GetParam(), 2, false), kept);
  const Backend device = testing::make_shadow_backend(make_cpu_kernels());
  testing::expect_same_end(
      testing::run_steps(limited(settings(), device), GetParam(), 2, false, testing::choose_shadow),
      kept);
}

INSTANTIATE_TEST_SUITE_P(All, MemoryLimit,
                         ::testing::ValuesIn(testing::few_of_cases(every_third_layout(1))),
                         [](const auto& info) { return info.param.name; });

TEST(RandomMemoryLimit, GivesTheBitsOfWhatStays) {
  const TemporaryFolder folder;
  const int most_ranks = testing::kCaseShare == 1 ? 6 : 2;
  for (uint64_t seed = 901; seed < 901 + testing::few_of_count<uint64_t>(8); ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, most_ranks);
    Settings& settings = layout.settings;
    settings.train.offload.clear();
    settings.train.recompute.clear();
    testing::prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    const NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    const RunEnd kept = testing::run_steps(settings, named, 2, false);
    const Backend device = testing::make_shadow_backend(make_cpu_kernels());
    settings.train.memory_limit =
        fmt::format("{}B", recomputed_bytes(settings, layout.num_ranks, device));
    testing::expect_same_end(testing::run_steps(settings, named, 2, false, testing::choose_shadow),
                             kept);
  }
}

/// One rank: the limit is kept to, something was chosen for it, and an explicit configuration of
/// the same has the same plan.
TEST(OneRankMemoryLimit, IsKeptToByAPlanThatCanBeWrittenDown) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.num_layers = 4;
  settings.run.resume = ResumeMode::kNever;
  const auto kept = testing::make_trainer(settings);
  const int64_t limit = recomputed_bytes(kept->settings(), 1, make_cpu_kernels());
  Settings limited = settings;
  limited.train.memory_limit = fmt::format("{}B", limit);
  const auto trainer = testing::make_trainer(limited);
  ASSERT_TRUE(trainer->policy_choice().has_value());
  EXPECT_THAT(trainer->policy_choice()->recompute, Not(IsEmpty()));
  EXPECT_THAT(trainer->policy_choice()->offload, IsEmpty()) << "the host has one memory";
  const MemoryPrediction& prediction = trainer->prediction();
  const int64_t own = prediction.total() - prediction.program;
  EXPECT_LE(own, limit);
  EXPECT_LT(own, kept->prediction().total() - kept->prediction().program);
  Settings pasted = settings;
  apply(*trainer->policy_choice(), pasted.train);
  const auto explicit_run = testing::make_trainer(pasted);
  EXPECT_EQ(explicit_run->prediction().activations.total(), prediction.activations.total());
  EXPECT_EQ(explicit_run->plan().tasks.size(), trainer->plan().tasks.size());
  for (int i = 0; i < 4; ++i) {
    const double loss = kept->step().loss;
    EXPECT_EQ(trainer->step().loss, loss);
    EXPECT_EQ(explicit_run->step().loss, loss);
  }
  testing::expect_same_state(*kept, *trainer);
  testing::expect_same_state(*kept, *explicit_run);
}

/// All ranks throw, with the same message.
TEST(SeveralRanksMemoryLimit, IsRefusedOnAll) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.train.memory_limit = "100KiB";
  settings.run.resume = ResumeMode::kNever;
  {
    Settings own = settings;
    open_training_data(own);  // which writes the tokens
  }
  std::mutex mutex;
  std::vector<std::string> refusals;
  run_thread_world(2, [&](World& world) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    try {
      const Trainer trainer(own, std::move(data), world, choose_host);
    } catch (const UserError& error) {
      const std::lock_guard lock(mutex);
      refusals.emplace_back(error.what());
    }
  });
  ASSERT_THAT(refusals, SizeIs(2));
  for (const std::string& refusal : refusals)
    EXPECT_THAT(refusal, HasSubstr("the least that training can do with"));
}

/// Shadow devices whose memory is so large.
DeviceChooser choose_shadow_of(int64_t num_bytes) {
  return [num_bytes](const Settings& settings, World& host) {
    RankDevice device = testing::choose_shadow(settings, host);
    device.memory = num_bytes;
    return device;
  };
}

/// The most that a rank takes with these, which are not chosen.
int64_t most_bytes(Settings settings, const NamedLayout& layout, const std::string& recompute) {
  settings.parallel = layout.parallel;
  settings.shard = layout.shard;
  if (!recompute.empty()) settings.train.recompute = {recompute};
  settings.train.memory_limit = "none";
  std::mutex mutex;
  int64_t most = 0;
  run_thread_world(layout.num_ranks, [&](World& world) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    const Trainer trainer(own, std::move(data), world, testing::choose_shadow);
    const std::lock_guard lock(mutex);
    most = std::max(most, trainer.prediction().total());
  });
  return most;
}

class LayoutDeviceLimit : public ::testing::TestWithParam<NamedLayout> {};

/// A device that has no room for everything trains with the bits of one that has.
TEST_P(LayoutDeviceLimit, GivesTheBitsOfWhatStays) {
  const TemporaryFolder folder;
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.model.num_layers = 3;
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder.file("run");
  settings.run.cuda_graphs = GraphMode::kOff;  // which would take more than this model keeps
  const int64_t kept = most_bytes(settings, GetParam(), "");
  const int64_t least = most_bytes(settings, GetParam(), "all");
  ASSERT_LT(least, kept);
  const auto run = [&](int64_t memory) {
    return testing::run_steps(settings, GetParam(), 2, false, choose_shadow_of(memory));
  };
  const RunEnd all_fits = run(kept);
  testing::expect_same_end(run((kept + least) / 2), all_fits);
}

INSTANTIATE_TEST_SUITE_P(All, LayoutDeviceLimit,
                         ::testing::ValuesIn(testing::share_of_cases(every_third_layout(0), 0)),
                         [](const auto& info) { return info.param.name; });

class OneRankDeviceLimit : public ::testing::Test {
 protected:
  std::unique_ptr<Trainer> make(const Settings& settings, int64_t memory) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    return std::make_unique<Trainer>(own, std::move(data), *world_, choose_shadow_of(memory));
  }
  Settings settings() const {
    Settings settings = testing::tiny_settings(folder_);
    settings.model.num_layers = 8;
    settings.data.sequence_length = 256;
    settings.run.resume = ResumeMode::kNever;
    return settings;
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<World> world_ = make_single_world();
};

TEST_F(OneRankDeviceLimit, ChoosesOnlyWhereThatIsNeeded) {
  constexpr int64_t kUnknown = 0;
  const auto kept = make(settings(), kUnknown);
  const int64_t bytes = kept->prediction().total();
  const auto fits = make(settings(), bytes);
  EXPECT_FALSE(fits->policy_choice().has_value());
  EXPECT_EQ(fits->prediction().total(), bytes);
  const auto chosen = make(settings(), bytes - 1);
  ASSERT_TRUE(chosen->policy_choice().has_value());
  EXPECT_THAT(chosen->policy_choice()->entries, Not(IsEmpty()));
  EXPECT_TRUE(chosen->policy_choice()->limit.is_of_device());
  EXPECT_LT(chosen->prediction().total(), bytes);
  // What is written down has the same plan, and nothing is chosen beside it.
  Settings pasted = settings();
  ConfigSchema schema = make_schema(pasted);
  schema.load_toml_text(write_toml(*chosen->policy_choice()), "memory.toml");
  EXPECT_EQ(pasted.train.recompute, chosen->policy_choice()->recompute);
  EXPECT_EQ(pasted.train.offload, chosen->policy_choice()->offload);
  const auto written = make(pasted, bytes - 1);
  EXPECT_FALSE(written->policy_choice().has_value());
  EXPECT_EQ(written->prediction().total(), chosen->prediction().total());
  for (int i = 0; i < 3; ++i) {
    const double loss = kept->step().loss;
    EXPECT_EQ(chosen->step().loss, loss);
    EXPECT_EQ(written->step().loss, loss);
  }
}

/// Where the configuration says what is recomputed, or that nothing is to be chosen.
TEST_F(OneRankDeviceLimit, LeavesWhatIsGiven) {
  Settings given = settings();
  const int64_t bytes = make(given, 0)->prediction().total();
  given.train.memory_limit = "none";
  EXPECT_THAT([&] { make(given, bytes - 1); },
              ThrowsMessage<UserError>(HasSubstr("out of memory: training needs")));
  given.train.memory_limit = "auto";
  given.train.recompute = {"attn_norm"};
  EXPECT_THAT([&] { make(given, bytes / 2); },
              ThrowsMessage<UserError>(HasSubstr("which a train.memory_limit chooses")));
  EXPECT_FALSE(make(given, bytes)->policy_choice().has_value());
}

TEST_F(OneRankDeviceLimit, RefusesWhatCannotBeHad) {
  const int64_t bytes = make(settings(), 0)->prediction().total();
  EXPECT_THAT([&] { make(settings(), bytes / 2); },
              ThrowsMessage<UserError>(::testing::AllOf(
                  HasSubstr("out of memory: shadow has"), HasSubstr("weights"),
                  HasSubstr("the least that training can do with"), HasSubstr("Use a smaller"))));
}

TEST(CheckedMemoryLimit, IsRefusedBeforeAnythingIsOpened) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.vocab_size = 256;
  settings.train.memory_limit = "1KiB";
  EXPECT_THAT([&] { check_sized_model(settings, 1); },
              ThrowsMessage<UserError>(HasSubstr("the least that training can do with")));
  settings.train.memory_limit = "64";
  EXPECT_THAT([&] { validate(settings); }, ThrowsMessage<UserError>(HasSubstr("has no unit")));
}

}  // namespace
}  // namespace tessera
