#include "checkpoint/background_save.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <latch>
#include <stdexcept>
#include <thread>

#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/layout.h"
#include "comm/thread/thread_world.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr int64_t kRows = 12;

/// Rows of one tensor, each rank its own, as bytes of one value.
class RankRows {
 public:
  RankRows(Communicator& world, int fill) : tensor_(DType::kF32, {kRows / world.size(), 7}) {
    set(fill);
    const int64_t count = kRows / world.size();
    slices_ = {{"w", tensor_, Slice::of_rows({kRows, 7}, {{world.rank() * count, count}})}};
  }
  void set(int fill) const {
    std::memset(tensor_.get().data, fill, static_cast<size_t>(tensor_.get().num_bytes()));
  }
  SliceSaveRequest request(int64_t step) const {
    return {.step = step, .model = slices_, .state = R"({"a":1})", .keep_last = 2};
  }

 private:
  OwnedTensor tensor_;
  std::vector<NamedSlice> slices_;
};

class BackgroundSaveTest : public CheckpointTest {
 protected:
  std::string files_of(const fs::path& folder) const {
    std::vector<fs::path> paths;
    for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
    std::ranges::sort(paths);
    std::string text;
    for (const fs::path& path : paths)
      text += path.filename().string() + ":" + read_text_file(path) + "\n";
    return text;
  }
};

TEST_F(BackgroundSaveTest, WritesTheBytesOfTheMomentWhileTensorsChange) {
  for (const int64_t num_ranks : {1, 3}) {
    const fs::path at_once = folder_ / fmt::format("at-once-{}", num_ranks);
    const fs::path root = folder_ / fmt::format("root-{}", num_ranks);
    std::latch changed(num_ranks);
    run_thread_world(num_ranks, [&](World& ranks) {
      const CommunicatorPtr world = ranks.make_world_group();
      const RankRows rows(*world, 5);
      save_checkpoint(at_once, rows.request(4), *world);
      Snapshot snapshot(1 << 12);
      BackgroundSave save(root, rows.request(4), snapshot, *world, [&] { changed.wait(); });
      EXPECT_FALSE(save.ready());
      EXPECT_FALSE(find_latest(root).path);
      world->barrier();
      rows.set(9);
      changed.count_down();
      save.wait();
      EXPECT_EQ(save.result().path, root / step_folder_name(4));
      EXPECT_THAT(save.result().warnings, IsEmpty());
    });
    EXPECT_EQ(files_of(root / step_folder_name(4)), files_of(at_once / step_folder_name(4)));
    EXPECT_EQ(read_text_file(root / "latest"), "step-00000004\n");
  }
}

TEST_F(BackgroundSaveTest, OneSnapshotServesAllSavesAndOldOnesAreRemoved) {
  run_thread_world(2, [&](World& ranks) {
    const CommunicatorPtr world = ranks.make_world_group();
    const RankRows rows(*world, 1);
    Snapshot snapshot(1 << 12);
    for (int step = 1; step <= 4; ++step) {
      rows.set(step);
      BackgroundSave save(root_, rows.request(step), snapshot, *world);
      bool done = false;
      while (!done) done = save.ready() && save.advance();
    }
  });
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000003", "step-00000004"));
}

TEST_F(BackgroundSaveTest, AFailureOfOneRankIsThrownByAllAndLeavesTheEarlierOnes) {
  const auto fail_as = [&](const std::function<void()>& fail) {
    std::vector<std::string> errors(3);
    run_thread_world(3, [&](World& ranks) {
      const CommunicatorPtr world = ranks.make_world_group();
      const RankRows rows(*world, 1);
      Snapshot snapshot(1 << 12);
      BackgroundSave(root_, rows.request(1), snapshot, *world).wait();
      try {
        BackgroundSave save(root_, rows.request(2), snapshot, *world, [&] {
          if (world->rank() == 1) fail();
        });
        save.wait();
      } catch (const std::exception& error) {
        errors[world->rank()] = error.what();
      }
      // The world still works.
      BackgroundSave(root_, rows.request(1), snapshot, *world).wait();
    });
    EXPECT_THAT(errors, ElementsAre(errors[0], errors[0], errors[0]));
    EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000001"));
    return errors[0];
  };
  EXPECT_THAT(fail_as([] { user_error("the disk is full"); }),
              AllOf(HasSubstr("checkpoint of step 2 not saved: rank 1: the disk is full"),
                    HasSubstr("earlier checkpoints are as they were")));
  EXPECT_THAT(fail_as([] { throw std::runtime_error("odd"); }), HasSubstr("rank 1: odd"));
  EXPECT_THAT(fail_as([] { throw 7; }), HasSubstr("rank 1: an exception of unknown type"));
}

TEST_F(BackgroundSaveTest, DestructionWaitsForTheThreadAndLeavesNothingUnfinished) {
  save(1);
  const CommunicatorPtr world = make_single_communicator("world");
  const RankRows rows(*world, 1);
  Snapshot snapshot(1 << 12);
  std::atomic<bool> ended = false;
  {
    const BackgroundSave save(root_, rows.request(2), snapshot, *world, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ended = true;
      user_error("nobody hears of it");
    });
  }
  EXPECT_TRUE(ended);
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000001"));
}

TEST_F(BackgroundSaveTest, ALockedFolderIsRefusedAtOnce) {
  make_folder(root_);
  const FolderLock lock(root_);
  const CommunicatorPtr world = make_single_communicator("world");
  const RankRows rows(*world, 1);
  Snapshot snapshot(1 << 12);
  EXPECT_THAT([&] { BackgroundSave(root_, rows.request(2), snapshot, *world); },
              ThrowsMessage<UserError>(HasSubstr("is in use")));
}

TEST_F(BackgroundSaveTest, ASnapshotThatIsTooSmallIsABug) {
  const CommunicatorPtr world = make_single_communicator("world");
  const RankRows rows(*world, 1);
  Snapshot snapshot(64);
  EXPECT_THROW(BackgroundSave(root_, rows.request(2), snapshot, *world), InternalError);
}

}  // namespace
}  // namespace tessera
