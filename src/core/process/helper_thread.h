#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera {

/// A thread that does a piece of work at a time for the one that owns it. Started with the first
/// piece; where no thread can be, the owner does the work itself.
///
/// Waking a thread takes the one that wakes it some 10 us. Where pieces come now and then, the
/// thread looks for them by itself.
class HelperThread {
 public:
  HelperThread() = default;
  /// Waits for the work that was given.
  ~HelperThread();
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;

  /// `work` must not throw. REQUIRES that what was given before has been waited for.
  void give(std::function<void()> work);
  /// Returns when all work is done, and its writes are seen.
  void wait();

 private:
  using Clock = std::chrono::steady_clock;

  bool start();
  void work_until_over();
  bool may_look() const;
  void find_work(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  // By mutex_:
  std::function<void()> work_;  ///< empty when done
  bool is_over_ = false;
  bool looks_ = false;  ///< and need not be woken
  Clock::time_point given_;
  Clock::duration interval_{};  ///< between the last two pieces

  std::thread thread_;
};

}  // namespace tessera
