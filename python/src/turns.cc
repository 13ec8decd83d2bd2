#include "turns.h"

#include <unistd.h>

#include "python.h"

namespace tessera::python {
namespace {

/// The process that computed first, 0: none did.
std::atomic<pid_t>& first_process() {
  static std::atomic<pid_t> process{0};
  return process;
}

}  // namespace

Turn::Turn(Turns& turns) : turns_(turns) {
  require(turns.owner_.load() != std::this_thread::get_id(),
          "this was called by a function that the same object calls while it computes, such as "
          "on_token; use the object when that call is done, or another model");
  turns.mutex_.lock();
  turns.owner_ = std::this_thread::get_id();
}

Turn::~Turn() {
  turns_.owner_ = std::thread::id();
  turns_.mutex_.unlock();
}

bool is_forked() {
  const pid_t first = first_process();
  return first != 0 && first != ::getpid();
}

void refuse_forked() {
  pid_t none = 0;
  first_process().compare_exchange_strong(none, ::getpid());
  require(!is_forked(),
          "this process was forked from one in which tessera had computed, whose threads it does "
          "not have; start processes by multiprocessing.get_context(\"spawn\"), or before the "
          "first model, trainer or plan");
}

void take_signals(const SignalMask& masked) {
  masked.let_through();
  const nb::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace tessera::python
