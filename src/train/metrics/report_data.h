#pragma once

#include <string>

#include "train/metrics/run_history.h"

namespace tessera {

/// The data behind the charts of report.html, as JSON for its script: the curves, thinned out so
/// that the size stays bounded for any number of steps, and the expert loads over time. Safe inside
/// a <script> element.
std::string report_data_json(const RunHistory& history);

}  // namespace tessera
