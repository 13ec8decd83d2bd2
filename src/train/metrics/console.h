#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "core/process/progress.h"
#include "train/metrics/step_record.h"

namespace tessera {

/// A column of the step table.
struct ConsoleColumn {
  std::string title;
  int width = 0;
  std::string (*cell)(const StepRecord&) = nullptr;
};

/// The columns that suit a run and fit in `width` characters: none that would stay empty, and the
/// less important ones left out where the terminal is narrow. Decided by the run's first record.
std::vector<ConsoleColumn> choose_columns(const StepRecord& first, int width);
std::string format_header(const std::vector<ConsoleColumn>& columns);
/// One aligned line. Trouble (drops, skipped updates, numbers that are not finite) is said in words
/// at its end.
std::string format_step(const std::vector<ConsoleColumn>& columns, const StepRecord& record);
/// "validation at step 100: loss 4.1234 (perplexity 61.8), best so far, 1.2s".
std::string format_validation(const ValidationRecord& record, bool is_best);
/// The text beside the progress bar: steps, loss, speed, time left.
std::string format_live(const StepRecord& record);

struct ConsoleOptions {
  int64_t every = 1;  ///< steps between lines; the first and last step and any step with trouble
                      ///< are always shown
  Terminal terminal;
};

/// Shows a run: a header once, lines of steps and validations, and on an interactive terminal a
/// live progress bar under them.
class Console {
 public:
  Console(std::ostream& out, const ConsoleOptions& options);
  void step(const StepRecord& record);
  void validation(const ValidationRecord& record, bool is_best);
  /// A line of text of its own.
  void note(std::string_view text) { bar_.print(text); }
  /// Removes the live bar.
  void finish() { bar_.clear(); }

 private:
  bool wants_line(const StepRecord& record) const;

  ProgressBar bar_;
  int64_t every_;
  int64_t skipped_steps_ = 0;
  int64_t repeated_steps_ = 0;
  std::vector<ConsoleColumn> columns_;
};

}  // namespace tessera
