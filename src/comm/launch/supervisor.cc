#include "comm/launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <iostream>

#include "core/error.h"

namespace tessera {
namespace {

constexpr int kSignalBase = 128;  // a shell's exit code for a signal
constexpr int kLookMs = 200;      // where the system does not tell of a process's end

}  // namespace

Supervisor::Supervisor(pid_t mpirun, const sigset_t& signals, FileDescriptor printed,
                       std::ostream& out)
    : mpirun_(mpirun),
      ended_(static_cast<int>(syscall(SYS_pidfd_open, mpirun, 0))),
      signals_(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK)),
      printed_(std::move(printed)),
      out_(out) {
  ensure(static_cast<bool>(signals_), "signalfd: {}", describe_errno(errno));
  fcntl(printed_.get(), F_SETFL, O_NONBLOCK);
}

int LaunchEnd::signal() const {
  return code > kSignalBase && code < kSignalBase + NSIG ? code - kSignalBase : 0;
}

LaunchEnd Supervisor::run() {
  while (!abandoned_) {
    int status = 0;
    if (!code_ && waitpid(mpirun_, &status, WNOHANG) == mpirun_) code_ = code_of(status);
    const bool more = text_.empty() && take_text();
    // Processes that outlive mpirun may hold the pipe open, so its end is not waited for.
    if (code_ && text_.empty() && !more) break;
    wait();
  }
  return {.code = *code_, .asked = asked_by_ != 0};
}

/// Ranks that do not train yet are ended by what asks them to stop, which stands for the user's.
int Supervisor::code_of(int status) const {
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kSignalBase + WTERMSIG(status);
  return asked_by_ != 0 && code == kSignalBase + SIGUSR1 ? kSignalBase + asked_by_ : code;
}

/// Standard output is waited for before it is written to, so that a reader who is slow keeps no
/// signal from being passed on.
void Supervisor::wait() {
  std::array<pollfd, 4> states = {{{signals_.get(), POLLIN, 0},
                                   {text_.empty() ? printed_.get() : -1, POLLIN, 0},
                                   {text_.empty() ? -1 : STDOUT_FILENO, POLLOUT, 0},
                                   {code_ || !ended_ ? -1 : ended_.get(), POLLIN, 0}}};
  if (poll(states.data(), states.size(), ended_ ? -1 : kLookMs) < 0) return;
  if (states[0].revents != 0) take_signal();
  if (states[2].revents == 0) return;
  out_ << text_ << std::flush;
  text_.clear();
}

bool Supervisor::take_text() {
  if (!printed_) return false;
  std::array<char, 512> buffer{};  // a pipe or terminal that is ready takes as much at once
  const ssize_t count = read(printed_.get(), buffer.data(), buffer.size());
  if (count > 0) text_.assign(buffer.data(), count);
  if (count == 0) printed_.reset();
  return count > 0;
}

void Supervisor::take_signal() {
  signalfd_siginfo info{};
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info))
    pass_on(static_cast<int>(info.ssi_signo));
}

/// A lost terminal sends SIGHUP more than once, and nobody is there who could mean the second.
void Supervisor::pass_on(int signal) {
  if (code_) {
    abandoned_ = true;
    return;
  }
  const bool again = asked_by_ != 0;
  if (again && signal == SIGHUP) return;
  std::cerr << (again ? "tessera: ending all ranks\n"
                      : "tessera: all ranks are asked to stop; once more ends them\n");
  kill(mpirun_, again ? SIGTERM : SIGUSR1);
  if (!again) asked_by_ = signal;
}

}  // namespace tessera
