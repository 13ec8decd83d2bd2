#pragma once

#include <string>

#include "comm/agreement/agreement.h"
#include "train/setup/settings.h"

namespace tessera {

/// The program of this process: the first topic of a rank's statement.
RankStatement state_program(const std::string& command, const std::string& version);

/// Adds what a training run's ranks must have alike: every key of the configuration, the data and
/// other files as this rank sees them, the environment (see compared_environment), and what
/// run.device = "auto" finds. Throws UserError for files that cannot be read; the topics before are
/// there then.
void state_run(RankStatement& statement, const ConfigSchema& schema, const Settings& settings,
               const std::string& trace);

}  // namespace tessera
