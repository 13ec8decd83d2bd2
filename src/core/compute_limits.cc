#include <omp.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "core/limits.h"
#include "core/memory.h"

// What computing needs of stacks and threads, and whether this process may have it.

namespace tessera {
namespace {

constexpr int64_t kLeastStack = int64_t{512} << 10;
constexpr int64_t kLeastMemory = int64_t{64} << 20;
/// More threads than this for each processor are a mistake; on a small machine a few more, since
/// tests and comparisons of thread counts ask for them.
constexpr int kThreadsPerProcessor = 16;
constexpr int kAlwaysAllowed = 256;

/// OMP_STACKSIZE, "512k" or "8 M", which OpenMP reads as KiB where no unit stands.
std::optional<int64_t> stack_variable() {
  const char* value = std::getenv("OMP_STACKSIZE");
  if (value == nullptr) return std::nullopt;
  std::string_view text(value);
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number <= 0) return std::nullopt;  // OpenMP says so and ignores it
  const char* unit = std::find_if(rest, text.data() + text.size(), [](char c) { return c != ' '; });
  const size_t power = unit == text.data() + text.size()
                           ? 1
                           : std::string_view("bkmg").find(static_cast<char>(
                                 std::tolower(static_cast<unsigned char>(*unit))));
  if (power > 3 || number > INT64_MAX >> (10 * power)) return std::nullopt;
  return number << (10 * power);
}

}  // namespace

void check_stack_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const auto size = static_cast<int64_t>(limit.rlim_cur);
    require(size >= kLeastStack,
            "the stack is limited to {}, at least {} are needed: `ulimit -s {}`",
            format_bytes(size), format_bytes(kLeastStack), 8 << 10);
  }
  const auto variable = stack_variable();
  require(!variable || *variable >= kLeastStack,
          "OMP_STACKSIZE gives each thread a stack of {}, at least {} are needed; leave it out",
          format_bytes(variable.value_or(0)), format_bytes(kLeastStack));
}

namespace {

/// oneDNN crashes where it cannot have its own few megabytes.
void check_memory() {
  const auto room = memory_limit_room();
  require(!room || *room >= kLeastMemory, "{}; at least {} more are needed to compute",
          describe_memory_limit(), format_bytes(kLeastMemory));
}

/// OMP_NUM_THREADS, "8" or "8,2" for the levels of nested regions; OpenMP takes all processors
/// where it cannot read it.
void check_thread_variable() {
  const char* value = std::getenv("OMP_NUM_THREADS");
  const std::string_view text = value == nullptr ? "" : value;
  constexpr std::string_view kBlanks = " \t";
  for (size_t begin = 0; !text.empty() && begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string_view number = text.substr(begin, end - begin);
    number.remove_prefix(std::min(number.find_first_not_of(kBlanks), number.size()));
    number = number.substr(0, number.find_last_not_of(kBlanks) + 1);
    int64_t threads = 0;
    const auto [rest, error] =
        std::from_chars(number.data(), number.data() + number.size(), threads);
    const bool valid = error == std::errc() && rest == number.data() + number.size() && threads > 0;
    require(valid, "OMP_NUM_THREADS is \"{}\"; expected a number of threads from 1 on", text);
    begin = end + 1;
  }
}

void check_thread_count(int num_threads) {
  const int num_processors = std::max(omp_get_num_procs(), 1);
  const int most = std::max(kAlwaysAllowed, kThreadsPerProcessor * num_processors);
  require(num_threads <= most,
          "OMP_NUM_THREADS asks for {} threads, at most {} are possible here: this process has {} "
          "processors; set it to that or leave it out",
          num_threads, most, num_processors);
}

/// Threads that live until all have been started.
class Probe {
 public:
  /// The error number of the first thread that could not be started, or 0.
  int start(int num_threads, std::optional<int64_t> stack) {
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    if (stack) ::pthread_attr_setstacksize(&attributes, *stack);
    int error = 0;
    while (error == 0 && num_started() < num_threads) {
      pthread_t thread{};
      error = ::pthread_create(&thread, &attributes, &Probe::wait_for_end, this);
      if (error == 0) threads_.push_back(thread);
    }
    ::pthread_attr_destroy(&attributes);
    return error;
  }

  int num_started() const { return static_cast<int>(threads_.size()); }

  ~Probe() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    ended_.notify_all();
    for (const pthread_t thread : threads_) ::pthread_join(thread, nullptr);
  }

 private:
  static void* wait_for_end(void* probe) {
    auto* self = static_cast<Probe*>(probe);
    std::unique_lock lock(self->mutex_);
    self->ended_.wait(lock, [self] { return self->over_; });
    return nullptr;
  }

  std::vector<pthread_t> threads_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
};

/// Beside the threads that compute, those of stop signals and of the lock of a run's folder.
constexpr int kHelperThreads = 2;

void check_threads_start(int num_computing) {
  const int num_threads = num_computing + kHelperThreads;
  const auto stack = stack_variable();
  int started = 1;
  int error = 0;
  {
    Probe probe;
    error = probe.start(num_threads - 1, stack);
    started += probe.num_started();
  }
  if (error == 0) return;
  const std::string limit = describe_thread_limit();
  user_error(
      "only {} of {} threads could be started ({} that compute): {}{}{}{}; raise the limit, or set "
      "OMP_NUM_THREADS to fewer",
      started, num_threads, num_computing, std::generic_category().message(error),
      stack ? fmt::format("; OMP_STACKSIZE gives each a stack of {}", format_bytes(*stack)) : "",
      limit.empty() ? "" : "; ", limit);
}

}  // namespace

void check_compute_limits() {
  check_memory();
  check_thread_variable();
  const int num_threads = std::min(omp_get_max_threads(), omp_get_thread_limit());
  check_thread_count(num_threads);
  check_threads_start(num_threads);
}

}  // namespace tessera
