#pragma once

#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

namespace tessera {

/// A thread that takes the signals by which a process is asked to stop (SIGINT, SIGTERM, SIGHUP and
/// SIGUSR1), so that their handlers never run on a thread that computes. oneDNN's products of small
/// matrices keep their stack pointer in a block of the heap meanwhile; what the kernel writes below
/// it for a handler would destroy the blocks before that one.
///
/// Must be made before threads that compute, which inherit that these signals are blocked. Where no
/// thread can be started, the signals stay with the calling one.
class SignalThread {
 public:
  SignalThread();
  /// Signals are for the thread that made this one again.
  ~SignalThread();
  SignalThread(const SignalThread&) = delete;
  SignalThread& operator=(const SignalThread&) = delete;

 private:
  void wait_for_end();

  sigset_t before_{};  ///< what was blocked
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;  ///< by mutex_
  std::thread thread_;
};

}  // namespace tessera
