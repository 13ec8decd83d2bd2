// Runs whose ranks are lost and go on from copies in the ranks' memory.
#include "train/trainer/peer_copies.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>

#include "comm/thread/thread_world.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/shadow_devices.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr const char* kMemory = "/dev/shm";

class PeerRuns : public ::testing::Test {
 protected:
  PeerRuns() {
    fs::create_directories(folder_);
    fs::create_directories(memory_);
  }
  ~PeerRuns() override {
    fs::remove_all(folder_);
    fs::remove_all(memory_);
  }

  Settings settings(const std::string& run, const testing::NamedLayout& layout) const {
    Settings settings = testing::settings_for_layouts(folder_);
    settings.parallel = layout.parallel;
    settings.shard = layout.shard;
    settings.train.steps = 100;
    settings.run.folder = (folder_ / run).string();
    settings.peer = {.copy = true, .interval = 1, .folder = memory_.string()};
    return settings;
  }
  static void on_ranks(const Settings& settings, int64_t num_ranks,
                       const std::function<void(Trainer&, const std::optional<ResumedRun>&)>& use,
                       const DeviceChooser& choose = choose_host) {
    run_thread_world(num_ranks, [&](World& world) {
      Settings own = settings;
      TrainingData data = open_training_data(own);
      Trainer trainer(own, std::move(data), world, choose);
      const auto resumed = trainer.resume("");
      use(trainer, resumed);
    });
  }
  /// Saves after the first step, copies after the second and third, and is lost behind the fourth.
  static void run_until_lost(const Settings& settings, int64_t num_ranks,
                             const DeviceChooser& choose = choose_host) {
    on_ranks(
        settings, num_ranks,
        [](Trainer& trainer, const auto&) {
          for (int step = 1; step <= 4; ++step) {
            trainer.step();
            if (step == 1) trainer.save("");
            if (step == 2 || step == 3) trainer.copy_to_peers("");
          }
          trainer.state().wait_weights();
        },
        choose);
  }
  /// The folder of a run's copies.
  fs::path root() const {
    for (const auto& entry : fs::directory_iterator(memory_)) return entry.path();
    return {};
  }
  void lose(int64_t rank) const { remove_path(root() / fmt::format("rank-{:05}", rank)); }
  bool is_clean() const { return fs::is_empty(memory_); }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("tessera-peers-test-");
  const fs::path memory_ = fs::path(kMemory) / unique_name("tessera-peers-test-");
};

class PeerLayouts : public PeerRuns, public ::testing::WithParamInterface<testing::NamedLayout> {};

