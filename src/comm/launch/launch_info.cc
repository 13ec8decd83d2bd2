#include <charconv>
#include <cstdlib>

#include "comm/launch/launch.h"
#include "core/error.h"

namespace tessera {
namespace {

// Defaults of srun (KillWait) and torchrun.
constexpr double kSchedulerKillSeconds = 30;

constexpr int64_t kLastPort = 65535;
constexpr int64_t kPortDistance = 1000;

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  bool has(const std::string& name) const { return environment_(name).has_value(); }
  /// A number above 1, as of several ranks.
  bool says_several(const std::string& name) const {
    return has(name) && parse(text(name)).value_or(0) > 1;
  }
  std::string text(const std::string& name) const {
    const auto value = environment_(name);
    require(value.has_value(),
            "the launcher set only some of its environment variables: {} is missing", name);
    return *value;
  }
  int64_t integer(const std::string& name, int64_t low, int64_t high) const {
    const std::string value = text(name);
    const std::optional<int64_t> number = parse(value);
    require(number && *number >= low && *number <= high,
            "environment variable {} is '{}'; a number from {} to {} is expected", name, value, low,
            high);
    return *number;
  }

 private:
  static std::optional<int64_t> parse(const std::string& value) {
    int64_t number = 0;
    const char* end = value.data() + value.size();
    const auto [rest, error] = std::from_chars(value.data(), end, number);
    if (error != std::errc() || rest != end) return std::nullopt;
    return number;
  }

  const Environment& environment_;
};

constexpr int64_t kMost = int64_t{1} << 30;

LaunchInfo read_open_mpi(const Reader& read) {
  LaunchInfo info;
  info.launcher = Launcher::kOpenMpi;
  info.num_ranks = read.integer("OMPI_COMM_WORLD_SIZE", 1, kMost);
  info.rank = read.integer("OMPI_COMM_WORLD_RANK", 0, info.num_ranks - 1);
  info.num_local_ranks = read.integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1, info.num_ranks);
  info.local_rank = read.integer("OMPI_COMM_WORLD_LOCAL_RANK", 0, info.num_local_ranks - 1);
  if (const std::string name = "OMPI_MCA_odls_base_sigkill_timeout"; read.has(name))
    info.kill_seconds = static_cast<double>(read.integer(name, 0, kMost));
  return info;
}

int64_t read_port(const Reader& read) {
  const int64_t port = read.integer("MASTER_PORT", 1, kLastPort);
  if (const std::string name = "TESSERA_PORT"; read.has(name))
    return read.integer(name, 1, kLastPort);
  // Then torchrun's agent has a server of its own there.
  if (const std::string name = "TORCHELASTIC_USE_AGENT_STORE";
      !read.has(name) || read.text(name) != "True")
    return port;
  return port + kPortDistance <= kLastPort ? port + kPortDistance : port - kPortDistance;
}

LaunchInfo read_torchrun(const Reader& read) {
  LaunchInfo info;
  info.launcher = Launcher::kTorchrun;
  info.num_ranks = read.integer("WORLD_SIZE", 1, kMost);
  info.rank = read.integer("RANK", 0, info.num_ranks - 1);
  info.local_rank = read.integer("LOCAL_RANK", 0, info.num_ranks - 1);
  if (const std::string name = "LOCAL_WORLD_SIZE"; read.has(name)) {
    info.num_local_ranks = read.integer(name, info.local_rank + 1, info.num_ranks);
    info.one_machine = info.num_local_ranks == info.num_ranks;
  }
  info.address = read.text("MASTER_ADDR");
  info.port = read_port(read);
  if (const std::string name = "TORCHELASTIC_RUN_ID"; read.has(name)) info.run = read.text(name);
  info.kill_seconds = kSchedulerKillSeconds;
  return info;
}

/// WORLD_SIZE without what else torchrun sets: one rank needs no more, several cannot find one
/// another, and each would train alone.
LaunchInfo read_world_size(const Reader& read) {
  const int64_t num_ranks = read.integer("WORLD_SIZE", 1, kMost);
  if (read.has("RANK")) read.integer("RANK", 0, num_ranks - 1);
  if (num_ranks == 1) return {};
  std::string missing;
  for (const char* name : {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    if (!read.has(name)) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
  user_error(
      "WORLD_SIZE is {}, as where a launcher starts several ranks, but {} {} missing, so that they "
      "cannot find one another: start them with torchrun, set the rest for each rank (RANK from 0 "
      "to "
      "{}; MASTER_ADDR and MASTER_PORT, where rank 0 listens), or unset WORLD_SIZE to run alone",
      num_ranks, missing, missing.find(',') == std::string::npos ? "is" : "are", num_ranks - 1);
}

/// What other launchers set for several ranks. Open MPI knows nothing of them, so each rank would
/// train alone.
void refuse_other_launchers(const Reader& read) {
  struct Variables {
    const char* size;
    const char* launcher;
  };
  for (const auto& [size, launcher] :
       {Variables{"PMI_SIZE", "MPICH's or Intel MPI's mpiexec"},
        Variables{"MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"},
        Variables{"JSM_NAMESPACE_SIZE", "jsrun"}, Variables{"FLUX_JOB_SIZE", "flux run"}}) {
    require(
        !read.says_several(size),
        "{} is {}: {} started this process as one of several, which Tessera cannot join; use Open "
        "MPI's mpirun, srun or torchrun, or unset {} to run alone",
        size, read.says_several(size) ? read.text(size) : "", launcher, size);
  }
  require(!read.has("PMIX_RANK") || !read.has("PMIX_NAMESPACE"),
          "PMIX_RANK is {}, but nothing says how many ranks there are: use Open MPI's mpirun, srun "
          "or torchrun, or unset PMIX_RANK to run alone",
          read.has("PMIX_RANK") ? read.text("PMIX_RANK") : "");
}

LaunchInfo read_slurm(const Reader& read) {
  LaunchInfo info;
  info.launcher = Launcher::kSlurm;
  info.num_ranks = read.integer("SLURM_STEP_NUM_TASKS", 1, kMost);
  info.rank = read.integer("SLURM_PROCID", 0, info.num_ranks - 1);
  info.local_rank = read.integer("SLURM_LOCALID", 0, info.num_ranks - 1);
  if (read.has("SLURM_NTASKS_PER_NODE"))
    info.num_local_ranks = read.integer("SLURM_NTASKS_PER_NODE", 1, kMost);
  info.kill_seconds = kSchedulerKillSeconds;
  return info;
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return value;
  };
}

LaunchInfo detect_launch(const Environment& environment) {
  const Reader read(environment);
  if (read.has("OMPI_COMM_WORLD_SIZE")) return read_open_mpi(read);
  // RANK alone is too common a name to mean anything.
  if (read.has("TORCHELASTIC_RUN_ID") || (read.has("RANK") && read.has("MASTER_ADDR")))
    return read_torchrun(read);
  // A batch script has the other two variables without being a task; its SLURM_PROCID is 0.
  if (read.has("SLURM_STEP_ID") && read.has("SLURM_PROCID") &&
      (read.has("SLURM_STEP_NUM_TASKS") || read.text("SLURM_PROCID") != "0"))
    return read_slurm(read);
  if (read.has("WORLD_SIZE")) return read_world_size(read);
  refuse_other_launchers(read);
  return {};
}

}  // namespace tessera
