#include "train/tune/reward_command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <sstream>

#include "core/error.h"
#include "core/file/file.h"
#include "core/process/stopwatch.h"

namespace tessera {
namespace {

constexpr size_t kMostBytes = size_t{64} << 20;
constexpr double kMostReward = 1e30;

struct Pipe {
  FileDescriptor read, write;
};

/// Both ends are closed in what is started, but for what it is given as its own.
Pipe make_pipe() {
  std::array<int, 2> ends = {};
  require(::pipe2(ends.data(), O_CLOEXEC) == 0, "rl.reward_command: no pipe to it: {}",
          std::strerror(errno));
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

void set_nonblocking(const FileDescriptor& descriptor) {
  ::fcntl(descriptor.get(), F_SETFL, ::fcntl(descriptor.get(), F_GETFL) | O_NONBLOCK);
}

/// While it lives, writing to a command that does not read leaves an error and no signal.
class QuietPipe {
 public:
  QuietPipe() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~QuietPipe() {
    const timespec now = {};
    if (sigismember(&before_, SIGPIPE) == 0) {
      while (::sigtimedwait(&signal_, nullptr, &now) > 0) continue;
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  QuietPipe(const QuietPipe&) = delete;
  QuietPipe& operator=(const QuietPipe&) = delete;

 private:
  sigset_t signal_{};
  sigset_t before_{};
};

/// A shell in a process group of its own, that dies with this object.
class Shell {
 public:
  Shell(const std::string& command, const FileDescriptor& input, const FileDescriptor& output) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&actions, input.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);  // this process blocks some
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &pipe);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(
        &attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    std::string text = command;
    std::string name = "sh";
    std::string flag = "-c";
    const std::array<char*, 4> arguments = {name.data(), flag.data(), text.data(), nullptr};
    const int error =
        ::posix_spawn(&process_, "/bin/sh", &actions, &attributes, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (error != 0) process_ = -1;
    require(error == 0, "rl.reward_command: the shell cannot be started: {}", std::strerror(error));
  }
  ~Shell() {
    if (process_ < 0) return;
    ::kill(-process_, SIGKILL);
    wait();
  }
  Shell(const Shell&) = delete;
  Shell& operator=(const Shell&) = delete;

  /// Its status, once it ends; nothing where it still runs.
  bool has_ended(int& status) {
    if (::waitpid(process_, &status, WNOHANG) != process_) return false;
    process_ = -1;
    return true;
  }

 private:
  void wait() {
    int status = 0;
    while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) continue;
    process_ = -1;
  }

  pid_t process_ = -1;
};

/// Gives a command its input and takes its output, whichever is ready.
class Talk {
 public:
  Talk(const std::string& command, std::string_view given, double seconds)
      : given_(given),
        seconds_(seconds),
        input_(make_pipe()),
        output_(make_pipe()),
        shell_(command, input_.read, output_.write) {
    input_.read = FileDescriptor();
    output_.write = FileDescriptor();
    set_nonblocking(input_.write);
    set_nonblocking(output_.read);
  }

  std::string run() {
    bool is_open = true;
    while (is_open) {
      wait_until_ready();
      give();
      is_open = take();
    }
    int status = 0;
    while (!shell_.has_ended(status)) {
      check_time();
      ::poll(nullptr, 0, 1);
    }
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rl.reward_command {}",
            WIFEXITED(status) ? fmt::format("ended with exit code {}", WEXITSTATUS(status))
                              : fmt::format("was ended by signal {}", WTERMSIG(status)));
    return std::move(taken_);
  }

 private:
  void check_time() const {
    require(seconds_since(started_) < seconds_,
            "rl.reward_command had not ended after {} s; rl.reward_timeout allows it no more",
            seconds_);
  }

  void wait_until_ready() const {
    check_time();
    constexpr int kMilliseconds = 50;  // between looks at the clock
    std::array<pollfd, 2> ends = {pollfd{output_.read.get(), POLLIN, 0},
                                  pollfd{input_.write.get(), POLLOUT, 0}};
    ::poll(ends.data(), input_.write.get() >= 0 ? 2 : 1, kMilliseconds);
  }

  /// A command need not read all.
  void give() {
    if (input_.write.get() < 0) return;
    const ssize_t count = ::write(input_.write.get(), given_.data(), given_.size());
    if (count > 0) given_.remove_prefix(static_cast<size_t>(count));
    const bool refused = count < 0 && errno != EAGAIN && errno != EINTR;
    if (given_.empty() || refused) input_.write = FileDescriptor();
  }

  /// Whether there may be more.
  bool take() {
    std::array<char, 65536> part = {};
    const ssize_t count = ::read(output_.read.get(), part.data(), part.size());
    if (count == 0) return false;
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    taken_.append(part.data(), static_cast<size_t>(count));
    require(taken_.size() <= kMostBytes, "rl.reward_command printed more than {} bytes",
            kMostBytes);
    return true;
  }

  std::string_view given_;
  double seconds_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  Pipe input_, output_;
  Shell shell_;
  std::string taken_;
};

}  // namespace

std::string run_reward_command(const std::string& command, std::string_view given, double seconds) {
  const QuietPipe quiet;
  return Talk(command, given, seconds).run();
}

std::vector<double> parse_rewards(std::string_view text, int64_t count) {
  std::istringstream lines{std::string(text)};
  std::vector<double> rewards;
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream words(line);
    double reward = 0;
    std::string rest;
    // Of larger ones a group's mean or deviation would be infinite.
    const bool is_number = (words >> reward) && !(words >> rest) && std::abs(reward) <= kMostReward;
    require(
        is_number,
        "rl.reward_command: line {} of its output is \"{}\", expected a number of at most {} in "
        "size",
        number, line.substr(0, 80), kMostReward);
    rewards.push_back(reward);
  }
  require(std::ssize(rewards) == count,
          "rl.reward_command printed {} lines for {} answers; it must print a number a line, in "
          "their order",
          rewards.size(), count);
  return rewards;
}

}  // namespace tessera
