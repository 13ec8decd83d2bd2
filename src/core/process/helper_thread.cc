#include "core/process/helper_thread.h"

#include <system_error>
#include <utility>

#include "core/error.h"

namespace tessera {

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
  }
  changed_.notify_all();
}

void HelperThread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !work_; });
}

void HelperThread::work_until_over() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return work_ || is_over_; });
    if (!work_) return;
    lock.unlock();
    work_();
    lock.lock();
    work_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace tessera
