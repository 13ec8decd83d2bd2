#include "comm/testing/torch_agent.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <optional>

#include "comm/launch/launch.h"
#include "comm/tcp/socket.h"
#include "core/error.h"

namespace tessera {
namespace {

constexpr int kSignalBase = 128;  // a shell's exit code for a signal
constexpr std::chrono::seconds kUntilKill{3};

std::vector<Address> loopback_v4(int64_t port) {
  std::vector<Address> addresses = loopback_addresses(static_cast<uint16_t>(port));
  std::erase_if(addresses, [](const Address& address) { return address.is_v6 != 0; });
  return addresses;
}

bool can_listen(int64_t port) {
  try {
    listen_on(loopback_v4(port));
    return true;
  } catch (const UserError&) {
    return false;
  }
}

sigset_t agent_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&set, signal);
  return set;
}

class Agent {
 public:
  Agent(int64_t num_ranks, const std::vector<std::string>& command, bool ends_others)
      : ends_others_(ends_others) {
    sigprocmask(SIG_BLOCK, &signals_, &old_signals_);
    const char* port = std::getenv("MASTER_PORT");
    const int64_t master_port = port != nullptr ? std::atoll(port) : find_free_port();
    store_ = listen_on(loopback_v4(master_port));
    for (int64_t rank = 0; rank < num_ranks; ++rank)
      start(command, torchrun_environment(rank, num_ranks, master_port));
  }

  int supervise() {
    while (!ranks_.empty()) {
      constexpr timespec kLook{.tv_sec = 0, .tv_nsec = 100'000'000};
      const int signal = sigtimedwait(&signals_, nullptr, &kLook);
      if (signal == SIGTERM || signal == SIGINT) send_all(signal);
      reap();
      if (kill_at_ && std::chrono::steady_clock::now() > *kill_at_) send_all(SIGKILL);
    }
    return code_;
  }

 private:
  void start(const std::vector<std::string>& command,
             const std::map<std::string, std::string>& environment) {
    const pid_t child = fork();
    ensure(child >= 0, "fork");
    if (child > 0) {
      ranks_.push_back(child);
      return;
    }
    setsid();
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 0);
    sigprocmask(SIG_SETMASK, &old_signals_, nullptr);
    std::vector<char*> arguments;
    for (const std::string& argument : command)
      arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    execv(arguments[0], arguments.data());
    _exit(kSignalBase - 1);
  }

  void send_all(int signal) {
    for (const pid_t rank : ranks_) kill(rank, signal);
  }

  void reap() {
    int status = 0;
    for (pid_t ended = 0; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
      std::erase(ranks_, ended);
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kSignalBase + WTERMSIG(status);
      if (code == 0 || code_ != 0) continue;
      code_ = code;
      if (!ends_others_) continue;
      send_all(SIGTERM);
      kill_at_ = std::chrono::steady_clock::now() + kUntilKill;
    }
  }

  const bool ends_others_;
  const sigset_t signals_ = agent_signals();
  sigset_t old_signals_{};
  Socket store_;
  std::vector<pid_t> ranks_;
  int code_ = 0;
  std::optional<std::chrono::steady_clock::time_point> kill_at_;
};

}  // namespace

int64_t find_free_port() {
  while (true) {
    const Socket socket = listen_on(loopback_v4(0));
    const int64_t port = local_address(socket).port;
    const auto variables = torchrun_environment(0, 2, port);
    const LaunchInfo info = detect_launch([&](const std::string& name) {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
    if (can_listen(info.port)) return port;
  }
}

std::map<std::string, std::string> torchrun_environment(int64_t rank, int64_t num_ranks,
                                                        int64_t master_port) {
  const char* local = std::getenv("LOCAL_WORLD_SIZE");
  const int64_t num_local = local != nullptr ? std::atoll(local) : num_ranks;
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(num_ranks)},
          {"LOCAL_RANK", std::to_string(rank % num_local)},
          {"LOCAL_WORLD_SIZE", std::to_string(num_local)},
          {"GROUP_RANK", std::to_string(rank / num_local)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(master_port)},
          {"OMP_NUM_THREADS", "1"},
          {"TORCHELASTIC_RESTART_COUNT", "0"},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

int run_torch_agent(int64_t num_ranks, const std::vector<std::string>& command, bool ends_others) {
  return Agent(num_ranks, command, ends_others).supervise();
}

}  // namespace tessera
