#pragma once

#include <map>
#include <memory>
#include <ostream>
#include <string>

#include "core/process/progress.h"
#include "train/memory/choose_policy.h"
#include "train/memory/memory_prediction.h"
#include "train/plan/choose_schedule.h"
#include "train/setup/device_choice.h"
#include "train/setup/run_layout.h"
#include "train/setup/settings.h"
#include "train/setup/training_data.h"
#include "train/state/checkpointing.h"
#include "train/trainer/batch_feed.h"
#include "train/trainer/check_model.h"
#include "train/trainer/peer_copies.h"
#include "train/trainer/recorded_steps.h"
#include "train/trainer/step_outcome.h"

namespace tessera {

/// A training run as one rank sees it: data, its part of the model, optimizer and position. All
/// ranks of the world construct one and call the same functions in the same order. The loop around
/// it is train().
class Trainer {
 public:
  /// Validates, predicts memory, then takes it. Settings must have been checked; the world must
  /// outlive the trainer.
  Trainer(Settings settings, TrainingData data, World& world,
          const DeviceChooser& choose = choose_device);
  /// A run on one rank.
  Trainer(Settings settings, TrainingData data);

  const Settings& settings() const { return settings_; }
  const TrainingData& data() const { return data_; }
  const RunLayout& layout() const { return layout_; }
  const MemoryPrediction& prediction() const { return prediction_; }
  /// What activations have taken beyond the prediction, which is of balanced routing.
  int64_t unbalanced_bytes() const;
  /// What was chosen for train.memory_limit, or for what the GPU has free, and is part of
  /// settings(); on rank 0 alone.
  const std::optional<PolicyChoice>& policy_choice() const { return policy_choice_; }
  /// The same of train.schedule = "auto"; on rank 0 alone.
  const std::optional<ScheduleChoice>& schedule_choice() const { return schedule_choice_; }
  /// The processors that this rank was bound to, as bind_rank says; empty where it was not.
  const std::string& processors() const { return device_.processors; }
  const Backend& backend() const { return device_.backend; }
  /// The world that this rank's communicators are of: the one that was given, or that of the
  /// devices around it.
  World& world() const { return device_.world ? *device_.world : host_; }
  /// The rate of a large matrix product on a GPU, measured while its memory was free; 0 on the
  /// host.
  double device_peak() const { return device_.peak; }
  const RunPosition& position() const { return position_; }
  /// What the next step's losses are multiplied by; nothing where none are.
  std::optional<double> loss_scale() const {
    return scaler_ ? std::optional(scaler_->scale()) : std::nullopt;
  }
  ModelState& state() { return *state_; }
  const TrainingModel& model() const { return *model_; }
  /// Model FLOPs of the last optimizer step, or of the first, all ranks together.
  double step_flops() const { return batch_flops_ * static_cast<double>(num_batches_); }

