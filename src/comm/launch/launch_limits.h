#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace tessera {

/// What the system lets the processes of a launch have; those without a limit have kUnlimited.
struct LaunchLimits {
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  int64_t open_files = kUnlimited;     ///< of a process: ulimit -n
  int64_t file_bytes = kUnlimited;     ///< of a file: ulimit -f
  int64_t address_space = kUnlimited;  ///< of a process: ulimit -v
  int64_t tasks = kUnlimited;          ///< processes and threads of the user: ulimit -u
  int64_t tasks_in_use = 0;
  int64_t stack_bytes = int64_t{8} << 20;  ///< that a thread reserves
  int64_t available_memory = kUnlimited;   ///< of the machine
};

/// This process's. It may open as many files as its hard limit allows afterwards, and so may the
/// processes that it starts.
LaunchLimits read_launch_limits();

/// Refuses limits under which Open MPI's mpirun cannot start `num_ranks` ranks here of this many
/// threads each: it would crash, hang or be killed. Throws UserError that says what the limit is
/// and what is needed.
void check_launch(const LaunchLimits& limits, int64_t num_ranks, int64_t num_threads);
/// Refuses limits under which this process, one of `num_ranks` ranks, cannot communicate by MPI
/// (`with_mpi`) or TCP.
void check_rank(const LaunchLimits& limits, int64_t num_ranks, bool with_mpi);

}  // namespace tessera
