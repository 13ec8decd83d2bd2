#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "train/metrics/writer.h"
#include "train/run/run_lock.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// What the ranks agree to do between two steps. Of what they want the highest number wins.
struct RunEvent {
  static constexpr int64_t kNone = 0;
  static constexpr int64_t kSaveAgain = 1;  ///< the checkpoints are gone
  // Signals are in between.
  static constexpr int64_t kWriteFailed = 1000;
  static constexpr int64_t kFolderLost = 1001;

  static bool ends_training(int64_t event) { return event > kSaveAgain; }
  static int64_t of_signal(int64_t signal) { return signal > 0 ? kSaveAgain + signal : kNone; }
  static int64_t signal(int64_t event) { return event > kSaveAgain ? event - kSaveAgain : 0; }
};

/// What came of a save in the background.
struct SaveOutcome {
  SaveResult result;
  std::string failure;       ///< why there is no checkpoint; "" where there is one
  double write_seconds = 0;  ///< that this rank's thread worked
  double copy_stall = 0;     ///< seconds that this rank's updates waited for the copy
};

/// Keeps a run from losing what it has learned when others remove, move or take its folder, or when
/// its files cannot be written. Every rank has one; rank 0's has the lock and the writer, and
/// looks. All functions but `tell`, `expect_checkpoints` and `is_saving` are collective; where the
/// run cannot go on they save what is in memory and throw UserError, on all ranks, saying where it
/// is.
class RunKeeper {
 public:
  /// All must outlive it. `lock` and `writer` are null but on rank 0.
  RunKeeper(Trainer& trainer, const std::string& config_toml, RunLock* lock, RunWriter* writer)
      : trainer_(trainer), config_toml_(config_toml), lock_(lock), writer_(writer) {}

  const std::string& config_toml() const { return config_toml_; }
  /// Whether there are checkpoints in the folder, as there are after each save.
  void expect_checkpoints(bool expected) { has_checkpoints_ = expected; }
  /// Runs what writes to the run's files, on rank 0. A failure is kept until all ranks act on it.
  void tell(const std::function<void()>& action);
  /// What all do next, given the signal that this rank has received or 0: nothing, save again, or
  /// stop for a signal. Looks after the folder once a second.
  int64_t agree(int64_t signal);
  /// The same at the end of the run, when all must be on the disk.
  int64_t look_again();
  /// Saves into the run's folder, which is looked for before.
  SaveResult save();

  /// The same between steps, while training waits; a failure to write is an outcome, not an error.
  SaveOutcome save_waiting();

  /// Saves in the background: one at a time. A failure to write is an outcome, not an error.
  bool is_saving() const { return saving_ != nullptr; }
  /// Copies the state and starts to write it. Has a failure where that could not start.
  SaveOutcome begin_save();
  /// Goes on where all ranks have written what they were to; has the outcome when that is known.
  std::optional<SaveOutcome> go_on_with_save();
  /// Waits for the outcome.
  SaveOutcome finish_save();

 private:
  SaveOutcome end_save();
  SaveOutcome outcome_of(const std::function<void()>& action);
  void drop_save();
  int64_t look_after_folder();
  int64_t look_at_folder();
  int64_t failed() const { return failure_.empty() ? RunEvent::kNone : RunEvent::kWriteFailed; }
  int64_t act_on(int64_t event);
  void require_folder();
  [[noreturn]] void rescue();
  [[noreturn]] void give_up();

  Trainer& trainer_;
  const std::string& config_toml_;
  RunLock* lock_;
  RunWriter* writer_;
  bool has_checkpoints_ = false;
  std::unique_ptr<BackgroundSave> saving_;
  std::string failure_;  // the first one to write
  std::chrono::steady_clock::time_point looked_ = std::chrono::steady_clock::now();
};

}  // namespace tessera
