#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <chrono>
#include <string>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/process/signal_mask.h"
#include "core/tensor.h"
#include "turns.h"

namespace tessera::python {

namespace nb = nanobind;

/// A setting that was refused: tessera.ConfigError.
class ConfigError : public UserError {
 public:
  using UserError::UserError;
};

/// Calls what reads settings: what it refuses are settings.
template <typename Work>
auto read_settings(const Work& work) {
  try {
    return work();
  } catch (const UserError& error) {
    throw ConfigError(error.what());
  }
}

/// Calls what computes, for as long as it takes: other threads of Python run meanwhile, those that
/// use the same object wait, and signals come when it is done (see SignalMask). Throws UserError
/// where this thread is at work with the object already, and in a process that was forked from one
/// that had computed.
template <typename Work>
auto compute(Turns& turns, const Work& work) {
  const nb::gil_scoped_release released;
  refuse_forked();
  const Turn turn(turns);
  const SignalMask masked;
  if constexpr (std::is_invocable_v<Work, const SignalMask&>) {
    return work(masked);
  } else {
    return work();
  }
}

/// Within `compute`, between two parts of it: lets signals come that arrived meanwhile. Throws what
/// Python's handlers raise, such as KeyboardInterrupt.
void take_signals(const SignalMask& masked);

/// Looks for signals now and then: each look waits for other threads of Python.
class SignalWatch {
 public:
  void look(const SignalMask& masked) {
    constexpr auto kBetween = std::chrono::milliseconds(50);
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < kBetween) return;
    last_ = now;
    take_signals(masked);
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// What speaks DLPack, of any type and on any device.
using SharedArray = nb::ndarray<nb::array_api>;

/// An array that lies where the tensor does, and keeps `owner` alive.
SharedArray share(const Tensor& tensor, nb::handle owner);

/// Each adds its classes and functions to the module.
void add_errors(nb::module_& module);
void add_config(nb::module_& module);
void add_model(nb::module_& module);
void add_trainer(nb::module_& module);
void add_checkpoint(nb::module_& module);
void add_data(nb::module_& module);
void add_commands(nb::module_& module);

}  // namespace tessera::python
