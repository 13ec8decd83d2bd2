#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "train/metrics/append_file.h"
#include "train/metrics/step_record.h"

namespace tessera {

/// One line of metrics.jsonl without its end of line: an object whose "type" is "step" or
/// "validation". A number that is not finite is null, and the object "nonfinite" gives it as "nan",
/// "inf" or "-inf".
std::string to_json_line(const StepRecord& record);
std::string to_json_line(const ValidationRecord& record);

/// What to do with each line of a metrics file, in order. An empty function skips.
struct MetricsVisitor {
  std::function<void(const StepRecord&)> step;
  std::function<void(const ValidationRecord&)> validation;
};

/// Reads metrics.jsonl. Unknown keys are ignored. A last line without its end of line is what a
/// killed process leaves and is passed over; any other line that is malformed, or whose step goes
/// backwards, throws UserError with file and line number.
void read_metrics(const std::filesystem::path& path, const MetricsVisitor& visitor);

/// Removes the lines of steps beyond `last_step` and a torn last line, so that a resumed run holds
/// every step once; the lines that stay are given to `visitor`. A missing file counts as empty.
/// Throws UserError as read_metrics does, with the file as it was.
void truncate_metrics(const std::filesystem::path& path, int64_t last_step,
                      const MetricsVisitor& visitor);

/// Renames what stands at a path to a free name, "metrics.jsonl.1" or with a higher number, which
/// it gives; nothing where nothing stands there.
std::optional<std::filesystem::path> rename_aside(const std::filesystem::path& path);

/// Appends lines to metrics.jsonl.
class MetricsFile {
 public:
  MetricsFile(const std::filesystem::path& path, AppendFile::Start start) : file_(path, start) {}
  void write(const StepRecord& record) { file_.append(to_json_line(record) + '\n'); }
  void write(const ValidationRecord& record) { file_.append(to_json_line(record) + '\n'); }
  AppendFile& file() { return file_; }

 private:
  AppendFile file_;
};

}  // namespace tessera
