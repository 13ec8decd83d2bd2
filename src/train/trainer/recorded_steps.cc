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
    case TaskAction::kUpdate:
      return task.inside.empty();
    case TaskAction::kFinishGradients:
      return task.kind == TaskKind::kHost;
    case TaskAction::kJudge:
      return task.phase == TaskPhase::kStart;
    default:
      return false;
  }
}

}  // namespace

RecordedSteps::RecordedSteps(const StepRunner& runner, const StepPlan& plan, bool records)
    : runner_(runner),
      plan_(plan),
      backend_(runner.parts().model.programs().backend),
      state_(records && !backend_.is_host() ? State::kNew : State::kPlain) {
  split_plan();
}

/// A plan whose device does not judge has several ranks or QK clip, and is not recorded.
void RecordedSteps::split_plan() {
  const auto find = [&](TaskAction action, TaskPhase phase) {
    const auto found = std::ranges::find_if(plan_.tasks, [&](const Task& task) {
      return task.action == action && task.phase == phase;
    });
    return static_cast<TaskId>(found - plan_.tasks.begin());
  };
  results_ = find(TaskAction::kJudge, TaskPhase::kWait);
  first_update_ = find(TaskAction::kUpdate, TaskPhase::kWhole);
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
    if (task.action == TaskAction::kPublish) publications_.push_back(id);
    if (state_ == State::kNew && !is_recordable(task))
      give_up(fmt::format("'{}' needs the host", task.name));
  }
  split_passes();
}

/// In front of each micro-batch behind the first one's work, where no copy is under way, since what
/// is recorded must end in itself.
void RecordedSteps::split_passes() {
  parts_.push_back({.begin = passes_, .end = updates_, .loads = {}});
  bool works = false;
  int under_way = 0;
  for (TaskId id = passes_; id < updates_; id = static_cast<TaskId>(number_of(id) + 1)) {
    const Task& task = plan_.tasks[id];
    works = works || task.action == TaskAction::kRunProgram;
    if (task.action != TaskAction::kJudge) {
      if (task.phase == TaskPhase::kStart) ++under_way;
      if (task.phase == TaskPhase::kWait) --under_way;
    }
    if (task.action != TaskAction::kLoadInputs) continue;
    if (works && under_way == 0) {
      parts_.back().end = id;
      parts_.push_back({.begin = id, .end = updates_, .loads = {}});
      works = false;
    }
    parts_.back().loads.push_back(id);
  }
}

void RecordedSteps::drop_old_recording() {
  if (state_ == State::kNew || state_ == State::kPlain || version_ == backend_.kernel_version())
    return;
  for (Passes& part : parts_) part.recorded.reset();
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

/// Returns why a part could not be recorded; "" where all were.
std::string RecordedSteps::record_passes(PlanRun& run) {
  for (Passes& part : parts_) {
    Recording recording = record_tasks(run, part.begin, part.end);
    if (!recording.work) return recording.why_not;
    part.recorded = std::move(recording.work);
  }
  return "";
}

bool RecordedSteps::record(PlanRun& run) {
  RunControl& control = backend_.control();
  const PlainPrograms plain(control);
  const int64_t operators_before = control.num_operators;
  std::string why_not = record_passes(run);
  num_operators_ = std::exchange(control.num_operators, operators_before) - operators_before;
  if (why_not.empty() && updates_ < results_) {
    Recording updates = record_tasks(run, updates_, results_);
    if (!updates.work) why_not = updates.why_not;
    recorded_updates_ = std::move(updates.work);
  }
  if (!why_not.empty()) {
    run.begin_anew();
    return give_up(why_not);
  }
  state_ = State::kRecorded;
  return true;
}

/// `stages`: the host brings what they read, which it has done where they were only just recorded.
void RecordedSteps::run_passes(PlanRun& run, bool stages) {
  RunControl& control = backend_.control();
  const auto start = std::chrono::steady_clock::now();
  for (const Passes& part : parts_) {
    if (stages) std::ranges::for_each(part.loads, [&](TaskId load) { run.stage_again(load); });
    part.recorded->run();
    if (&part == &parts_.front()) control.first_seconds += seconds_since(start);
    control.num_operations += part.recorded->num_operations();
  }
}

bool RecordedSteps::repeat(PlanRun& run, StepHost& host) {
  drop_old_recording();
  const bool repeats = state_ == State::kRecorded;
  if (repeats) {
    run.prepare_again();
  } else if (state_ != State::kRun || !record(run)) {
    return false;
  }
  const bool updates_in_passes = first_update_ < updates_;
  if (updates_in_passes) host.before_update();
  run_passes(run, repeats);
  if (repeats) run.publish_again(publications_);
  run.mark_clip();
  if (!updates_in_passes) host.before_update();
  if (recorded_updates_) recorded_updates_->run();
  RunControl& control = backend_.control();
  control.num_operators += num_operators_;
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
