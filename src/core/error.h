#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace tessera {

/// A mistake that the user can mend: bad configuration, file, flag or layout. The program prints
/// the message alone and exits with code 2. A message says what is wrong, where, what was found and
/// expected, and what to do.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken invariant of Tessera itself: a bug. The program exits with code 1.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Throw with the formatted message. Not inline: each caller is smaller, and kernels that are
/// compiled for a CPU level of their own (core/process/cpu_level.h) throw the types that others
/// catch.
[[noreturn]] void throw_user_error(fmt::string_view format, fmt::format_args args);
[[noreturn]] void throw_internal_error(fmt::string_view format, fmt::format_args args);

template <typename... Args>
[[noreturn]] void user_error(fmt::format_string<Args...> format, Args&&... args) {
  throw_user_error(format, fmt::make_format_args(args...));
}

template <typename... Args>
[[noreturn]] void internal_error(fmt::format_string<Args...> format, Args&&... args) {
  throw_internal_error(format, fmt::make_format_args(args...));
}

/// Throws UserError unless `ok`.
template <typename... Args>
void require(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) throw_user_error(format, fmt::make_format_args(args...));
}

/// Throws InternalError unless `ok`: for invariants that only a bug can break.
template <typename... Args>
void ensure(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) throw_internal_error(format, fmt::make_format_args(args...));
}

}  // namespace tessera
