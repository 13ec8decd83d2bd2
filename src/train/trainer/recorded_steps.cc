#include "train/trainer/recorded_steps.h"

#include <algorithm>
#include <exception>
#include <iostream>
#include <utility>

#include "core/process/stopwatch.h"
#include "runtime/recorded_pass.h"

namespace tessera {
namespace {

/// Whether a task is work of the device that is the same in each step, apart from what it reads.
bool is_recordable(const Task& task) {
  switch (task.action) {
    case TaskAction::kLoadInputs:
    case TaskAction::kRunProgram:
    case TaskAction::kRoundGradients:
    case TaskAction::kPublish:
    case TaskAction::kStore:
    case TaskAction::kReload:
    case TaskAction::kPrepareUpdate:
    case TaskAction::kLoadState:
    case TaskAction::kStoreState:
      return task.inside.empty();
    case TaskAction::kUpdate:
      return task.inside.empty() && task.phase == TaskPhase::kWhole;
    case TaskAction::kFinishGradients:
      return task.kind == TaskKind::kHost;
    case TaskAction::kJudge:
      return task.phase == TaskPhase::kStart;
    default:
      return false;
  }
}

bool begins_update(const Task& task) {
  return task.action == TaskAction::kUpdate && task.phase != TaskPhase::kWait;
}

}  // namespace

RecordedSteps::RecordedSteps(const StepRunner& runner, const StepPlan& plan, bool records,
                             StepFeed* feed)
    : runner_(runner),
      plan_(plan),
      backend_(runner.parts().model.programs().backend),
      state_(records && !backend_.is_host() ? State::kNew : State::kPlain),
      feed_(feed) {
  split_plan();
}

/// A plan whose device does not judge has several ranks or QK clip, and is not recorded.
void RecordedSteps::split_plan() {
  const auto find_if = [&](const auto& is_wanted) {
    const auto found = std::ranges::find_if(plan_.tasks, is_wanted);
    return static_cast<TaskId>(found - plan_.tasks.begin());
  };
  const auto find = [&](TaskAction action, TaskPhase phase) {
    return find_if([&](const Task& task) { return task.action == action && task.phase == phase; });
  };
  results_ = find(TaskAction::kJudge, TaskPhase::kWait);
  first_update_ = find_if(begins_update);
  if (!plan_.tasks.holds(results_)) {
    state_ = State::kPlain;
    return;
  }
  const auto clip = number_of(find(TaskAction::kJudge, TaskPhase::kStart));
  updates_ = std::min(static_cast<TaskId>(clip + 1), results_);
  passes_ = TaskId{1};
  ensure(plan_.tasks[TaskId{0}].action == TaskAction::kBegin, "a step begins with '{}'",
         plan_.tasks[TaskId{0}].name);
  for (const TaskId id : plan_.tasks.ids()) {
    const Task& task = plan_.tasks[id];
    if (id < passes_ || id >= results_) continue;
    if (task.action == TaskAction::kLoadInputs) loads_.push_back({id, count_before(task)});
    if (task.action == TaskAction::kPublish) publications_.push_back(id);
    if (state_ == State::kNew && !is_recordable(task))
      give_up(fmt::format("'{}' needs the host", task.name));
  }
}

/// The loads found so far that are of the task's chunk and place.
int64_t RecordedSteps::count_before(const Task& task) const {
  return std::ranges::count_if(loads_, [&](const StagingTask& load) {
    const TaskSubject& other = plan_.tasks[load.id].subject;
    return other.chunk == task.subject.chunk && other.place == task.subject.place;
  });
}

void RecordedSteps::drop_old_recording() {
  if (state_ == State::kNew || state_ == State::kPlain || version_ == backend_.kernel_version())
    return;
  recorded_passes_.reset();
  recorded_updates_.reset();
  state_ = State::kNew;
}

bool RecordedSteps::give_up(const std::string& why_not) {
  state_ = State::kPlain;
  if (backend_.control().graphs != GraphMode::kOff)
    std::cerr << fmt::format(
        "tessera: steps are not recorded as one CUDA graph, programs are: {}\n", why_not);
  return false;
}

/// All calls are made as always, but the device only records what they give it.
Recording RecordedSteps::record_tasks(PlanRun& run, TaskId begin, TaskId end) const {
  if (!device().begin_recording())
    return {.work = nullptr, .why_not = device().name() + " cannot record its work"};
  try {
    run.run(begin, end);
  } catch (const std::exception& error) {
    device().end_recording();
    return {.work = nullptr, .why_not = error.what()};
  }
  return device().end_recording();
}

bool RecordedSteps::record(PlanRun& run) {
  RunControl& control = backend_.control();
  const PlainPrograms plain(control);
  const int64_t operators_before = control.num_operators;
  Recording passes = record_tasks(run, passes_, updates_);
  num_operators_ = std::exchange(control.num_operators, operators_before) - operators_before;
  Recording updates;
  const bool has_updates = updates_ < results_;
  if (passes.work && has_updates) updates = record_tasks(run, updates_, results_);
  if (!passes.work || (has_updates && !updates.work)) {
    run.begin_anew();
    return give_up(passes.work ? updates.why_not : passes.why_not);
  }
  recorded_passes_ = std::move(passes.work);
  recorded_updates_ = std::move(updates.work);
  state_ = State::kRecorded;
  return true;
}

/// What was read ahead may be another step's, or count otherwise since other ranks' tokens came in.
void RecordedSteps::stage_again(PlanRun& run, StepHost& host) {
  const bool from_spare =
      feed_ != nullptr && feed_->began_with_read() && filled_scales_ == host.scales();
  run.stage_again(loads_, publications_, from_spare);
  if (from_spare) ++num_read_ahead_;
}

/// The spare blocks are those that the device read in the step before this one, whose clipping the
/// host has waited for.
void RecordedSteps::read_ahead() {
  if (feed_ == nullptr) return;
  struct Filling {
    const ChunkRun& run;
    int64_t micro_batch;
    std::byte* inputs;
  };
  std::vector<Filling> fillings;
  for (const auto& [id, number] : loads_) {
    const TaskSubject& subject = plan_.tasks[id].subject;
    const ChunkRun& run = runner_.parts().model.run_at({subject.chunk, subject.place});
    fillings.push_back({run, subject.micro_batch, run.spare_inputs(number)});
  }
  feed_->read_ahead([this, fillings = std::move(fillings)](std::span<const MicroBatch> batches,
                                                           const LossScales& scales) {
    for (const Filling& filling : fillings)
      filling.run.fill_inputs(filling.inputs, batches[filling.micro_batch], scales);
    filled_scales_ = scales;
  });
}

bool RecordedSteps::repeat(PlanRun& run, StepHost& host) {
  drop_old_recording();
  if (state_ == State::kRecorded) {
    stage_again(run, host);
  } else if (state_ != State::kRun || !record(run)) {
    return false;
  }
  const bool updates_in_passes = first_update_ < updates_;
  if (updates_in_passes) host.before_update();
  recorded_passes_->run();
  run.mark_clip();
  if (!updates_in_passes) host.before_update();
  if (recorded_updates_) recorded_updates_->run();
  RunControl& control = backend_.control();
  control.num_operators += num_operators_;
  control.num_operations += recorded_passes_->num_operations();
  read_ahead();
  return true;
}

void RecordedSteps::run_with_update(PlanRun& run, StepHost& host, TaskId begin, TaskId end) const {
  const TaskId update = std::clamp(first_update_, begin, end);
  run.run(begin, update);
  host.before_update();
  run.run(update, end);
}

void RecordedSteps::run_plainly(PlanRun& run, StepHost& host) {
  if (state_ != State::kNew) return run_with_update(run, host, passes_, results_);
  const PlainPrograms plain(backend_.control());
  run_with_update(run, host, passes_, results_);
  state_ = State::kRun;
  version_ = backend_.kernel_version();
}

void RecordedSteps::run(StepHost& host, const StepObservers& observers) {
  PlanRun run(runner_.parts(), plan_, host, observers);
  const TaskId end = plan_.tasks.next();
  if (state_ == State::kPlain) return run_with_update(run, host, TaskId{0}, end);
  RunControl& control = backend_.control();
  const bool may_repeat = control.graphs != GraphMode::kOff && !run.is_observed();
  if (control.waits_before_programs) device().synchronize();
  run.run(TaskId{0}, passes_);
  const auto start = std::chrono::steady_clock::now();
  if (may_repeat && repeat(run, host)) {
    control.seconds += seconds_since(start);
  } else {
    run_plainly(run, host);
  }
  run.run(results_, end);
}

}  // namespace tessera