  /// Continues from a checkpoint where the settings ask for it.
  std::optional<ResumedRun> resume(const std::string& config_toml);
  /// What the user should know of weights that a new run started from.
  const std::vector<std::string>& initial_notes() const { return initial_notes_; }
  /// One optimizer step over all its micro-batches. Throws TrainingStopped on a NaN or infinite
  /// loss or gradient where the settings say stop, but for what a smaller loss scale may mend; then
  /// nothing was updated. The GPU of a rank that
  /// is alone may still be updating when it returns, and what reads weights waits for that.
  /// Observers on a GPU are told of the update when it is next synchronised.
  StepOutcome step(const StepObservers& observers = {}, const UpdateObserver& update_observer = {});
  /// The next step's micro-batches of this rank, in place of those of the run's data, with at most
  /// as many stretches as the model was built for. Throws UserError where their number or sizes are
  /// not the settings'; there may be fewer, down to fewest_batches().
  void give_batches(std::vector<Batch> batches);
  /// Where answers are packed by one rank (Settings::packs_answers) 1, else a step's micro-batches.
  int64_t fewest_batches() const;
  /// What this rank does in each step.
  const StepPlan& plan() const { return plan_; }
  /// StepOutcome::repeats of all steps so far.
  int64_t num_repeats() const { return num_repeats_; }
  /// Steps whose micro-batches had been read and left for the GPU before they began.
  int64_t num_read_ahead() const { return steps_->num_read_ahead(); }
  /// Mean validation loss, or NaN where no data is held out.
  double validate();
  SaveResult save(const std::string& config_toml) {
    return save(config_toml, settings_.run.folder);
  }
  /// The same into another run's folder.
  SaveResult save(const std::string& config_toml, const std::string& run_folder);
  /// Whether the settings ask for saves while training goes on, which begin_save() needs.
  bool saves_in_background() const { return snapshot_ != nullptr; }
  /// Starts to copy the state, and to write the copy into the run's folder. The next step's update
  /// waits for the copy. The last such save must be destroyed before. The trainer must outlive the
  /// save.
  std::unique_ptr<BackgroundSave> begin_save(const std::string& config_toml);
  /// How long this rank's update waited for the last such copy.
  double copy_stall_seconds() const { return snapshot_ ? snapshot_->stall_seconds() : 0; }
  /// Whether the settings ask for copies of the ranks' states in memory.
  bool copies_to_peers() const { return peers_ != nullptr; }
  /// Copies each rank's state into two ranks' memory; bytes of this rank's files there, at most.
  int64_t copy_to_peers(const std::string& config_toml);
  /// At the normal end of a run: removes them.
  void remove_peer_copies();
  /// Assignments to each expert in the last step, by MoE layer.
  std::vector<std::vector<int64_t>> expert_loads() const;
  /// The largest of all ranks' numbers: how ranks agree to stop.
  int64_t agree(int64_t value) const;

 private:
  Trainer(Settings settings, TrainingData data, std::unique_ptr<World> own, World* world,
          const DeviceChooser& choose);

  class Step;
  /// Steps of another number of micro-batches than the settings have.
  struct OtherCount {
    StepPlan plan;
    std::unique_ptr<RecordedSteps> steps;
  };

  RunLayout lay_out();
  void plan_model(const BatchShape& shape);
  void choose_within_limit(const BatchShape& shape, const MemoryLimit& limit);
  void fit_device(const BatchShape& shape);
  void check_limit();
  void plan_peer_copies();
  void plan_snapshot();
  void make_snapshot();
  LossScales fetch(StepOutcome& outcome);
  OtherCount& plan_count(int64_t num_micro_batches);
  /// The parts by which the step's losses beside the main one count.
  int64_t num_batches_of_all() const { return count_loss_parts(settings_, num_batches_, layout_); }
  void sum_over_ranks(StepOutcome& outcome) const;
  void sum_expert_counts();
  void clip_heads(std::vector<float> max_logits, StepOutcome& outcome);
  void enlarge_stash(int64_t missing_pages);
  void finish_step(const StepOutcome& outcome);
  SavedRun describe_run(const std::string& config_toml) const;

  std::unique_ptr<World> own_world_;
  World& host_;
  Settings settings_;
  TrainingData data_;
  RankDevice device_;
  std::optional<ScheduleChoice> schedule_choice_;
  RunLayout layout_;
  MemoryPrediction prediction_;
  std::optional<PolicyChoice> policy_choice_;
  std::unique_ptr<ModelState> state_;
  std::unique_ptr<Snapshot> snapshot_;  // null where steps wait for saves
  std::unique_ptr<PeerCopies> peers_;   // null where there are no copies
  std::unique_ptr<TrainingModel> model_;
  StepPlan plan_;
  StepPlan evaluation_;
  std::unique_ptr<StepRunner> runner_;
  std::unique_ptr<RecordedSteps> steps_;  // of `plan_`
  std::map<int64_t, std::unique_ptr<OtherCount>> other_counts_;
  RunPosition position_;
  std::optional<LossScaler> scaler_;  // of FP16
  std::vector<std::string> initial_notes_;
  std::unique_ptr<BatchFeed> feed_;  // behind the steps, of which its thread uses `steps_`
  int64_t num_batches_ = 0;          // of the step
  std::vector<Batch> given_;         // of the next step; empty: those of the data
  std::vector<LayerTally> tallies_;  // of the step, all ranks'
  DataIdentity data_identity_;       // rank 0's has the fingerprint
  double batch_flops_ = 0;           // of a micro-batch
  int64_t num_repeats_ = 0;
};

}  // namespace tessera
