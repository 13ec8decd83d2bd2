#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "train/metrics/run_history.h"

namespace tessera {

/// Texts about a run that its numbers do not tell. Empty ones are left out of the report.
struct RunInfo {
  std::string title;          ///< e.g. the name of the run
  std::string started;        ///< when, for people
  std::string machine;        ///< processor, cores, memory, measured peak
  std::string tokenizer;      ///< kind and vocabulary size
  std::string model_summary;  ///< several lines
  std::string config_text;    ///< the resolved configuration
  std::string sample_prompt;
  std::string sample_text;  ///< what the model wrote after the prompt
};

/// The whole page: self-contained HTML that loads nothing, light and dark, under about 1 MB for any
/// number of steps.
std::string make_report(const RunHistory& history, const RunInfo& info);

/// run.json of a run folder, where the texts are kept beside metrics.jsonl. A missing file gives
/// empty texts; a damaged one throws UserError.
void save_run_info(const std::filesystem::path& run_folder, const RunInfo& info);
RunInfo load_run_info(const std::filesystem::path& run_folder);

/// Rebuilds report.html of a run folder from its metrics.jsonl and run.json; returns the path of
/// the report. Throws UserError where there is no metrics.jsonl, or with the line number where it
/// is damaged.
std::filesystem::path write_report_from_run(const std::filesystem::path& run_folder);

}  // namespace tessera
