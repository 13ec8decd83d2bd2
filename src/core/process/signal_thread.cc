#include "core/process/signal_thread.h"

#include <system_error>

#include "core/process/signal_mask.h"

namespace tessera {

SignalThread::SignalThread() {
  const sigset_t signals = stop_signals();
  pthread_sigmask(SIG_BLOCK, &signals, &before_);
  try {
    thread_ = std::thread([this] { wait_for_end(); });
  } catch (const std::system_error&) {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
}

SignalThread::~SignalThread() {
  if (!thread_.joinable()) return;
  {
    const std::scoped_lock lock(mutex_);
    over_ = true;
  }
  ended_.notify_all();
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void SignalThread::wait_for_end() {
  // What was blocked before, others wait for.
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return over_; });
}

}  // namespace tessera
