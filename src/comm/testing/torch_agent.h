#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera {

/// What torchrun sets for a rank.
std::map<std::string, std::string> torchrun_environment(int64_t rank, int64_t num_ranks,
                                                        int64_t master_port);
/// A port that is free, as is the one that ranks take instead of it under torchrun.
int64_t find_free_port();

/// Runs `command` as local ranks in the way of torchrun's agent: it listens at MASTER_PORT for a
/// store of its own, passes SIGTERM and SIGINT on, ends all ranks when one fails, with SIGTERM and
/// a little later SIGKILL, and returns the exit code of the first that failed. Variables that are
/// set already are left as they are; LOCAL_WORLD_SIZE=1 makes ranks of machines with one rank each.
/// Without `ends_others` ranks that go on after others failed are left alone.
int run_torch_agent(int64_t num_ranks, const std::vector<std::string>& command, bool ends_others);

}  // namespace tessera
