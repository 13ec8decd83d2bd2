#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace tessera::python {

/// Who may use an object: one thread at a time.
class Turns {
 public:
  Turns() = default;
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

 private:
  friend class Turn;
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};

/// A thread's turn, for which it waits. Throws UserError where it has one already: a function of
/// Python's that is called while the object computes would wait for itself.
class Turn {
 public:
  explicit Turn(Turns& turns);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turns& turns_;
};

/// Throws UserError in a process that was forked from one that had called this: threads, those of
/// OpenMP among them, are not in the fork, which would wait for them forever.
void refuse_forked();

/// Whether this process was forked from one that had called refuse_forked.
bool is_forked();

}  // namespace tessera::python
