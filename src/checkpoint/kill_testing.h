#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "checkpoint/background_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/process_world_testing.h"
#include "checkpoint/slicing_testing.h"
#include "checkpoint/testing.h"

namespace tessera {

/// Checkpoints whose content is a pure function of the step, so that a reader can tell whether it
/// is the right one.
class SteppedCheckpoint {
 public:
  explicit SteppedCheckpoint(int64_t step)
      : step_(step),
        model_(static_cast<uint64_t>(step)),
        optimizer_(static_cast<uint64_t>(step) + 1'000'000) {
    model_.add("a", DType::kF32, {50, 20});
    model_.add("b", DType::kBF16, {30, 20});
    optimizer_.add("a.m", DType::kF32, {50, 20});
  }

  void save(const std::filesystem::path& root, int64_t keep_last) const {
    save_checkpoint(root, {.step = step_,
                           .model = model_.named(),
                           .optimizer = optimizer_.named(),
                           .state = state(),
                           .keep_last = keep_last,
                           .shard_bytes = 4500});
  }

  /// The same by several ranks: "a" by rows, "b" by columns, "a.m" by rows of which each rank has
  /// two ranges.
  void save(const std::filesystem::path& root, int64_t keep_last, Communicator& world) const {
    with_request(keep_last, world,
                 [&](const SliceSaveRequest& request) { save_checkpoint(root, request, world); });
  }

  /// The same, written by a thread while the tensors are changed.
  void save_in_background(const std::filesystem::path& root, int64_t keep_last,
                          Communicator& world) const {
    Snapshot snapshot(1 << 16);
    std::optional<BackgroundSave> save;
    with_request(keep_last, world, [&](const SliceSaveRequest& request) {
      save.emplace(root, request, snapshot, world);
      for (const NamedSlice& slice : request.model)
        std::memset(slice.tensor.data, 0xff, static_cast<size_t>(slice.tensor.num_bytes()));
    });
    save->wait();
  }

 private:
  template <typename Save>
  void with_request(int64_t keep_last, Communicator& world, const Save& save) const {
    const auto share = [&](int64_t total, int64_t first) {
      const int64_t begin = total * world.rank() / world.size();
      return IndexRange{first + begin, total * (world.rank() + 1) / world.size() - begin};
    };
    const std::vector<Slicing::Item> model = {{"a", Slice::of_rows({50, 20}, {share(50, 0)})},
                                              {"b", Slice::of_columns({30, 20}, share(20, 0))}};
    const LocalSlices own_model(model, model_.named());
    const LocalSlices own_optimizer(
        {{"a.m", Slice::of_rows({50, 20}, {share(20, 0), share(30, 20)})}}, optimizer_.named());
    own_model.fill();
    own_optimizer.fill();
    save({.step = step_,
          .model = own_model.named(),
          .optimizer = own_optimizer.named(),
          .state = state(),
          .keep_last = keep_last});
  }

 public:
  void expect_equal(const CheckpointReader& reader) const {
    EXPECT_EQ(reader.step(), step_);
    EXPECT_EQ(reader.state(), state());
    expect_group(reader, TensorGroup::kModel, model_);
    expect_group(reader, TensorGroup::kOptimizer, optimizer_);
  }

 private:
  static void expect_group(const CheckpointReader& reader, TensorGroup group,
                           const RandomTensors& saved) {
    RandomTensors loaded(0);
    for (const auto& [name, tensor] : saved.named()) loaded.add(name, tensor.dtype, tensor.shape);
    reader.load_group(group, loaded.named());
    for (size_t i = 0; i < saved.named().size(); ++i) {
      EXPECT_TRUE(same_bits(loaded.named()[i].tensor, saved.named()[i].tensor));
    }
  }
  std::string state() const { return fmt::format("{{\"step\":{}}}", step_); }

