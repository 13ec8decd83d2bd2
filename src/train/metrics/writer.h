#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "train/metrics/console.h"
#include "train/metrics/jsonl.h"
#include "train/metrics/report.h"
#include "train/metrics/run_history.h"
#include "train/metrics/tensorboard.h"

namespace tessera {

struct RunWriterOptions {
  std::filesystem::path folder;  ///< made where it is missing
  std::optional<int64_t>
      resume_after;  ///< the last step of the checkpoint that the run continues; empty: a new run
  /// What the metrics must say of that step to be this run's; empty: not compared.
  std::optional<int64_t> resume_tokens = {};
  bool tensorboard = true;
  bool report = true;
  double report_seconds = 20.0;  ///< least time between two writings of the report
  ConsoleOptions console;
};

/// Everything that a run tells: the console, and in the run's folder metrics.jsonl, tensorboard/,
/// run.json and report.html. Owned by the training loop and used from one thread. Every failure to
/// write is a UserError.
class RunWriter {
 public:
  /// A new run empties the metrics of an older one in the same folder. A resumed one drops what the
  /// older process recorded beyond `resume_after` and continues the files. Metrics that are damaged
  /// or of another run are set aside, with a note.
  RunWriter(std::ostream& out, const RunWriterOptions& options, RunInfo info);

  void record(const StepRecord& record);
  void validation(const ValidationRecord& record);
  /// A line on the console.
  void note(std::string_view text) { console_.note(text); }
  /// A text that the model wrote, for the report.
  void set_sample(std::string prompt, std::string text);
  /// Puts back what others removed from the folder or put in its place, with a note; what stood in
  /// place of the metrics is set aside.
  void restore_files();
  /// Leaves the folder, which is the run's no more: no report is written there.
  void abandon_folder() { abandoned_ = true; }
  /// Goes on in another folder, which gets the metrics so far.
  void move_to(const std::filesystem::path& folder);
  /// Writes the report a last time and removes the live bar. Also to be called before a run stops
  /// early.
  void finish();

  const RunHistory& history() const { return history_; }
  std::filesystem::path report_path() const { return options_.folder / "report.html"; }

 private:
  void continue_metrics(const std::filesystem::path& metrics);
  void show_validation(const ValidationRecord& record);
  void write_report();
  void write_report_when_due();

  RunWriterOptions options_;
  RunInfo info_;
  Console console_;
  RunHistory history_;
  std::optional<MetricsFile> metrics_;
  std::optional<TensorBoardFile> tensorboard_;
  double report_due_ = 0.0;
  bool abandoned_ = false;
};

}  // namespace tessera
