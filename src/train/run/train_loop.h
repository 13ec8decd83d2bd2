#pragma once

#include <ostream>
#include <string>

#include "comm/communicator.h"
#include "core/process/progress.h"
#include "train/setup/settings.h"

namespace tessera {

/// Runs a whole training, from the settings to the report; rank 0 prints to `out` and writes the
/// metrics. All ranks call. Returns 0, also when a signal ended it after saving.
struct TrainRequest {
  Settings settings;
  std::string config_toml;  ///< the resolved configuration, for checkpoints and the report
  Terminal terminal;
  std::string trace = {};  ///< file for a trace of the second step and some more; empty: none
  int64_t trace_steps = 2;
};
int train(const TrainRequest& request, World& world, std::ostream& out);

}  // namespace tessera
