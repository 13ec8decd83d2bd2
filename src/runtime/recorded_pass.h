#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "ops/backend.h"

namespace tessera {

/// While it is there, programs are launched kernel by kernel: a recording of them would be of no
/// use in one of more than them.
class PlainPrograms {
 public:
  explicit PlainPrograms(RunControl& control)
      : control_(control), before_(std::exchange(control.graphs, GraphMode::kOff)) {}
  ~PlainPrograms() { control_.graphs = before_; }
  PlainPrograms(const PlainPrograms&) = delete;
  PlainPrograms& operator=(const PlainPrograms&) = delete;

 private:
  RunControl& control_;
  GraphMode before_;
};

/// Several programs that a device runs one after another, the same in each pass apart from what
/// they read: once plainly, so that all that kernels make at their first call is there, then
/// recorded as one piece of work, which is repeated. Where that cannot be, programs run, and are
/// recorded, one by one. Not thread-safe.
class RecordedPass {
 public:
  explicit RecordedPass(const Backend& backend) : backend_(backend) {}

  /// `give` runs the programs, always the same with the same memory. Throws what it throws.
  void run(const std::function<void()>& give);

 private:
  enum class State : uint8_t { kNew, kRun, kRecorded, kPlain };

  bool record(const std::function<void()>& give);

  Backend backend_;
  State state_ = State::kNew;
  int64_t version_ = 0;        // of the kernels that ran
  int64_t num_operators_ = 0;  // of the recorded work
  std::unique_ptr<RecordedWork> work_;
};

}  // namespace tessera
