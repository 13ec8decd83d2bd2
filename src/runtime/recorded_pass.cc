#include "runtime/recorded_pass.h"

#include <exception>

namespace tessera {

bool RecordedPass::record(const std::function<void()>& give) {
  Device& device = backend_.device();
  RunControl& control = backend_.control();
  const PlainPrograms plain(control);
  const int64_t before = control.num_operators;
  bool gave = false;
  if (device.begin_recording()) {
    try {
      give();
      gave = true;
    } catch (const std::exception&) {
      // What cannot be recorded runs; what cannot run says so then.
    }
    work_ = device.end_recording().work;
  }
  num_operators_ = std::exchange(control.num_operators, before) - before;
  state_ = gave && work_ ? State::kRecorded : State::kPlain;
  return state_ == State::kRecorded;
}

void RecordedPass::run(const std::function<void()>& give) {
  RunControl& control = backend_.control();
  if (backend_.is_host() || control.graphs == GraphMode::kOff || state_ == State::kPlain)
    return give();
  if (state_ != State::kNew && version_ != backend_.kernel_version()) {
    work_.reset();
    state_ = State::kNew;
  }
  if (state_ == State::kNew) {
    const PlainPrograms plain(control);
    give();
    state_ = State::kRun;
    version_ = backend_.kernel_version();
    return;
  }
  if (state_ == State::kRun && !record(give)) return give();
  work_->run();
  control.num_operators += num_operators_;
  control.num_operations += work_->num_operations();
}

}  // namespace tessera
