#include "comm/process_watch.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace tessera {
namespace {

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string pid_namespace() {
  std::array<char, 64> target{};
  const ssize_t length = readlink("/proc/self/ns/pid", target.data(), target.size() - 1);
  return {target.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

}  // namespace

ProcessName ProcessName::of_this_process() {
  ProcessName name;
  const std::string machine = boot_id() + " " + pid_namespace();
  machine.copy(name.machine.data(), name.machine.size() - 1);
  name.pid = getpid();
  return name;
}

ProcessWatch::ProcessWatch(const std::vector<ProcessName>& names) : parent_(getppid()) {
  const ProcessName self = ProcessName::of_this_process();
  for (size_t rank = 0; rank < names.size(); ++rank) {
    const ProcessName& name = names[rank];
    if (name.machine != self.machine || name.pid == self.pid) continue;
    const auto descriptor =
        static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(name.pid), 0));
    if (descriptor >= 0) peers_.push_back({static_cast<int64_t>(rank), name.pid, descriptor});
  }
}

ProcessWatch::~ProcessWatch() {
  for (const Peer& peer : peers_) close(peer.descriptor);
}

std::optional<std::string> ProcessWatch::lost() const {
  if (getppid() != parent_) return fmt::format("the launcher (process {}) has ended", parent_);
  std::vector<pollfd> states;
  for (const Peer& peer : peers_) states.push_back({peer.descriptor, POLLIN, 0});
  if (poll(states.data(), states.size(), 0) <= 0) return std::nullopt;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].revents != 0)
      return fmt::format("rank {} (process {}) has ended", peers_[i].rank, peers_[i].pid);
  }
  return std::nullopt;
}

}  // namespace tessera
