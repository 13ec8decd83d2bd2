#include "train/run/run_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class RunLockTest : public ::testing::Test {
 protected:
  ~RunLockTest() override { fs::remove_all(root_); }

  /// Takes the folder in a moment; throws where it is held.
  std::string take(const RunLockOptions& options = quick()) const {
    const RunLock lock(folder_, options);
    return lock.note();
  }
  static RunLockOptions quick() { return quick(true); }
  static RunLockOptions quick(bool kernel_lock) {
    return {.heartbeat = milliseconds(40),
            .stale_after = milliseconds(20000),
            .kernel_lock = kernel_lock};
  }
  void leave_record(const FolderOwner& owner) const {
    make_folder(folder_);
    write_file_synced(file_, to_json(owner));
  }
  static FolderOwner elsewhere() {
    FolderOwner owner = this_process();
    owner.host = "node7";
    owner.machine = "another";
    owner.pid = 4711;
    return owner;
  }
  void set_age(std::chrono::seconds age) const {
    fs::last_write_time(file_, fs::file_time_type::clock::now() - age);
  }

  const fs::path root_ = fs::path(::testing::TempDir()) / unique_name("run_lock_test-");
  const fs::path folder_ = root_ / "runs" / "first";
  const fs::path file_ = folder_ / "run.lock";
};

TEST_F(RunLockTest, TheSecondIsRefusedByNameByAnyPathAndWritesNothing) {
  for (const bool kernel_lock : {true, false}) {
    const RunLock lock(folder_, quick(kernel_lock));
    const std::string record = read_text_file(file_);
    fs::remove(root_ / "link");
    fs::create_directory_symlink(folder_, root_ / "link");
    for (const fs::path& path : {folder_, root_ / "link", folder_ / "..", folder_ / ""}) {
      const fs::path tried = path.filename() == ".." ? folder_ / ".." / "first" : path;
      EXPECT_THAT([&] { RunLock(tried, quick(kernel_lock)); },
                  ThrowsMessage<UserError>(AllOf(HasSubstr("in use by another run"),
                                                 HasSubstr(this_process().host),
                                                 HasSubstr(fmt::format("process {}", ::getpid())),
                                                 HasSubstr("choose another run.folder"))));
    }
    EXPECT_EQ(read_text_file(file_), record);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  }
}

TEST_F(RunLockTest, WhatIsInTheWayOfTheFolderIsNamed) {
  make_folder(root_);
  write_file_synced(root_ / "file", "x");
  fs::create_symlink(root_ / "nowhere", root_ / "link");
  for (const fs::path& path : {root_ / "file", root_ / "file" / "first"}) {
    EXPECT_THAT([&] { RunLock(path, quick(true)); },
                ThrowsMessage<UserError>(AllOf(HasSubstr((root_ / "file").string() + " is a file"),
                                               HasSubstr("run.folder"))));
  }
  for (const fs::path& path : {root_ / "link", root_ / "link" / "first"}) {
    EXPECT_THAT([&] { RunLock(path, quick(true)); },
                ThrowsMessage<UserError>(AllOf(HasSubstr((root_ / "link").string() + " is a link"),
                                               HasSubstr("nowhere, which does not exist"))));
  }
  EXPECT_EQ(read_text_file(root_ / "file"), "x");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 2);
}

TEST_F(RunLockTest, LeavesNoTrace) {
  EXPECT_EQ(take(), "");
  EXPECT_FALSE(fs::exists(root_)) << "folders that it made";
  make_folder(folder_.parent_path());
  {
    const RunLock lock(folder_);
    write_file_synced(folder_ / "metrics.jsonl", "x");
  }
  EXPECT_FALSE(fs::exists(file_));
  EXPECT_TRUE(fs::exists(folder_ / "metrics.jsonl"));
}

TEST_F(RunLockTest, WhatDeadProcessesOfThisMachineLeftIsTakenOverAtOnce) {
  FolderOwner owner = this_process();
  owner.process_start = "1";  // of an earlier process of this number
  for (const bool kernel_lock : {true, false}) {
    leave_record(owner);
    EXPECT_THAT(take(quick(kernel_lock)),
                AllOf(HasSubstr("took over"), HasSubstr(std::to_string(owner.pid))));
    owner.pid = int64_t{1} << 40;
  }
  for (const char* torn : {"", "{\"pid\": 1", "{}", "{\"pid\": 1e300}"}) {
    make_folder(folder_);
    write_file_synced(file_, torn);
    set_age(std::chrono::seconds(60));
    take();
  }
}

