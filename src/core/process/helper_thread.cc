#include "core/process/helper_thread.h"

#include <system_error>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

/// How often a thread looks for work: a tenth or less of the time between pieces of work.
constexpr milliseconds kLooks{1};
constexpr milliseconds kShortestInterval{10};
/// Work that comes less often than this is woken for.
constexpr milliseconds kLongestInterval{10'000};

}  // namespace

HelperThread::~HelperThread() {
  if (!thread_.joinable()) return;
  {
    const std::scoped_lock lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool HelperThread::start() {
  if (thread_.joinable()) return true;
  try {
    thread_ = std::thread([this] { work_until_over(); });
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

void HelperThread::give(std::function<void()> work) {
  if (!start()) return work();
  {
    const std::scoped_lock lock(mutex_);
    ensure(!work_, "a thread is given work while it has some");
    work_ = std::move(work);
    const Clock::time_point now = Clock::now();
    interval_ = now - std::exchange(given_, now);
    if (looks_) return;
  }
  changed_.notify_all();
}

void HelperThread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !work_; });
}

bool HelperThread::may_look() const {
  return interval_ >= kShortestInterval && interval_ <= kLongestInterval &&
         Clock::now() - given_ <= kLongestInterval;
}

void HelperThread::find_work(std::unique_lock<std::mutex>& lock) {
  const auto has_some = [this] { return work_ || is_over_; };
  while (!has_some() && may_look()) {
    looks_ = true;
    lock.unlock();
    std::this_thread::sleep_for(kLooks);
    lock.lock();
  }
  looks_ = false;
  changed_.wait(lock, has_some);
}

void HelperThread::work_until_over() {
  std::unique_lock lock(mutex_);
  for (;;) {
    find_work(lock);
    if (!work_) return;
    lock.unlock();
    work_();
    lock.lock();
    work_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace tessera
