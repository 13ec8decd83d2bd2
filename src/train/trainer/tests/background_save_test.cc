#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <vector>

#include "checkpoint/snapshot.h"
#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/shadow_devices.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Weights of which a BF16 run keeps this beside its moments.
constexpr MasterKind kMasters[] = {MasterKind::kF32, MasterKind::kRemainder,
                                   MasterKind::kRemainder8, MasterKind::kNone};

class SavedBytes : public ::testing::TestWithParam<testing::NamedLayout> {
 protected:
  SavedBytes() { fs::create_directories(folder_); }
  ~SavedBytes() override { fs::remove_all(folder_); }

  Settings settings() const {
    Settings settings = testing::settings_for_layouts(folder_);
    settings.parallel = GetParam().parallel;
    settings.shard = GetParam().shard;
    settings.run.folder = (folder_ / "run").string();
    return settings;
  }
  static void train_on_ranks(const Settings& settings,
                             const std::function<void(Trainer&, const RunLayout&)>& use,
                             const DeviceChooser& choose = choose_host) {
    run_thread_world(GetParam().num_ranks, [&](World& world) {
      Settings own = settings;
      TrainingData data = open_training_data(own);
      Trainer trainer(own, std::move(data), world, choose);
      trainer.resume("");
      use(trainer, trainer.layout());
    });
  }

  /// Saves after the first step in the background, while two more go on.
  void save_beside(const Settings& settings, const DeviceChooser& choose = choose_host) const {
    train_on_ranks(
        settings,
        [](Trainer& trainer, const RunLayout&) {
          trainer.step();
          ASSERT_TRUE(trainer.saves_in_background());
          const auto save = trainer.begin_save("");
          trainer.step();
          trainer.step();
          save->ready();
          save->wait();
          EXPECT_GT(save->result().num_bytes, 0);
          trainer.state().wait_weights();  // other ranks count on this one's part
        },
        choose);
  }
  /// Saves after the first step, while nothing goes on.
  void save_waiting(Settings settings) const {
    settings.run.folder = (folder_ / "waiting").string();
    settings.run.background_save = false;
    train_on_ranks(settings, [](Trainer& trainer, const RunLayout&) {
      trainer.step();
      EXPECT_FALSE(trainer.saves_in_background());
      trainer.save("");
    });
  }
  void expect_same_files(const std::string& found, const std::string& expected) const {
    const fs::path step = fs::path("checkpoints") / "step-00000001";
    int num_files = 0;
    for (const auto& entry : fs::directory_iterator(folder_ / found / step)) {
      if (entry.path().extension() != ".safetensors") continue;
      ++num_files;
      EXPECT_TRUE(read_text_file(entry.path()) ==
                  read_text_file(folder_ / expected / step / entry.path().filename()))
          << entry.path();
    }
    EXPECT_GE(num_files, 2);
  }
  Settings saving_settings() const {
    Settings settings = this->settings();
    settings.run.checkpoint_interval = 1;
    settings.run.keep_last = 0;
    return settings;
  }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("tessera-saved-bytes-test-");
};

/// The copy that saves are written from has room for what each rank saves, and hardly more.
TEST_P(SavedBytes, AreCountedBeforeTheyAreTaken) {
  Settings settings = this->settings();
  const auto check = [&](Trainer& trainer, const RunLayout& layout) {
    const auto model = trainer.state().owned_model();
    const auto optimizer = trainer.state().owned_optimizer();
    const int64_t actual = Snapshot::count_bytes(model) + Snapshot::count_bytes(optimizer);
    const int64_t counted = ModelState::count_saved_bytes(settings, layout);
    EXPECT_LE(actual, counted) << "rank " << layout.rank();
    // At most a gap before each tensor and an end of a row that another rank has.
    const auto num_tensors = std::ssize(trainer.state().parameters().all());
    EXPECT_LE(counted, actual + 10 * num_tensors * kAlignment) << "rank " << layout.rank();
  };
  train_on_ranks(settings, check);
  settings.train.precision = Precision::kBF16;
  settings.optimizer.formats = {.first_moment = MomentKind::kBF16,
                                .second_moment = MomentKind::kF32};
  for (const MasterKind master : kMasters) {
    settings.optimizer.formats.master = master;
    train_on_ranks(settings, check);
  }
  if (settings.parallel.layout.tp > 1) return;  // whose small parts are no blocks
  settings.optimizer.formats = {MomentKind::kFp8, MomentKind::kF16, MasterKind::kRemainder8};
  train_on_ranks(settings, check);
}

TEST_P(SavedBytes, AreThoseOfTheMomentOfTheSave) {
  const Settings settings = saving_settings();
  save_beside(settings);
  save_waiting(settings);
  expect_same_files("run", "waiting");
}

/// Copies that end as late as they may, beside steps that change what they copy.
TEST_P(SavedBytes, AreThoseOfTheMomentOnADeviceThatCopiesBesideItsWork) {
  Settings settings = saving_settings();
  save_waiting(settings);
  std::vector<testing::NamedLayout> variants = {GetParam()};
  if (settings.shard.scope != ShardScope::kFull) {
    variants.push_back(GetParam());
    variants.back().name = "state-on-host";
    variants.back().shard.state_on_host = true;
    variants.push_back(variants.back());
    variants.back().name = "updates-on-host";
    variants.back().shard.updates_on_host = true;
  }
  for (const testing::NamedLayout& variant : variants) {
    settings.shard = variant.shard;
    settings.run.folder = (folder_ / variant.name).string();
    save_beside(settings, testing::choose_shadow);
    expect_same_files(variant.name, "waiting");
    if (GetParam().num_ranks > 1) continue;
    settings.run.folder += "-recorded";
    save_beside(settings, testing::choose_recording_shadow);
    expect_same_files(variant.name + "-recorded", "waiting");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SavedBytes,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 2)),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
