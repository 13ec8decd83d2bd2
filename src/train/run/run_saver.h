#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "train/metrics/writer.h"
#include "train/run/run_keeper.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// A save that training had to wait for.
struct SlowSave {
  int64_t step = 0;
  int64_t num_bytes = 0;     ///< of all ranks' files
  double write_seconds = 0;  ///< that they took
  int64_t interval = 0;      ///< steps between saves
  double trained = 0;        ///< seconds from its begin until the next was due
  double waited = 0;         ///< seconds more until it was written
};

/// What limits the run, and the interval with which nobody would have waited.
std::string describe(const SlowSave& save);

/// When a run saves, and what the user is told of it. Saves between steps are written in the
/// background where the settings say so; "saved" is told when a checkpoint is on the disk. Every
/// rank has one; all functions are collective.
class RunSaver {
 public:
  /// All must outlive it. `writer` is null but on rank 0.
  RunSaver(Trainer& trainer, RunKeeper& keeper, RunWriter* writer)
      : trainer_(trainer), keeper_(keeper), writer_(writer) {}

  /// A save between two steps. Where the last one is still being written, waits for it first. One
  /// that fails is told, and the run goes on.
  void save_between_steps();
  /// Between two steps: goes on with a save under way, if it can without waiting.
  void go_on();
  /// Returns when the state as it is now is on the disk. Throws UserError where it cannot be.
  void save_now();
  /// The same although this state is saved already: that checkpoint is gone.
  void save_again();
  /// Copies the ranks' states to one another's memory. A failure is told, and the run goes on.
  void copy_to_peers();
  /// Waits for a save under way, if there is one, and tells what came of it.
  void settle();

 private:
  using Clock = std::chrono::steady_clock;

  void begin();
  void save_waiting();
  void wait_for_last();
  SaveOutcome finish_last();
  void tell(const SaveOutcome& outcome);
  void tell_failure(const std::string& failure);
  void tell_saved(const SaveResult& saved, const std::string& how);
  void note_slow_disk(const SlowSave& save);
  void note_slow_copy(const SaveOutcome& outcome);
  void note(const std::string& text);

  Trainer& trainer_;
  RunKeeper& keeper_;
  RunWriter* writer_;
  int64_t saved_step_ = -1;    ///< the last that is on the disk
  int64_t writing_step_ = -1;  ///< of the save under way
  double stall_seconds_ = 0;   ///< that steps waited for the save under way
  Clock::time_point begun_;    ///< the save under way
  bool noted_disk_ = false;
  bool noted_copy_ = false;
  bool noted_peers_ = false;
};

}  // namespace tessera
