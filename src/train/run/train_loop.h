#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/process/progress.h"
#include "train/metrics/step_record.h"
#include "train/setup/settings.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// What a training is told.
struct TrainRequest {
  Settings settings;
  std::string config_toml;  ///< the resolved configuration, for checkpoints and the report
  Terminal terminal;
  std::string trace = {};  ///< file for a trace of the second step and some more; empty: none
  int64_t trace_steps = 2;
  /// No data is opened: each step is given its batches (Trainer::give_batches), and nothing is held
  /// out for validation.
  bool given_batches = false;
  /// Called by rank 0's thread now and then while it tokenizes; what it throws ends the run.
  std::function<void()> pause = {};
};

/// A whole training step by step, from the settings to the report, for those who call each step
/// themselves; train() is the loop around it. It has the lock of the run's folder, continues from a
/// checkpoint, and does after each step what is due: metrics, validation, checkpoints. All ranks
/// call the same functions in the same order. A function that throws ends the run; the trainer
/// stays until this is destroyed.
class TrainingRun {
 public:
  /// Opens all and takes the memory; rank 0 prints to `out`, which must outlive this as must the
  /// world. Throws UserError.
  TrainingRun(const TrainRequest& request, World& world, std::ostream& out);
  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  Trainer& trainer();
  /// Whether the steps of train.steps are done.
  bool is_done() const;
  /// Whether it was ended, by end() or by an error.
  bool has_ended() const;
  /// The next step and what is due after it; with the validation loss where that was due. Throws
  /// UserError where all steps are done.
  StepRecord step() { return step({}); }
  /// The same, recorded with what the objective tells of it; what it calls "loss" is the step's.
  StepRecord step(std::vector<NamedNumber> objective);
  /// Validates now, and records it. NaN where no data is held out.
  double validate();
  /// Returns when the state as it is now is a checkpoint on the disk.
  void save();
  /// Ends the training: after the last step validates, saves and writes a sample; before it saves
  /// what the same run continues from. Leaves the folder; no step follows.
  void end();
  /// All steps that are left, and the end; a signal ends it earlier, after a save.
  void run();
  /// Prints and records a line between steps; rank 0's counts.
  void note(const std::string& text);
  /// Empty where none is written.
  std::filesystem::path report_path() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// Runs a whole training, from the settings to the report; rank 0 prints to `out` and writes the
/// metrics. All ranks call. Returns 0, also when a signal ended it after saving.
int train(const TrainRequest& request, World& world, std::ostream& out);

}  // namespace tessera