  int64_t step_;
  RandomTensors model_;
  RandomTensors optimizer_;
};

/// A number that a child process leaves to its parent even when it is killed.
class SharedStep {
 public:
  SharedStep()
      : step_(static_cast<std::atomic<int64_t>*>(::mmap(nullptr, sizeof(std::atomic<int64_t>),
                                                        PROT_READ | PROT_WRITE,
                                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedStep() { ::munmap(step_, sizeof(*step_)); }
  SharedStep(const SharedStep&) = delete;
  SharedStep& operator=(const SharedStep&) = delete;
  std::atomic<int64_t>& get() { return *step_; }

 private:
  std::atomic<int64_t>* step_;
};

/// The newest checkpoint of `root` is complete, of `first` or a later step up to `last`, and holds
/// what that step saved. Gives the step.
inline int64_t expect_newest_loads(const std::filesystem::path& root, int64_t first, int64_t last) {
  const FoundCheckpoint found = find_latest(root);
  if (!found.path) {
    EXPECT_EQ(first, 0) << "no complete checkpoint although step " << first << " was saved";
    return 0;
  }
  EXPECT_GE(found.step, first);
  EXPECT_LE(found.step, last);
  SteppedCheckpoint(found.step).expect_equal(CheckpointReader(*found.path));
  return found.step;
}

/// Waits for a process that must end; kills it and fails where it does not.
inline int wait_for(pid_t process) {
  int status = 0;
  for (int i = 0; i < 60'000; ++i) {
    if (::waitpid(process, &status, WNOHANG) == process) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ADD_FAILURE() << "a rank waits for ever";
  ::kill(process, SIGKILL);
  ::waitpid(process, &status, 0);
  return status;
}

/// A rank that was not killed ended because another was.
inline void expect_lost_peer(pid_t process) {
  const int status = wait_for(process);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kLostPeer) << status;
}

enum class Saving : uint8_t { kAtOnce, kInBackground };

/// Saves one step after another in processes, one of which is killed after `delay`.
inline void kill_one_saver(const std::filesystem::path& root, int64_t num_ranks, size_t killed,
                           std::chrono::microseconds delay, std::atomic<int64_t>& saved,
                           Saving saving) {
  const int64_t start = saved;
  const std::vector<pid_t> ranks = fork_ranks(num_ranks, [&](Communicator& world) {
    for (int64_t step = start + 1;; ++step) {
      if (saving == Saving::kInBackground) {
        SteppedCheckpoint(step).save_in_background(root, 2, world);
      } else if (num_ranks == 1) {
        SteppedCheckpoint(step).save(root, 2);
      } else {
        SteppedCheckpoint(step).save(root, 2, world);
      }
      if (world.rank() == 0) saved = step;
    }
  });
  std::this_thread::sleep_for(delay);
  ::kill(ranks[killed], SIGKILL);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank == killed) {
      EXPECT_TRUE(WIFSIGNALED(wait_for(ranks[rank]))) << "the saver ended by itself";
    } else {
      expect_lost_peer(ranks[rank]);
    }
  }
}

/// Kills a random one of `num_ranks` savers at random moments and checks what is left, at least
/// `num_kills` times and until some saves finished.
inline void kill_savers(const std::filesystem::path& root, int64_t num_ranks, int num_kills,
                        uint64_t seed, Saving saving = Saving::kAtOnce) {
  Random random(seed, 0);
  SharedStep saved;
  double longest_us = 20'000;
  for (int kill = 0; kill < num_kills || saved.get() < 3; ++kill) {
    const int64_t before = saved.get();
    const auto delay = static_cast<int64_t>(random.next_uniform() * longest_us);
    const auto killed = random.next_below(static_cast<uint64_t>(num_ranks));
    kill_one_saver(root, num_ranks, killed, std::chrono::microseconds(delay), saved.get(), saving);
    if (::testing::Test::HasFailure()) return;
    // A slow machine gets more time, so that kills fall on every stage of a save.
    if (saved.get() == before) longest_us *= 1.1;
    saved.get() = expect_newest_loads(root, saved.get(), saved.get() + 1);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace tessera
