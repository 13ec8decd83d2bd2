#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

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

template <typename... Args>
[[noreturn]] void user_error(fmt::format_string<Args...> format, Args&&... args) {
  throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws UserError unless `ok`.
template <typename... Args>
void require(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws InternalError unless `ok`: for invariants that only a bug can break.
template <typename... Args>
void ensure(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) throw InternalError(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera
