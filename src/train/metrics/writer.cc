#include "train/metrics/writer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace tessera {
namespace {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

RunWriter::RunWriter(std::ostream& out, const RunWriterOptions& options, RunInfo info)
    : options_(options), info_(std::move(info)), console_(out, options.console) {
  make_folder(options_.folder);
  const std::filesystem::path metrics = options_.folder / "metrics.jsonl";
  const std::filesystem::path events = options_.folder / "tensorboard";
  if (options_.resume_after) {
    truncate_metrics(metrics, *options_.resume_after,
                     {[&](const StepRecord& record) { history_.add(record); },
                      [&](const ValidationRecord& record) { history_.add(record); }});
  }
  metrics_.emplace(metrics,
                   options_.resume_after ? AppendFile::Start::kAtEnd : AppendFile::Start::kEmpty);
  if (options_.tensorboard) {
    make_folder(events);
    tensorboard_.emplace(events, options_.resume_after ? *options_.resume_after + 1 : 0);
  }
  save_run_info(options_.folder, info_);
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
  if (options_.report) write_report();
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
