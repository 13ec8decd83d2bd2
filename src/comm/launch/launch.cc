#include "comm/launch/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <thread>

#include "comm/error.h"
#include "comm/launch/launch_limits.h"
#include "comm/launch/launch_mark.h"
#include "comm/launch/mpi_world.h"
#include "comm/launch/supervisor.h"
#include "comm/shm/shm_transport.h"
#include "comm/tcp/tcp_transport.h"
#include "core/exit_code.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInstall = "install Open MPI (openmpi-bin)";

fs::path find_mpirun(const Environment& environment) {
  std::istringstream folders(environment("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path file = fs::path(folder) / "mpirun";
    if (access(file.c_str(), X_OK) == 0 && fs::is_regular_file(file)) return file;
  }
  user_error(
      "several ranks on one machine are started by mpirun, which is not in PATH; {}, or "
      "start the ranks with a launcher of your own",
      kInstall);
}

void check_is_open_mpi(const fs::path& mpirun) {
  std::string version;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(
      popen(fmt::format("'{}' --version 2>&1", mpirun.string()).c_str(), "r"), pclose);
  std::array<char, 256> line{};
  while (pipe && fgets(line.data(), line.size(), pipe.get()) != nullptr) version += line.data();
  require(
      version.find("Open MPI") != std::string::npos || version.find("OpenRTE") != std::string::npos,
      "{} is not Open MPI's: '{}'; {} or put its mpirun first in PATH", mpirun.string(),
      version.substr(0, version.find('\n')), kInstall);
}

[[noreturn]] void become_mpirun(const LaunchCommand& launch, const sigset_t& old_signals,
                                pid_t parent, int output) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(kInternalErrorCode);
  // A terminal's Ctrl-C must not reach mpirun, which would kill the ranks.
  setpgid(0, 0);
  for (const auto& [name, value] : launch.environment) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& argument : launch.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  if (std::freopen("/dev/null", "r", stdin) == nullptr) _exit(kInternalErrorCode);
  dup2(output, STDOUT_FILENO);
  sigprocmask(SIG_SETMASK, &old_signals, nullptr);
  execv(arguments[0], arguments.data());
  std::fprintf(stderr, "tessera: %s: %s\n", arguments[0], std::strerror(errno));
  _exit(kUserErrorCode);
}

/// Tells what no rank can: that a signal ended it, or that there were no ranks yet.
void explain(const LaunchEnd& end, bool connected, const std::vector<std::string>& arguments) {
  if (end.asked) return;
  if (end.signal() > 0) {
    std::cerr << fmt::format("tessera: a rank was ended by signal {} ({})\n", end.signal(),
                             strsignal(end.signal()));
    return;
  }
  if (connected || end.code == 0 || end.code == kUserErrorCode) return;
  std::string command;
  for (const std::string& argument : arguments) {
    if (argument != "--quiet") command += " " + argument;
  }
  std::cerr << fmt::format(
      "tessera: mpirun ended with exit code {} before the ranks were connected; what it has to say "
      "shows with{}\n",
      end.code, command);
}

int64_t threads_of(const LaunchCommand& launch, const Environment& environment) {
  const std::string name = "OMP_NUM_THREADS";
  std::string text = environment(name).value_or("1");
  for (const auto& [variable, value] : launch.environment) {
    if (variable == name) text = value;
  }
  return std::clamp<int64_t>(std::atoll(text.c_str()), 1, 1 << 20);
}

}  // namespace

std::shared_ptr<Transport> connect_transport(const LaunchInfo& info, const CommOptions& options) {
  const bool with_mpi = info.launcher != Launcher::kTorchrun;
  check_rank(read_launch_limits(), info.num_ranks, with_mpi);
  if (with_mpi) return connect_mpi(options, info.rank, info.num_ranks);
  return connect_tcp({.rank = info.rank,
                      .num_ranks = info.num_ranks,
                      .one_machine = info.one_machine,
                      .host = info.address,
                      .port = static_cast<uint16_t>(info.port),
                      .run = info.run,
                      .timeout_seconds = options.timeout_seconds});
}

std::unique_ptr<World> connect_world(CommOptions options) {
  const LaunchInfo info = detect_launch(process_environment());
  if (options.grace_seconds <= 0) options.grace_seconds = info.kill_seconds / 2;
  if (info.num_ranks == 1) return make_single_world();
  auto world = make_shared_world(connect_transport(info, options), options);
  const auto mark = process_environment()(LaunchMark::kVariable);
  if (mark && info.rank == 0 && info.launcher != Launcher::kTorchrun) send_launch_mark(*mark);
  return world;
}

LaunchCommand mpirun_command(int64_t num_ranks, const std::vector<std::string>& command,
                             const Environment& environment, int64_t num_cores) {
  LaunchCommand launch;
  if (geteuid() == 0) {
    launch.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
  }
  if (!environment("OMP_NUM_THREADS")) {
    launch.environment.emplace_back("OMP_NUM_THREADS",
                                    std::to_string(std::max<int64_t>(1, num_cores / num_ranks)));
  }
  // Waiting OpenMP threads must not spin on cores that other ranks need.
  if (!environment("OMP_WAIT_POLICY") && num_ranks > 1)
    launch.environment.emplace_back("OMP_WAIT_POLICY", "passive");
  launch.arguments = {
      // Quiet: what ended ranks say themselves would drown in what Open MPI adds.
      find_mpirun(environment).string(), "--quiet", "--oversubscribe", "--bind-to", "none", "-n",
      std::to_string(num_ranks)};
  launch.arguments.insert(launch.arguments.end(), command.begin(), command.end());
  return launch;
}

int launch_local_ranks(int64_t num_ranks, const std::vector<std::string>& command,
                       const LaunchSignals& signals, std::ostream& out) {
  const Environment environment = process_environment();
  require(num_ranks >= 1, "the number of ranks is {}; at least 1 is needed", num_ranks);
  require(detect_launch(environment).launcher == Launcher::kNone,
          "this process is a rank already: a launcher started it; leave out the number of ranks");
  const auto num_cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  LaunchCommand launch = mpirun_command(num_ranks, command, environment, num_cores);
  check_launch(read_launch_limits(), num_ranks, threads_of(launch, environment));
  check_is_open_mpi(launch.arguments[0]);
  const LaunchMark mark;
  launch.environment.emplace_back(LaunchMark::kVariable, mark.name());
  std::array<int, 2> pipe{};
  require(pipe2(pipe.data(), O_CLOEXEC) == 0, "no pipe for what the ranks print: {}",
          describe_errno(errno));
  FileDescriptor read_end(pipe[0]);
  FileDescriptor write_end(pipe[1]);
  signal(SIGCHLD, SIG_DFL);  // where it is ignored, nothing could be waited for
  const pid_t parent = getpid();
  const pid_t child = fork();
  require(child >= 0, "mpirun could not be started: {}", describe_errno(errno));
  if (child == 0) become_mpirun(launch, signals.before(), parent, write_end.get());
  write_end.reset();
  const LaunchEnd end = Supervisor(child, signals.all(), std::move(read_end), out).run();
  explain(end, mark.came(), launch.arguments);
  return end.code;
}

}  // namespace tessera
