#include "train/run/run_keeper.h"

#include <algorithm>
#include <vector>

#include "checkpoint/together.h"
#include "comm/error.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/process/stopwatch.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A free name beside a run's folder.
std::string rescue_folder(const fs::path& folder) {
  std::string name = folder.string() + ".rescued";
  for (int i = 2; path_exists(name); ++i) name = fmt::format("{}.rescued-{}", folder.string(), i);
  return name;
}

/// What has become of a run's folder, for a message.
std::string describe_loss(const fs::path& folder, const FolderPlace& place) {
  const std::string name = folder.string();
  switch (place.state) {
    case FolderPlace::State::kMoved:
      return fmt::format("the run's folder {} was moved to {} while the run went on", name,
                         place.path.string());
    case FolderPlace::State::kTaken:
      return fmt::format("the run's folder {} was taken over by {} while the run went on", name,
                         place.note);
    default:
      return fmt::format("the run's folder {} was removed while the run went on", name);
  }
}

}  // namespace

void RunKeeper::tell(const std::function<void()>& action) {
  try {
    if (writer_ != nullptr) action();
  } catch (const UserError& error) {
    if (failure_.empty()) failure_ = error.what();
  }
}

int64_t RunKeeper::agree(int64_t signal) {
  int64_t event = std::max(RunEvent::of_signal(signal), failed());
  if (seconds_since(looked_) >= 1) event = std::max(event, look_after_folder());
  return act_on(event);
}

int64_t RunKeeper::look_again() {
  return act_on(std::max(look_after_folder(), failed()));
}

SaveResult RunKeeper::save() {
  require_folder();
  try {
    SaveResult saved = trainer_.save(config_toml_);
    has_checkpoints_ = true;
    return saved;
  } catch (const CommError&) {
    throw;
  } catch (const UserError&) {
    require_folder();  // which may have been lost at this moment
    throw;
  }
}

/// Runs what may end the save under way.
SaveOutcome RunKeeper::outcome_of(const std::function<void()>& action) {
  require_folder();
  try {
    action();
    return {};
  } catch (const CommError&) {
    throw;
  } catch (const UserError& error) {
    saving_.reset();
    require_folder();  // which may have been lost at this moment
    return {.result = {}, .failure = error.what()};
  }
}

SaveOutcome RunKeeper::save_waiting() {
  const auto start = std::chrono::steady_clock::now();
  SaveResult saved;
  SaveOutcome outcome = outcome_of([&] { saved = trainer_.save(config_toml_); });
  if (!outcome.failure.empty()) return outcome;
  has_checkpoints_ = true;
  outcome.result = std::move(saved);
  outcome.write_seconds = seconds_since(start);
  return outcome;
}

SaveOutcome RunKeeper::begin_save() {
  ensure(!is_saving(), "begin_save: another save is under way");
  return outcome_of([&] { saving_ = trainer_.begin_save(config_toml_); });
}

std::optional<SaveOutcome> RunKeeper::go_on_with_save() {
  if (!saving_->ready()) return std::nullopt;
  bool done = false;
  SaveOutcome outcome = outcome_of([&] { done = saving_->advance(); });
  if (!outcome.failure.empty()) return outcome;
  if (!done) return std::nullopt;
  return end_save();
}

SaveOutcome RunKeeper::finish_save() {
  SaveOutcome outcome = outcome_of([&] { saving_->wait(); });
  return outcome.failure.empty() ? end_save() : outcome;
}

SaveOutcome RunKeeper::end_save() {
  SaveOutcome outcome{.result = saving_->result(),
                      .failure = "",
                      .write_seconds = saving_->work_seconds(),
                      .copy_stall = trainer_.copy_stall_seconds()};
  saving_.reset();
  has_checkpoints_ = true;
  return outcome;
}

/// Before another save of a state that is newer: nobody writes when it returns.
void RunKeeper::drop_save() {
  if (!is_saving()) return;
  saving_.reset();
  trainer_.layout().world->barrier();
}

int64_t RunKeeper::act_on(int64_t event) {
  event = trainer_.agree(event);
  if (event == RunEvent::kFolderLost) rescue();
  if (event == RunEvent::kWriteFailed) give_up();
  return event;
}

/// Looks whether the folder and what is in it are in place, and mends what it can.
int64_t RunKeeper::look_after_folder() {
  looked_ = std::chrono::steady_clock::now();
  if (lock_ == nullptr) return RunEvent::kNone;
  if (look_at_folder() != RunEvent::kNone) return RunEvent::kFolderLost;
  tell([&] { writer_->restore_files(); });
  std::error_code ignored;
  const bool gone =
      has_checkpoints_ && !fs::exists(checkpoint_folder(lock_->folder().string()), ignored);
  return gone ? RunEvent::kSaveAgain : RunEvent::kNone;
}

int64_t RunKeeper::look_at_folder() {
  if (lock_ == nullptr) return RunEvent::kNone;
  const FolderPlace place = lock_->find();
  if (place.state != FolderPlace::State::kInPlace) return RunEvent::kFolderLost;
  if (!place.note.empty()) writer_->note("warning: " + place.note);
  return RunEvent::kNone;
}

void RunKeeper::require_folder() {
  if (trainer_.agree(look_at_folder()) == RunEvent::kFolderLost) rescue();
}

/// Saves what only memory holds now: in the folder where it was moved to, or else in a new one.
void RunKeeper::rescue() {
  drop_save();
  Communicator& world = *trainer_.layout().world;
  std::vector<std::string> texts(2);
  together(world, [&] {
    if (lock_ == nullptr) return;
    const FolderPlace place = lock_->find();
    const bool moved = place.state == FolderPlace::State::kMoved;
    texts = {describe_loss(lock_->folder(), place),
             moved ? place.path.string() : rescue_folder(lock_->folder())};
    writer_->abandon_folder();
  });
  texts = broadcast_texts(world, texts);
  const std::string& loss = texts[0];
  const std::string& target = texts[1];
  const int64_t step = trainer_.position().step;
  if (step == 0) user_error("{}; no step had been done", loss);
  if (!trainer_.settings().run.save)
    user_error("{}; nothing is saved, since run.save is false", loss);
  try {
    trainer_.save(config_toml_, target);
    together(world, [&] {
      if (writer_ != nullptr) writer_->move_to(target);
    });
  } catch (const CommError&) {
    throw;
  } catch (const UserError& error) {
    user_error("{}; the state after step {} could not be saved in {}: {}", loss, step, target,
               error.what());
  }
  user_error("{}; the state after step {} is saved in {}, where --run.folder={} goes on from it",
             loss, step, target, target);
}

/// After a failure of rank 0 to write: saves what can be saved.
void RunKeeper::give_up() {
  const std::string failure = broadcast_texts(*trainer_.layout().world, {failure_}).front();
  require_folder();  // a lost one explains it
  drop_save();
  const int64_t step = trainer_.position().step;
  if (step == 0 || !trainer_.settings().run.save) user_error("{}", failure);
  try {
    trainer_.save(config_toml_);
  } catch (const CommError&) {
    throw;
  } catch (const UserError& error) {
    user_error("{}; nor could the state after step {} be saved: {}", failure, step, error.what());
  }
  user_error("{}; the state after step {} is saved, and the same command continues", failure, step);
}

}  // namespace tessera
