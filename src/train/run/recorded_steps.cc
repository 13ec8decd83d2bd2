#include "train/run/recorded_steps.h"

#include <exception>
#include <iostream>
#include <utility>

#include "core/stopwatch.h"

namespace tessera {
namespace {

/// Programs are launched kernel by kernel: a recording of them would be of no use in that of a
/// step.
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

}  // namespace

RecordedSteps::RecordedSteps(TrainingModel& model, ModelState& state, PipelineExecutor& executor,
                             const Backend& backend, bool records)
    : model_(model),
      state_(state),
      executor_(executor),
      backend_(backend),
      given_(backend.device().make_event()),
      phase_(records && !backend.is_host() ? State::kNew : State::kPlain) {
  ensure(state.is_alone(), "a step that needs other ranks is given without them");
}

RecordedSteps::~RecordedSteps() = default;

int64_t RecordedSteps::kernel_version() const {
  return backend_.context() != nullptr ? backend_.context()->version() : 0;
}

void RecordedSteps::drop_old_recording() {
  if (phase_ == State::kNew || phase_ == State::kPlain || version_ == kernel_version()) return;
  work_.reset();
  update_.reset();
  phase_ = State::kNew;
}

void RecordedSteps::begin() {
  state_.begin_step();
  model_.begin_step();
}

void RecordedSteps::give_plainly(const std::vector<MicroBatch>& batches, const LossScales& scales,
                                 const StepInput& input, const NodeObserver& observer) {
  executor_.give(batches, scales, observer, state_.hooks());
  state_.give_clip(executor_.losses(), input.observer);
}

void RecordedSteps::note(const std::string& why_not) {
  phase_ = State::kPlain;
  std::cerr << fmt::format("tessera: steps are not recorded as one CUDA graph, programs are: {}\n",
                           why_not);
}

/// All calls are made as always, but the device only records what they give it.
void RecordedSteps::record(const std::vector<MicroBatch>& batches, const LossScales& scales,
                           const StepInput& input) {
  const PlainPrograms plain(backend_.control());
  const int64_t operators_before = backend_.control().num_operators;
  const auto give_up = [&](const std::string& why_not) {
    backend_.control().num_operators = operators_before;
    executor_.forget();
    note(why_not);
  };
  begin();
  if (!device().begin_recording()) return give_up(device().name() + " cannot record its work");
  try {
    give_plainly(batches, scales, input, {});
  } catch (const std::exception& error) {
    device().end_recording();
    return give_up(error.what());
  }
  Recording recording = device().end_recording();
  if (!recording.work) return give_up(recording.why_not);
  work_ = std::move(recording.work);
  num_operators_ = backend_.control().num_operators - operators_before;
  backend_.control().num_operators = operators_before;
  phase_ = State::kRecorded;
  record_update();
}

void RecordedSteps::record_update() {
  const LaneScope lane(device(), Device::Lane::kSide);
  if (!device().begin_recording()) return;
  try {
    state_.give_ordered_update({});
  } catch (const std::exception&) {
    device().end_recording();
    throw;
  }
  update_ = device().end_recording().work;
}

bool RecordedSteps::give(const std::vector<MicroBatch>& batches, const LossScales& scales,
                         const StepInput& input, const NodeObserver& observer) {
  RunControl& control = backend_.control();
  const bool may_repeat = control.graphs != GraphMode::kOff && !observer && !input.observer;
  drop_old_recording();
  if (may_repeat && phase_ == State::kRecorded) {
    model_.begin_step();
    executor_.give_again(batches, scales);
  } else if (may_repeat && phase_ == State::kRun) {
    record(batches, scales, input);  // the host's part comes with it
  }
  if (may_repeat && phase_ == State::kRecorded) {
    work_->run();
    control.num_operators += num_operators_;
    control.num_operations += work_->num_operations();
    return true;
  }
  begin();
  if (phase_ == State::kNew) {
    const PlainPrograms plain(control);
    give_plainly(batches, scales, input, observer);
    phase_ = State::kRun;
    version_ = kernel_version();
  } else {
    give_plainly(batches, scales, input, observer);
  }
  return false;
}

RecordedSteps::Result RecordedSteps::run(const std::vector<MicroBatch>& batches,
                                         const LossScales& scales, const StepInput& input,
                                         const NodeObserver& observer) {
  RunControl& control = backend_.control();
  if (control.waits_before_programs) device().synchronize();
  const auto start = std::chrono::steady_clock::now();
  state_.prepare_update(input);
  const bool repeats = give(batches, scales, input, observer);
  given_->record();
  state_.order_update();
  if (repeats && update_) {
    update_->run();
  } else {
    state_.give_ordered_update(input.observer);
  }
  if (repeats) control.seconds += seconds_since(start);
  if (observer || input.observer) {
    device().synchronize();  // which tells the observers
  } else {
    given_->synchronize();
  }
  return {executor_.collect(), state_.clip_result()};
}

}  // namespace tessera
