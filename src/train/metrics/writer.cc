#include "train/metrics/writer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The run's own record of the step that it goes on from, where there is one.
void require_history(const RunHistory& history, int64_t step, std::optional<int64_t> tokens) {
  if (!tokens || history.steps().empty() || history.steps().back().step != step) return;
  const int64_t found = history.steps().back().tokens_seen;
  require(found == *tokens, "step {} has seen {} tokens there, and {} in the checkpoint", step,
          found, *tokens);
}

}  // namespace

RunWriter::RunWriter(std::ostream& out, const RunWriterOptions& options, RunInfo info)
    : options_(options), info_(std::move(info)), console_(out, options.console) {
  make_folder(options_.folder);
  const std::filesystem::path metrics = options_.folder / "metrics.jsonl";
  const std::filesystem::path events = options_.folder / "tensorboard";
  if (options_.resume_after) continue_metrics(metrics);
  metrics_.emplace(metrics,
                   options_.resume_after ? AppendFile::Start::kAtEnd : AppendFile::Start::kEmpty);
  if (options_.tensorboard) {
    make_folder(events);
    tensorboard_.emplace(events, options_.resume_after ? *options_.resume_after + 1 : 0);
  }
  save_run_info(options_.folder, info_);
}

/// A history that does not fit the checkpoint must not keep the run from going on.
void RunWriter::continue_metrics(const std::filesystem::path& metrics) {
  const int64_t last = *options_.resume_after;
  try {
    truncate_metrics(metrics, last,
                     {[&](const StepRecord& record) { history_.add(record); },
                      [&](const ValidationRecord& record) { history_.add(record); }});
    require_history(history_, last, options_.resume_tokens);
  } catch (const UserError& error) {
    history_ = {};
    const auto aside = rename_aside(metrics);
    note(
        fmt::format("note: {} does not fit the checkpoint ({}); it is kept as {}, and the history "
                    "begins anew after step {}",
                    metrics.string(), error.what(), aside ? aside->string() : "nothing", last));
    return;
  }
  const int64_t newest = history_.steps().empty() ? 0 : history_.steps().back().step;
  if (newest < last) {
    note(fmt::format("note: {} lacks the steps {} to {}", metrics.string(), newest + 1, last));
  }
}

void RunWriter::restore_files() {
  AppendFile& metrics = metrics_->file();
  if (!metrics.in_place()) {
    const auto aside = rename_aside(metrics.path());
    metrics.move_to(metrics.path());
    note(fmt::format("warning: {} was {} while the run went on; it is back, with all steps",
                     metrics.path().string(),
                     aside ? fmt::format("replaced (by what is {} now)", aside->string())
                           : std::string("removed")));
  }
  if (tensorboard_ && !tensorboard_->file().in_place()) {
    AppendFile& events = tensorboard_->file();
    make_folder(events.path().parent_path());
    events.move_to(events.path());
    note(fmt::format("warning: {} was removed while the run went on; it is back",
                     events.path().string()));
  }
}

void RunWriter::move_to(const std::filesystem::path& folder) {
  options_.folder = folder;
  abandoned_ = false;
  make_folder(folder);
  const std::filesystem::path metrics = folder / "metrics.jsonl";
  if (!std::filesystem::exists(metrics)) metrics_->file().move_to(metrics);
  tensorboard_.reset();
  save_run_info(folder, info_);
}

void RunWriter::record(const StepRecord& record) {
  const bool validated = record.validation_loss.has_value();
  const ValidationRecord validated_now{record.step, record.tokens_seen,
                                       record.validation_loss.value_or(0.0), 0.0};
  console_.step(record);
  if (validated) show_validation(validated_now);
  history_.add(record);
  metrics_->write(record);
  if (tensorboard_) tensorboard_->write(record);
  write_report_when_due();
}

void RunWriter::validation(const ValidationRecord& record) {
  show_validation(record);
  history_.add(record);
  metrics_->write(record);
  if (tensorboard_) tensorboard_->write(record);
}

void RunWriter::show_validation(const ValidationRecord& record) {
  const auto best = history_.best_validation();
  console_.validation(record, std::isfinite(record.loss) && (!best || record.loss < best->loss));
}

void RunWriter::set_sample(std::string prompt, std::string text) {
  info_.sample_prompt = std::move(prompt);
  info_.sample_text = std::move(text);
  save_run_info(options_.folder, info_);
}

void RunWriter::finish() {
  console_.finish();
  if (options_.report && !abandoned_) write_report();
}

void RunWriter::write_report() {
  replace_file(report_path(), make_report(history_, info_));
}

void RunWriter::write_report_when_due() {
  if (!options_.report || steady_seconds() < report_due_) return;
  const double began = steady_seconds();
  write_report();
  // A report that takes long to make is made less often, so that it never costs more than 2 % of
  // the time.
  const double ended = steady_seconds();
  report_due_ = ended + std::max(options_.report_seconds, 50.0 * (ended - began));
}

}  // namespace tessera
