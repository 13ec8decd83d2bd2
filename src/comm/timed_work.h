#pragma once

#include <chrono>
#include <functional>

namespace tessera {

/// Work of a device, which goes on after Work::wait() returned: a kind of Work may also be this.
class TimedWork {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Use = std::function<void(Time begin, Time end)>;

  virtual ~TimedWork() = default;
  /// Calls `use`, once, when it is known when the device did the work, maybe at its next
  /// synchronisation but one. False where nobody measures it. REQUIRES that wait() or done() was
  /// called.
  virtual bool when_known(Use use) = 0;
};

}  // namespace tessera
