#include "comm/launch/launch_limits.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "core/error.h"

namespace tessera {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kKiB = int64_t{1} << 10;

// Measured with Open MPI 4.1: mpirun has 25 files open and 6 for each rank; its ranks share memory
// through files of 4 MiB; it has 4 threads, and a rank 4 beside those that compute. An idle rank
// has 30 MiB of memory.
constexpr int64_t kFilesOfMpirun = 32;
constexpr int64_t kFilesOfOneRank = 8;
constexpr int64_t kFilesOfTcp = 32;  // of a rank, beside two for each other rank
constexpr int64_t kFileBytes = 8 * kMiB;
constexpr int64_t kTasksOfMpirun = 6;
constexpr int64_t kTasksOfOneRank = 4;
constexpr int64_t kAddressSpace = 384 * kMiB;
constexpr int64_t kMemoryOfOneRank = 24 * kMiB;

int64_t soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return LaunchLimits::kUnlimited;
  return static_cast<int64_t>(
      std::min<rlim_t>(limit.rlim_cur, static_cast<rlim_t>(LaunchLimits::kUnlimited)));
}

void raise_open_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

/// The number after "NAME:" in a file such as /proc/self/status; 0 where there is none.
int64_t read_number(const std::filesystem::path& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return std::atoll(line.c_str() + name.size());
  }
  return 0;
}

/// Threads of all processes of this user.
int64_t count_tasks() {
  int64_t count = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::filesystem::path status = entry->path() / "status";
    if (std::isdigit(static_cast<unsigned char>(entry->path().filename().c_str()[0])) != 0 &&
        read_number(status, "Uid:") == static_cast<int64_t>(getuid()))
      count += read_number(status, "Threads:");
  }
  return count;
}

void check_open_files(const LaunchLimits& limits, int64_t needed, const std::string& who) {
  require(limits.open_files >= needed,
          "a process may have {} files open (ulimit -n), but {} needs up to {}: raise it with "
          "`ulimit -n {}`",
          limits.open_files, who, needed, needed);
}

/// What Open MPI asks of every process of a run.
void check_mpi(const LaunchLimits& limits) {
  require(limits.file_bytes >= kFileBytes,
          "a file may have {} KiB (ulimit -f), but Open MPI's ranks share memory through files of "
          "up to {} KiB: raise it with `ulimit -f unlimited`",
          limits.file_bytes / kKiB, kFileBytes / kKiB);
}

void check_address_space(const LaunchLimits& limits, int64_t num_threads) {
  const int64_t needed = kAddressSpace + num_threads * limits.stack_bytes;
  require(limits.address_space >= needed,
          "a process may have {} KiB of address space (ulimit -v), but a rank of {} thread{} under "
          "Open MPI needs at least {} KiB: raise it with `ulimit -v unlimited`",
          limits.address_space / kKiB, num_threads, num_threads == 1 ? "" : "s", needed / kKiB);
}

}  // namespace

LaunchLimits read_launch_limits() {
  raise_open_files();
  LaunchLimits limits;
  limits.open_files = soft_limit(RLIMIT_NOFILE);
  limits.file_bytes = soft_limit(RLIMIT_FSIZE);
  limits.address_space = soft_limit(RLIMIT_AS);
  if (const int64_t stack = soft_limit(RLIMIT_STACK); stack != LaunchLimits::kUnlimited)
    limits.stack_bytes = stack;
  // The system does not count root's.
  if (getuid() != 0) limits.tasks = soft_limit(RLIMIT_NPROC);
  if (limits.tasks != LaunchLimits::kUnlimited) limits.tasks_in_use = count_tasks();
  if (const int64_t left = read_number("/proc/meminfo", "MemAvailable:"); left > 0)
    limits.available_memory = left * kKiB;
  return limits;
}

void check_launch(const LaunchLimits& limits, int64_t num_ranks, int64_t num_threads) {
  check_open_files(limits, kFilesOfMpirun + num_ranks * kFilesOfOneRank,
                   fmt::format("mpirun with {} ranks", num_ranks));
  check_mpi(limits);
  check_address_space(limits, num_threads);
  const int64_t tasks = kTasksOfMpirun + num_ranks * (kTasksOfOneRank + num_threads);
  require(
      limits.tasks == LaunchLimits::kUnlimited || limits.tasks_in_use + tasks <= limits.tasks,
      "this user may have {} processes and threads (ulimit -u) and has {}, but mpirun and {} "
      "ranks of {} thread{} need up to {} more: raise it with `ulimit -u {}`, or use fewer ranks "
      "or threads (OMP_NUM_THREADS)",
      limits.tasks, limits.tasks_in_use, num_ranks, num_threads, num_threads == 1 ? "" : "s", tasks,
      limits.tasks_in_use + tasks);
  require(
      num_ranks <= limits.available_memory / kMemoryOfOneRank,
      "{} ranks on this machine take at least {} MiB of memory even without a model, and {} MiB "
      "are left: start fewer",
      num_ranks, num_ranks * (kMemoryOfOneRank / kMiB), limits.available_memory / kMiB);
}

void check_rank(const LaunchLimits& limits, int64_t num_ranks, bool with_mpi) {
  check_open_files(limits, kFilesOfTcp + 2 * num_ranks, fmt::format("one of {} ranks", num_ranks));
  if (with_mpi) check_mpi(limits);
}

}  // namespace tessera
