#include "train/run/run_saver.h"

#include <fmt/format.h>

#include "core/process/stopwatch.h"

namespace tessera {

void RunSaver::save_between_steps() {
  if (saved_step_ == trainer_.position().step) return;
  if (!trainer_.saves_in_background()) return save_now();
  wait_for_last();
  begin();
}

void RunSaver::begin() {
  const auto start = Clock::now();
  writing_step_ = trainer_.position().step;
  const SaveOutcome outcome = keeper_.begin_save();
  stall_seconds_ = seconds_since(start);
  if (!outcome.failure.empty()) tell(outcome);
}

void RunSaver::wait_for_last() {
  if (!keeper_.is_saving()) return;
  const int64_t step = writing_step_;
  const auto start = Clock::now();
  settle();
  constexpr double kWorthANote = 1;  // seconds
  if (noted_wait_ || seconds_since(start) < kWorthANote) return;
  noted_wait_ = true;
  note(
      fmt::format("note: training waited {:.3g} s until the checkpoint of step {} was written: the "
                  "disk is slower than the saves; raise run.checkpoint_interval, or use a faster "
                  "disk",
                  seconds_since(start), step));
}

void RunSaver::go_on() {
  if (!keeper_.is_saving()) return;
  const auto start = Clock::now();
  const auto outcome = keeper_.go_on_with_save();
  stall_seconds_ += seconds_since(start);
  if (outcome) tell(*outcome);
}

void RunSaver::settle() {
  if (!keeper_.is_saving()) return;
  const auto start = Clock::now();
  const SaveOutcome outcome = keeper_.finish_save();
  stall_seconds_ += seconds_since(start);
  tell(outcome);
}

void RunSaver::save_now() {
  settle();
  if (saved_step_ == trainer_.position().step) return;
  const SaveResult saved = keeper_.save();
  saved_step_ = trainer_.position().step;
  note(fmt::format("saved {}", saved.path.string()));
  for (const std::string& warning : saved.warnings) note("warning: " + warning);
}

void RunSaver::save_again() {
  settle();
  saved_step_ = -1;
  save_now();
}

void RunSaver::tell(const SaveOutcome& outcome) {
  if (!outcome.failure.empty()) {
    note(fmt::format("warning: {}; training goes on without it, and saves again after {}",
                     outcome.failure,
                     format_things(trainer_.settings().run.checkpoint_interval, "step")));
    return;
  }
  saved_step_ = writing_step_;
  note(fmt::format("saved {} (written in {:.3g} s; training waited {:.3g} s)",
                   outcome.result.path.string(), outcome.write_seconds, stall_seconds_));
  for (const std::string& warning : outcome.result.warnings) note("warning: " + warning);
}

void RunSaver::note(const std::string& text) {
  if (writer_ != nullptr) writer_->note(text);
}

}  // namespace tessera