/// From a state that is newer than the newest checkpoint, with the bits of a run that nothing hit.
TEST_P(PeerLayouts, GoOnBitwiseWhicheverRankIsLost) {
  const int64_t num_ranks = GetParam().num_ranks;
  if (num_ranks == 1) GTEST_SKIP() << "one rank";
  Settings plain = settings("whole", GetParam());
  plain.peer.copy = false;
  const auto whole = testing::run_steps(plain, GetParam(), 6, false);
  for (const int64_t lost : {int64_t{0}, num_ranks - 1}) {
    const Settings own = settings(fmt::format("lost-{}", lost), GetParam());
    run_until_lost(own, num_ranks);
    lose(lost);
    const auto end = testing::run_steps(own, GetParam(), 6, false);
    const std::vector expected(whole.losses.begin() + 3, whole.losses.end());
    testing::expect_same_end(end, {expected, whole.weights});
    on_ranks(own, num_ranks, [](Trainer& trainer, const auto& resumed) {
      EXPECT_TRUE(resumed->from_memory);
      EXPECT_EQ(resumed->position.step, 3);
      EXPECT_THAT(resumed->notes,
                  Contains(AllOf(HasSubstr("the state after step 3 comes from the ranks' memory"),
                                 HasSubstr("newest whole checkpoint is of step 1"))));
      trainer.remove_peer_copies();
    });
    EXPECT_TRUE(is_clean());
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PeerLayouts,
    ::testing::ValuesIn(testing::share_of_cases(testing::layouts_for_checkpoints(), 1)),
    [](const auto& info) { return info.param.name; });

class PeersOfOneLayout : public PeerRuns {
 protected:
  static const testing::NamedLayout& layout() {
    static const std::vector<testing::NamedLayout> all = testing::layouts_for_checkpoints();
    return *std::ranges::find_if(all, [](const auto& one) { return one.num_ranks > 1; });
  }
  Settings settings(const std::string& run) const { return PeerRuns::settings(run, layout()); }
  static int64_t num_ranks() { return layout().num_ranks; }
  /// The step that a run goes on from.
  static int64_t resumed_step(const Settings& settings) {
    int64_t step = -1;
    on_ranks(settings, num_ranks(), [&](Trainer& trainer, const auto& resumed) {
      if (trainer.layout().rank() == 0) step = resumed ? resumed->position.step : 0;
    });
    return step;
  }
};

TEST_F(PeersOfOneLayout, OfADeviceToo) {
  run_until_lost(settings("host"), num_ranks());
  lose(1);
  const auto expected = testing::run_steps(settings("host"), layout(), 6, false);
  remove_path(root());
  run_until_lost(settings("shadow"), num_ranks(), testing::choose_shadow);
  lose(0);
  testing::expect_same_end(
      testing::run_steps(settings("shadow"), layout(), 6, false, testing::choose_shadow), expected);
}

TEST_F(PeersOfOneLayout, WithoutACopyTheDiskIsTaken) {
  run_until_lost(settings("run"), num_ranks());
  EXPECT_EQ(resumed_step(settings("run")), 3);
  Settings other = settings("run");
  other.train.precision = Precision::kF32;
  other.optimizer.formats.first_moment = MomentKind::kBF16;  // which the copies are not
  EXPECT_EQ(resumed_step(other), 1);
  const auto notes_of = [&](const Settings& own) {
    std::vector<std::string> notes;
    on_ranks(own, num_ranks(), [&](Trainer& trainer, const auto&) {
      if (trainer.layout().rank() == 0) notes = trainer.initial_notes();
    });
    return notes;
  };
  const auto unused = HasSubstr("has the state after step 3 (checkpoint.peer_copy), which is not");
  EXPECT_THAT(notes_of(other), Contains(unused));
  EXPECT_THAT(notes_of(settings("run")), ::testing::Not(Contains(unused)));
  remove_path(root());
  EXPECT_EQ(resumed_step(settings("run")), 1);
}

TEST_F(PeersOfOneLayout, ANewerCheckpointIsTaken) {
  run_until_lost(settings("run"), num_ranks());
  on_ranks(settings("run"), num_ranks(), [](Trainer& trainer, const auto&) {
    trainer.step();
    trainer.save("");
    trainer.state().wait_weights();
  });
  EXPECT_EQ(resumed_step(settings("run")), 4);
}

TEST_F(PeersOfOneLayout, CopiesOfARunThatIsGoneAreRemoved) {
  run_until_lost(settings("run"), num_ranks());
  remove_path(folder_ / "run");
  // A new run of the same name, and one of another.
  EXPECT_EQ(resumed_step(settings("run")), 0);
  run_until_lost(settings("run"), num_ranks());
  remove_path(folder_ / "run");
  on_ranks(settings("other"), num_ranks(),
           [](Trainer& trainer, const auto&) { trainer.remove_peer_copies(); });
  EXPECT_TRUE(is_clean());
}

TEST_F(PeersOfOneLayout, ARunWithoutCopiesRemovesWhatWasLeft) {
  run_until_lost(settings("run"), num_ranks());
  const Settings own = settings("run");
  for (const bool found : {true, false}) {
    run_thread_world(num_ranks(), [&](World& world) {
      EXPECT_EQ(PeerCopies::remove_left(own, *world.make_world_group()), found);
    });
  }
  EXPECT_TRUE(is_clean());
}

TEST_F(PeersOfOneLayout, WhatCannotBeIsRefused) {
  const auto refusal = [&](const std::function<void(Settings&)>& change, int64_t ranks) {
    Settings own = settings("run");
    change(own);
    try {
      on_ranks(own, ranks, [](Trainer&, const auto&) {});
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal([](Settings& own) { own.parallel = {}; }, 1),
              HasSubstr("the run has one rank"));
  EXPECT_THAT(refusal([&](Settings& own) { own.peer.folder = "/proc"; }, num_ranks()),
              HasSubstr("is not in memory (tmpfs)"));
  EXPECT_THAT(refusal([&](Settings& own) { own.peer.folder = "/dev/shm/none"; }, num_ranks()),
              HasSubstr("cannot be used"));
  const Settings own = settings("run");
  EXPECT_THAT(
      [&] {
        run_thread_world(num_ranks(), [&](World& world) {
          PeerCopies(own, make_run_layout(own, world), int64_t{1} << 45);
        });
      },
      ThrowsMessage<UserError>(AllOf(HasSubstr("checkpoint.peer_copy needs up to"),
                                     HasSubstr("TiB in "), HasSubstr("are free"))));
  Settings relative = settings("run");
  relative.peer.folder = "shm";
  EXPECT_THAT([&] { validate(relative); }, ThrowsMessage<UserError>(HasSubstr("absolute path")));
}

}  // namespace
}  // namespace tessera
