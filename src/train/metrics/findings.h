#pragma once

#include <string>
#include <vector>

#include "train/metrics/run_history.h"

namespace tessera {

/// How much a finding should worry the reader.
enum class Severity { kGood, kInfo, kWarning, kBad };

/// One sentence about a run.
struct Finding {
  Severity severity = Severity::kInfo;
  std::string text;
};

/// What a reader should know before looking at any curve: how the loss fell, experts that are dead,
/// starved or overloaded, dropped assignments, skipped updates, numbers that are not finite,
/// clipping, memory against its prediction.
std::vector<Finding> find_findings(const RunHistory& history);

/// A labelled figure of the run's summary, with an optional remark.
struct SummaryItem {
  std::string label;
  std::string value;
  std::string remark;
};
std::vector<SummaryItem> summarise(const RunHistory& history);

}  // namespace tessera
