#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/background_save.h"
#include "checkpoint/peer/peer_store.h"
#include "optim/loss_scaler.h"
#include "train/setup/settings.h"
#include "train/state/model_state.h"

namespace tessera {

/// What a run must know to go on, beside its tensors. Data order, schedule and initial weights are
/// pure functions of the settings and the step, so the step is all of their state.
struct RunPosition {
  int64_t step = 0;  ///< steps done
  int64_t tokens_seen = 0;
  int64_t skipped_steps = 0;
  std::optional<LossScaleState> loss_scale = {};  ///< where it follows the gradients
};

/// By what a resumed run tells whether its data is still that of its checkpoint.
struct DataIdentity {
  int64_t num_tokens = 0;
  std::string fingerprint;  ///< of the tokens, as text; "" where unknown
};

/// The folder that holds a run's checkpoints.
std::filesystem::path checkpoint_folder(const std::string& run_folder);

/// What a save says of a run, beside its tensors.
struct SavedRun {
  int64_t keep_last = 0;
  const std::string& config_toml;
  const DataIdentity& data;
  const RunPosition& position;
};

/// The same as JSON.
std::string state_text(const SavedRun& run);

/// Saves weights, expert biases, optimizer and position with the configuration that made them, in
/// the run's `folder`. All ranks call; rank 0's data counts.
SaveResult save_run(const std::string& folder, const SavedRun& run, const ModelState& state,
                    Communicator& world);
/// Copies the same to `snapshot` and starts to write it in the background.
std::unique_ptr<BackgroundSave> begin_save_run(const std::string& folder, const SavedRun& run,
                                               const ModelState& state, Snapshot& snapshot,
                                               Communicator& world);

/// A checkpoint that a run continues from.
struct ResumedRun {
  RunPosition position;
  std::filesystem::path path;
  /// What the user should know: settings that changed.
  std::vector<std::string> notes;
  /// One line for each newer checkpoint that was passed over, with the reason.
  std::vector<std::string> skipped;
  /// Whether it is of the ranks' memory, and no checkpoint.
  bool from_memory = false;
};

/// Loads the newest whole checkpoint of the run's folder, or nothing where there is none. Damaged
/// ones that are newer are set aside: the steps after the loaded one are done again, and the run
/// must neither take those for its own later, nor overwrite or remove them. Throws UserError where
/// settings.run.resume demands a checkpoint, where it does not fit the settings, or where it is
/// beyond train.steps. Any layout continues any other's run. Where `peers` has a newer state than
/// the newest whole checkpoint, takes that. All ranks call.
std::optional<ResumedRun> resume_run(const Settings& settings, const std::string& config_toml,
                                     const DataIdentity& data, ModelState& state,
                                     Communicator& world, PeerStore* peers = nullptr);

/// A checkpoint that a user named.
struct OpenedCheckpoint {
  CheckpointReader reader;
  /// One line for each newer checkpoint that was passed over, with the reason.
  std::vector<std::string> skipped;
};

/// Opens what `path` names: one checkpoint, which must be whole; or, of a run's folder or a folder
/// of checkpoints, the newest that is whole. All ranks call. Throws UserError.
OpenedCheckpoint open_checkpoint(const std::string& path, Communicator& world,
                                 Verify verify = Verify::kChecksums);
/// The same by one process.
OpenedCheckpoint open_checkpoint(const std::string& path, Verify verify = Verify::kChecksums);

/// What to tell of checkpoints that were passed over for `used`; "" for none.
std::string describe_skipped(const std::vector<std::string>& skipped,
                             const std::filesystem::path& used);

/// Refuses weights that are NaN or infinite. `advice` says what to do.
void refuse_nonfinite(const CheckpointReader& reader, std::string_view advice);

/// The configuration that a checkpoint was trained with, as TOML.
std::string checkpoint_config(const CheckpointReader& reader);

/// The same as settings. A tokenizer that lies within the checkpoint is named by its whole path,
/// and so are data and tokenizer that lie where the run was started (run_paths.h).
Settings checkpoint_settings(const CheckpointReader& reader);

/// The state of a checkpoint whose weights come from elsewhere: no step has been done.
std::string fresh_state(const std::string& config_toml);

}  // namespace tessera
