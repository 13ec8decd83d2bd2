#include "comm/shm/memory_access.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "comm/shm/peer_memory.h"

namespace tessera {
namespace {

/// 0, or the error of a child that reads this process's memory.
int try_to_read() {
  const uint64_t value = 42;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return errno;
  if (child == 0) {
    uint64_t read = 0;
    FileDescriptor process(static_cast<int>(syscall(SYS_pidfd_open, parent, 0)));
    if (!process) _exit(errno);
    const PeerMemory memory(parent, std::move(process));
    const auto outcome = memory.read(reinterpret_cast<uint64_t>(&value), &read, sizeof(read));
    _exit(outcome == PeerMemory::Outcome::kRead ? 0 : errno);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : EFAULT;
}

}  // namespace

std::string why_memory_is_not_shared() {
  const int error = try_to_read();
  if (error == 0) return "";
  return fmt::format("processes may not read one another's memory ({})", describe_errno(error));
}

}  // namespace tessera
