#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/launch/launch_signals.h"
#include "comm/options.h"
#include "comm/transport.h"

namespace tessera {

/// Who started this process as one of several ranks.
enum class Launcher : uint8_t { kNone, kOpenMpi, kSlurm, kTorchrun };

struct LaunchInfo {
  Launcher launcher = Launcher::kNone;
  int64_t rank = 0;
  int64_t num_ranks = 1;
  int64_t local_rank = 0;  ///< among the ranks on this machine
  int64_t num_local_ranks = 1;
  bool one_machine = false;  ///< all ranks are on this machine, as far as the launcher says so
  std::string address;       ///< rank 0's machine: torchrun's MASTER_ADDR
  int64_t port = 0;          ///< where rank 0 listens for the others, where torchrun started them
  std::string run;           ///< torchrun's name of the run
  /// What the launcher leaves between SIGTERM and SIGKILL.
  double kill_seconds = 1;
};

/// The value of an environment variable, or nothing.
using Environment = std::function<std::optional<std::string>(const std::string&)>;
/// This process's.
Environment process_environment();

/// Reads what launchers leave in the environment: Open MPI's mpirun (OMPI_COMM_WORLD_*), torchrun
/// and what does as it does (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT;
/// LOCAL_WORLD_SIZE where known), Slurm's srun (SLURM_STEP_ID, SLURM_PROCID, SLURM_STEP_NUM_TASKS),
/// in this order: torchrun is often started by srun. Throws UserError for a variable that is
/// missing, no number or out of range, and where variables say that this process is one of several
/// but not how it finds the others: WORLD_SIZE above 1 without the rest, or those of a launcher
/// whose ranks cannot be joined. RANK alone means nothing.
///
/// The port for rank 0 is TESSERA_PORT; otherwise MASTER_PORT, or that + 1000 (- 1000 at the end of
/// the range) where torchrun's agent says that it listens at MASTER_PORT itself
/// (TORCHELASTIC_USE_AGENT_STORE).
LaunchInfo detect_launch(const Environment& environment);

/// Joins the ranks that the launcher started: through MPI where mpirun or srun did, by TCP where
/// torchrun did; a world of one rank without a launcher. Throws UserError.
std::unique_ptr<World> connect_world(CommOptions options = {});
/// By what the world of several ranks would be joined, without memory that they share.
std::shared_ptr<Transport> connect_transport(const LaunchInfo& info, const CommOptions& options);

/// The environment and the command that run `command` as `num_ranks` local ranks.
struct LaunchCommand {
  std::vector<std::pair<std::string, std::string>> environment;
  std::vector<std::string> arguments;
};
LaunchCommand mpirun_command(int64_t num_ranks, const std::vector<std::string>& command,
                             const Environment& environment, int64_t num_cores);

/// Runs `command` (program and arguments) as local ranks under mpirun and returns its exit code.
/// While they run, the first SIGINT, SIGTERM or SIGHUP reaches every rank as SIGUSR1, a request to
/// save and stop (mpirun itself would kill the ranks); a second SIGINT or SIGTERM ends them. If
/// this process dies, they end as well. What the ranks print goes through this process to `out`,
/// which stands for its standard output: mpirun would end the run when nobody reads that. Throws
/// UserError where Open MPI's mpirun is missing, or this process is a rank already. `signals` were
/// blocked before threads were started.
int launch_local_ranks(int64_t num_ranks, const std::vector<std::string>& command,
                       const LaunchSignals& signals, std::ostream& out);

/// Runs a rank's part of the program and returns its exit code, after all ranks have come to the
/// end of theirs. In a world of several ranks an exception is told on standard error with the
/// rank's number, and ends all ranks with code 2 for UserError, 1 otherwise; ranks but the first
/// wait a moment, so that a mistake that all ranks find is told once. In a world of one rank
/// exceptions pass through.
int run_rank(World& world, const std::function<int()>& body);

}  // namespace tessera
