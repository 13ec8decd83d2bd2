#pragma once

#include <memory>
#include <ostream>
#include <string>

#include "core/progress.h"
#include "train/checkpointing.h"
#include "train/model_state.h"
#include "train/settings.h"
#include "train/training_data.h"

namespace tessera {

/// Bytes of a training run, known before any is taken.
struct MemoryPrediction {
  int64_t program =
      0;  ///< resident before training: code, libraries and their scratch, the data's index
  int64_t data = 0;  ///< pages of the token file that the run's windows touch, at most
  ModelState::Bytes state;
  ActivationBytes activations;
  int64_t total() const { return program + data + state.total() + activations.total(); }
};

/// What one optimizer step did.
struct StepOutcome {
  double loss = 0;  ///< mean over the valid tokens of the global batch
  double balance_loss = 0;
  double z_loss = 0;
  int64_t num_tokens = 0;
  int64_t dropped = 0;
  StepResult update;
  bool skipped() const { return !update.updated; }
};

/// Refuses a model that cannot be built or trained as the settings say, before any data is read or
/// written.
void check_model(Settings settings);

/// A training run: data, model, optimizer and position. The loop around it is train().
class Trainer {
 public:
  /// Validates, predicts memory, then takes it and initialises or resumes. Settings must have been
  /// checked.
  Trainer(Settings settings, TrainingData data);

  const Settings& settings() const { return settings_; }
  const TrainingData& data() const { return data_; }
  const MemoryPrediction& prediction() const { return prediction_; }
  const RunPosition& position() const { return position_; }
  ModelState& state() { return *state_; }
  const TrainingModel& model() const { return *model_; }
  /// Model FLOPs of one optimizer step.
  double step_flops() const;

  /// Continues from a checkpoint where the settings ask for it.
  std::optional<ResumedRun> resume(const std::string& config_toml);
  /// One optimizer step over all its micro-batches. Throws UserError on a NaN or infinite loss or
  /// gradient where the settings say stop; then nothing was updated.
  StepOutcome step(const NodeObserver& observer = {});
  /// Mean validation loss, or NaN where no data is held out.
  double validate();
  SaveResult save(const std::string& config_toml);
  /// Assignments to each expert in the last step, by MoE layer.
  std::vector<std::vector<int64_t>> expert_loads() const;

 private:
  StepOutcome accumulate(const NodeObserver& observer);
  void refuse_nonfinite(const StepOutcome& outcome) const;

  Settings settings_;
  TrainingData data_;
  MemoryPrediction prediction_;
  std::unique_ptr<ModelState> state_;
  std::unique_ptr<TrainingModel> model_;
  RunPosition position_;
  std::vector<Batch> batches_;
};

/// Runs a whole training, from the settings to the report, printing to `out`. Returns 0, also when
/// a signal ended it after saving.
struct TrainRequest {
  Settings settings;
  std::string config_toml;  ///< the resolved configuration, for checkpoints and the report
  Terminal terminal;
};
int train(const TrainRequest& request, std::ostream& out);

}  // namespace tessera
