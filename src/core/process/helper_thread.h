#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera {

/// A thread that does a piece of work at a time for the one that owns it. Started with the first
/// piece; where no thread can be, the owner does the work itself.
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
  bool start();
  void work_until_over();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;  ///< by mutex_; empty when done
  bool is_over_ = false;        ///< by mutex_
  std::thread thread_;
};

}  // namespace tessera