TEST_F(RunLockTest, AnotherMachinesIsRefusedWhileItsSignsOfLifeAreFresh) {
  leave_record(elsewhere());
  EXPECT_THAT([&] { take(); }, ThrowsMessage<UserError>(AllOf(HasSubstr("process 4711 on node7"),
                                                              HasSubstr("last sign of life"),
                                                              HasSubstr("stop it there"))));
  set_age(std::chrono::seconds(60));
  EXPECT_THAT(take(), AllOf(HasSubstr("process 4711 on node7"), HasSubstr("no sign of life")));
  // One that does not say whose it is, where no kernel's lock can tell.
  make_folder(folder_);
  write_file_synced(file_, "");
  EXPECT_THAT([&] { take(quick(false)); }, ThrowsMessage<UserError>(HasSubstr("another process")));
}

/// A clock that goes wrong by a minute, either way, makes nobody dead or alive.
TEST_F(RunLockTest, ClocksOfOtherMachinesMayBeWrong) {
  RunLockOptions options = quick();
  options.heartbeat = milliseconds(600);
  for (const int wrong_by : {-60, 60}) {
    leave_record(elsewhere());
    set_age(std::chrono::seconds(wrong_by));
    std::atomic<bool> stop = false;
    std::thread other([&] {
      while (!stop) {
        std::this_thread::sleep_for(milliseconds(5));
        std::error_code gone;
        const auto now = fs::file_time_type::clock::now();
        fs::last_write_time(file_, now - std::chrono::seconds(wrong_by), gone);
      }
    });
    EXPECT_THROW(take(options), UserError) << wrong_by;
    stop = true;
    other.join();
    EXPECT_THAT(take(), HasSubstr("no sign of life")) << wrong_by;
  }
}

TEST_F(RunLockTest, GivesSignsOfLife) {
  const RunLock lock(folder_, quick());
  set_age(std::chrono::seconds(3600));
  const auto before = fs::last_write_time(file_);
  for (int i = 0; i < 2000 && fs::last_write_time(file_) == before; ++i) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_NE(fs::last_write_time(file_), before);
}

TEST_F(RunLockTest, FindsWhereTheFolderIs) {
  RunLock lock(folder_, quick());
  EXPECT_EQ(lock.find().state, FolderPlace::State::kInPlace);
  const fs::path moved = root_ / "moved";
  fs::rename(folder_, moved);
  EXPECT_EQ(lock.find().state, FolderPlace::State::kMoved);
  EXPECT_EQ(lock.find().path, fs::canonical(moved));
  make_folder(folder_);  // another one
  EXPECT_EQ(lock.find().path, fs::canonical(moved));
  fs::remove_all(moved);
  EXPECT_EQ(lock.find().state, FolderPlace::State::kRemoved);
  fs::remove_all(folder_.parent_path());
  EXPECT_EQ(lock.find().state, FolderPlace::State::kRemoved);
}

TEST_F(RunLockTest, KnowsWhenAnotherTookTheFolder) {
  RunLock lock(folder_, quick());
  write_file_synced(file_, to_json(elsewhere()));
  const FolderPlace place = lock.find();
  EXPECT_EQ(place.state, FolderPlace::State::kTaken);
  EXPECT_THAT(place.note, HasSubstr("process 4711 on node7"));
}

TEST_F(RunLockTest, MakesARemovedLockAnew) {
  RunLock lock(folder_, quick());
  fs::remove(file_);
  const FolderPlace place = lock.find();
  EXPECT_EQ(place.state, FolderPlace::State::kInPlace);
  EXPECT_THAT(place.note, HasSubstr("run.lock was removed"));
  EXPECT_EQ(lock.find().note, "");
  EXPECT_THROW(take(), UserError);
}

/// Takers that come and go, with the folder itself: one at a time, and none is refused for what
/// another leaves.
TEST_F(RunLockTest, OneAtATimeOfMany) {
  std::atomic<int> holders = 0;
  std::atomic<int> most = 0;
  std::atomic<int> taken = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int tries = 0; tries < 200; ++tries) {
        try {
          const RunLock lock(folder_, quick());
          const int now = ++holders;
          most = std::max<int>(most, now);
          ++taken;
          --holders;
        } catch (const UserError& error) {
          EXPECT_THAT(error.what(), HasSubstr("in use"));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
  EXPECT_GE(taken, 4);
  EXPECT_FALSE(fs::exists(file_));
}

}  // namespace
}  // namespace tessera
