#include "core/limits.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <new>
#include <optional>
#include <system_error>

#include "core/error.h"
#include "core/exit_code.h"
#include "core/memory.h"

namespace tessera {
namespace {

constexpr rlim_t kStack = rlim_t{8} << 20;
constexpr rlim_t kOpenFiles = 1024;

// A signal handler can reach nothing but static storage.
std::terminate_handler g_old_terminate = nullptr;

void do_nothing(int /*signal*/) {}

/// Programs that this one starts get the default action again, unlike with SIG_IGN.
void survive(int signal) {
  struct sigaction action {};
  sigaction(signal, nullptr, &action);
  if (action.sa_handler == SIG_IGN) return;
  action = {};
  action.sa_handler = do_nothing;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

void open_missing_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    // Gets the lowest number that is free, which is this one.
    const int opened = ::open("/dev/null", descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY);
    if (opened != descriptor && opened >= 0) ::close(opened);
  }
}

void raise_soft_limit(__rlimit_resource resource, rlim_t wanted) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  ::setrlimit(resource, &limit);
}

/// Threads take the size of their stacks from the limit as it was when the process began.
void give_threads_the_stack() {
  rlimit limit{};
  pthread_attr_t attributes;
  size_t size = 0;
  if (::getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (::pthread_getattr_default_np(&attributes) != 0) return;
  ::pthread_attr_getstacksize(&attributes, &size);
  const size_t wanted = std::min(limit.rlim_cur, kStack);
  if (size < wanted && ::pthread_attr_setstacksize(&attributes, wanted) == 0)
    ::pthread_setattr_default_np(&attributes);
  ::pthread_attr_destroy(&attributes);
}

/// Exceptions do not pass the end of a thread, nor that of a parallel region.
[[noreturn]] void end_by_exception() {
  try {
    if (const auto exception = std::current_exception()) std::rethrow_exception(exception);
  } catch (const std::bad_alloc&) {
    const std::string limit = describe_memory_limit();
    std::fprintf(stderr, "tessera: out of memory%s%s\n", limit.empty() ? "" : ": ", limit.c_str());
    std::_Exit(kUserErrorCode);
  } catch (...) {
    if (g_old_terminate != nullptr) g_old_terminate();
  }
  std::abort();
}

std::optional<int64_t> soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return static_cast<int64_t>(std::min(limit.rlim_cur, static_cast<rlim_t>(INT64_MAX)));
}

/// The first number of a file such as /proc/self/statm.
std::optional<int64_t> read_number(const std::string& path, int skipped = 0) {
  std::ifstream file(path);
  int64_t number = 0;
  for (int i = 0; i <= skipped; ++i) file >> number;
  if (!file) return std::nullopt;
  return number;
}

/// Of the control group that this process is in; version 2 of control groups only.
std::optional<int64_t> control_group_threads() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    for (const std::string& folder :
         {"/sys/fs/cgroup" + line.substr(3), std::string("/sys/fs/cgroup")}) {
      if (const auto most = read_number(folder + "/pids.max")) return most;
    }
  }
  return std::nullopt;
}

struct MemoryLimit {
  const char* of;
  char flag;  ///< of ulimit
  int64_t most = 0;
  int64_t used = 0;
};

/// The first limit on memory that there is.
std::optional<MemoryLimit> find_memory_limit() {
  const auto used = [](int column) {
    return read_number("/proc/self/statm", column).value_or(0) * ::sysconf(_SC_PAGESIZE);
  };
  if (const auto most = soft_limit(RLIMIT_AS))
    return MemoryLimit{.of = "address space", .flag = 'v', .most = *most, .used = used(0)};
  if (const auto most = soft_limit(RLIMIT_DATA))
    return MemoryLimit{.of = "data segment", .flag = 'd', .most = *most, .used = used(5)};
  return std::nullopt;
}

std::string out_of_memory() {
  const std::string limit = describe_memory_limit();
  if (limit.empty())
    return "out of memory: the machine, or the group of processes that this one is in, has no more";
  return fmt::format("out of memory: {}; raise the limit, or use a smaller model or micro-batch",
                     limit);
}

}  // namespace

void prepare_process() {
  open_missing_descriptors();
  survive(SIGXFSZ);
  survive(SIGPIPE);
  raise_soft_limit(RLIMIT_STACK, kStack);
  raise_soft_limit(RLIMIT_NOFILE, kOpenFiles);
  give_threads_the_stack();
  g_old_terminate = std::set_terminate(end_by_exception);
}

int name_limits(const std::function<int()>& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    throw UserError(out_of_memory());
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::not_enough_memory) throw UserError(out_of_memory());
    if (error.code() != std::errc::resource_unavailable_try_again) throw;
    const std::string limit = describe_thread_limit();
    user_error("a thread could not be started: {}{}{}", error.what(), limit.empty() ? "" : "; ",
               limit);
  }
}

std::string describe_memory_limit() {
  const auto limit = find_memory_limit();
  if (!limit) return "";
  return fmt::format("the {} is limited to {} (ulimit -{}), of which {} are in use", limit->of,
                     format_bytes(limit->most), limit->flag, format_bytes(limit->used));
}

std::optional<int64_t> memory_limit_room() {
  const auto limit = find_memory_limit();
  if (!limit) return std::nullopt;
  return limit->most - limit->used;
}

std::string describe_thread_limit() {
  std::string text;
  const auto add = [&text](const std::string& more) { text += (text.empty() ? "" : ", ") + more; };
  if (const auto most = soft_limit(RLIMIT_NPROC))
    add(fmt::format("at most {} processes and threads of this user (ulimit -u)", *most));
  if (const auto most = control_group_threads())
    add(fmt::format("at most {} in its control group (pids.max)", *most));
  const std::string memory = describe_memory_limit();
  if (!memory.empty()) add(memory);
  return text;
}

std::string describe_lockable_memory() {
  const auto most = soft_limit(RLIMIT_MEMLOCK);
  return fmt::format("this process may lock {} of the host's memory (ulimit -l)",
                     most ? format_bytes(*most) : "any part");
}

std::string describe_open_file_limit() {
  const auto most = soft_limit(RLIMIT_NOFILE);
  return most ? fmt::format("{} (ulimit -n)", *most) : "ulimit -n";
}

std::string describe_file_size_limit() {
  const auto most = soft_limit(RLIMIT_FSIZE);
  return most ? fmt::format("{} (ulimit -f)", format_bytes(*most)) : "ulimit -f";
}

}  // namespace tessera
