#include "train/run/run_saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/error.h"
#include "core/memory.h"
#include "core/process/stopwatch.h"

namespace tessera {
namespace {

constexpr double kWorthANote = 1;  // seconds

}  // namespace

std::string describe(const SlowSave& save) {
  constexpr double kLeast = 1e-9;  // seconds
  const double rate = static_cast<double>(save.num_bytes) / std::max(save.write_seconds, kLeast);
  const double enough = std::ceil(static_cast<double>(save.interval) *
                                  (save.trained + save.waited) / std::max(save.trained, kLeast));
  return fmt::format(
      "training waited {:.3g} s until the checkpoint of step {} was written: the disk is slower "
      "than the saves. {} took {:.3g} s, {}/s, and the next save was due after {:.3g} s; raise "
      "run.checkpoint_interval to {:.0f} or more, or use a faster disk",
      save.waited, save.step, format_bytes(save.num_bytes), save.write_seconds,
      format_bytes(std::llround(rate)), save.trained, enough);
}

void RunSaver::save_between_steps() {
  if (saved_step_ == trainer_.position().step) return;
  if (!trainer_.saves_in_background()) return save_waiting();
  wait_for_last();
  begin();
}

void RunSaver::begin() {
  begun_ = Clock::now();
  writing_step_ = trainer_.position().step;
  const SaveOutcome outcome = keeper_.begin_save();
  stall_seconds_ = seconds_since(begun_);
  if (!outcome.failure.empty()) tell(outcome);
}

void RunSaver::wait_for_last() {
  if (!keeper_.is_saving()) return;
  const double trained = seconds_since(begun_);
  const auto start = Clock::now();
  const SaveOutcome outcome = finish_last();
  if (!outcome.failure.empty()) return;
  note_slow_disk({.step = writing_step_,
                  .num_bytes = outcome.result.num_bytes,
                  .write_seconds = outcome.write_seconds,
                  .interval = trainer_.settings().run.checkpoint_interval,
                  .trained = trained,
                  .waited = seconds_since(start)});
}

/// Once a run.
void RunSaver::note_slow_disk(const SlowSave& save) {
  if (noted_disk_ || save.waited < kWorthANote) return;
  noted_disk_ = true;
  note("note: " + describe(save));
}

/// Once a run.
void RunSaver::note_slow_copy(const SaveOutcome& outcome) {
  if (noted_copy_ || outcome.copy_stall < kWorthANote) return;
  noted_copy_ = true;
  note(fmt::format(
      "note: the update after step {} waited {:.3g} s until {} were copied to the host's memory: "
      "the way there is slower than a step's passes; raise run.checkpoint_interval, or keep less "
      "state (optim.first_moment, second_moment, master)",
      writing_step_, outcome.copy_stall, format_bytes(trainer_.prediction().snapshot)));
}

void RunSaver::go_on() {
  if (!keeper_.is_saving()) return;
  const auto start = Clock::now();
  const auto outcome = keeper_.go_on_with_save();
  stall_seconds_ += seconds_since(start);
  if (outcome) tell(*outcome);
}

void RunSaver::copy_to_peers() {
  const auto start = Clock::now();
  const int64_t step = trainer_.position().step;
  try {
    const int64_t bytes = trainer_.copy_to_peers(keeper_.config_toml());
    if (noted_peers_) return;
    noted_peers_ = true;
    note(
        fmt::format("the state after step {} is in two ranks' memory, as it will be after each {} "
                    "(in {:.3g} s, while training waited; up to {} for rank 0)",
                    step, format_things(trainer_.settings().peer.interval, "step"),
                    seconds_since(start), format_bytes(bytes)));
  } catch (const CommError&) {
    throw;
  } catch (const UserError& error) {
    note(fmt::format("warning: {}; training goes on", error.what()));
  }
}

void RunSaver::settle() {
  if (keeper_.is_saving()) finish_last();
}

SaveOutcome RunSaver::finish_last() {
  const auto start = Clock::now();
  SaveOutcome outcome = keeper_.finish_save();
  stall_seconds_ += seconds_since(start);
  tell(outcome);
  return outcome;
}

void RunSaver::save_now() {
  settle();
  if (saved_step_ == trainer_.position().step) return;
  const SaveResult saved = keeper_.save();
  saved_step_ = trainer_.position().step;
  note(fmt::format("saved {}", saved.path.string()));
  for (const std::string& warning : saved.warnings) note("warning: " + warning);
}

/// Streams the state to the disk.
void RunSaver::save_waiting() {
  const SaveOutcome outcome = keeper_.save_waiting();
  if (!outcome.failure.empty()) return tell_failure(outcome.failure);
  saved_step_ = trainer_.position().step;
  tell_saved(outcome.result,
             fmt::format("written in {:.3g} s while training waited", outcome.write_seconds));
}

void RunSaver::save_again() {
  settle();
  saved_step_ = -1;
  save_now();
}

void RunSaver::tell(const SaveOutcome& outcome) {
  if (!outcome.failure.empty()) return tell_failure(outcome.failure);
  saved_step_ = writing_step_;
  tell_saved(outcome.result,
             fmt::format("written in {:.3g} s; training waited {:.3g} s", outcome.write_seconds,
                         stall_seconds_ + outcome.copy_stall));
  note_slow_copy(outcome);
}

void RunSaver::tell_failure(const std::string& failure) {
  note(fmt::format("warning: {}; training goes on without it, and saves again after {}", failure,
                   format_things(trainer_.settings().run.checkpoint_interval, "step")));
}

void RunSaver::tell_saved(const SaveResult& saved, const std::string& how) {
  note(fmt::format("saved {} ({})", saved.path.string(), how));
  for (const std::string& warning : saved.warnings) note("warning: " + warning);
}

void RunSaver::note(const std::string& text) {
  if (writer_ != nullptr) writer_->note(text);
}

}  // namespace tessera
