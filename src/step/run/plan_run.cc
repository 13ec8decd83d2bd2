#include "step/run/plan_run.h"

#include <algorithm>
#include <limits>

#include "comm/error.h"

namespace tessera {
namespace {

bool is_message(TaskAction action) {
  return action == TaskAction::kForwardMessage || action == TaskAction::kBackwardMessage;
}

bool is_offload(TaskAction action) {
  return action == TaskAction::kStore || action == TaskAction::kReload;
}

std::string in_task(const std::exception& error, const Task& task) {
  return fmt::format("{} (in the step's task '{}')", error.what(), task.name);
}

bool is_of_host_update(TaskAction action) {
  return action == TaskAction::kStoreGradients || action == TaskAction::kUpdate ||
         action == TaskAction::kLoadWeights;
}

[[noreturn]] void refuse_task(const Task& task) {
  throw InternalError(fmt::format("'{}' is nothing that a step does", task.name));
}

}  // namespace

void PlanRun::run(TaskId begin, TaskId end) {
  for (auto at = number_of(begin); at < number_of(end); ++at) {
    const TaskId id{at};
    const Task& task = plan_.tasks[id];
    if (task.only_on_update && !update_.updated) continue;
    if (observers_.tasks) {
      run_observed(id);
    } else {
      run_named(id);
    }
  }
}

void PlanRun::begin() {
  parts_.parameters.begin();
  parts_.model.begin_step();
  host_.begin();
  input_ = host_.update_input();
}

void PlanRun::begin_anew() {
  parts_.parameters.begin();
  parts_.model.begin_step();
  published_.clear();
  losses_.clear();
}

void PlanRun::stage(const Task& task) {
  chunk_run(task).stage(host_.micro_batch(task.subject.micro_batch), host_.scales());
}

void PlanRun::stage_again(const std::vector<StagingTask>& loads,
                          const std::vector<TaskId>& publications, bool from_spare) {
  for (const auto& [id, number] : loads) {
    const Task& task = plan_.tasks[id];
    from_spare ? chunk_run(task).stage_spare(number, host_.scales()) : stage(task);
  }
  for (const TaskId id : publications) {
    ChunkRun& run = chunk_run(plan_.tasks[id]);
    run.finish_again();
    published_.push_back(&run);
  }
  parts_.parameters.prepare(input_);
}

void PlanRun::run_observed(TaskId id) {
  const Device::Mark begin = device().mark();
  run_named(id);
  device().when_known(begin, device().mark(),
                      [&task = plan_.tasks[id], observer = observers_.tasks](auto from, auto to) {
                        observer(task, from, to);
                      });
}

void PlanRun::run_named(TaskId id) {
  const Task& task = plan_.tasks[id];
  try {
    run_task(id);
  } catch (const CommError& error) {
    throw CommError(in_task(error, task));
  } catch (const InternalError& error) {
    throw InternalError(in_task(error, task));
  }
}

void PlanRun::run_task(TaskId id) {
  const Task& task = plan_.tasks[id];
  if (is_message(task.action)) return run_message(id);
  if (is_offload(task.action)) return run_copy(id);
  if (task.action == TaskAction::kJudge && task.phase != TaskPhase::kWhole)
    return judge_on_device(task.phase);
  if (task.phase == TaskPhase::kStart && is_of_host_update(task.action))
    return parts_.parameters.start_update(task.action, task.subject.unit, input_);
  if (task.phase == TaskPhase::kStart)
    return parts_.parameters.start(task.action, task.subject.unit);
  if (task.phase == TaskPhase::kWait) return parts_.parameters.wait(task.action, task.subject.unit);
  if (task.subject.chunk >= 0) return run_chunk(task);
  run_step(task);
}

/// Sends and receives are under way from one task to another.
void PlanRun::run_message(TaskId id) {
  const Task& task = plan_.tasks[id];
  if (task.phase == TaskPhase::kWait) return messages_[*task.started_by].wait();
  const bool forward = task.action == TaskAction::kForwardMessage;
  const ChunkRun& run = chunk_run(task);
  const ChunkRun::Messages messages = forward ? run.forward_messages() : run.backward_messages();
  Communicator& group = forward ? *parts_.pipeline.activations : *parts_.pipeline.gradients;
  const size_t stream = task.subject.stream;
  messages_[id] = task.kind == TaskKind::kSend
                      ? group.send(messages.out.at(stream), task.subject.peer)
                      : group.receive(messages.in.at(stream), task.subject.peer);
  under_way_.push_back(id);
}

/// What is offloaded is under way from one task to another, too.
void PlanRun::run_copy(TaskId id) {
  const Task& task = plan_.tasks[id];
  ChunkRun& run = chunk_run(task);
  const bool stores = task.action == TaskAction::kStore;
  if (task.phase == TaskPhase::kStart) {
    copies_[id] = stores ? run.store(task.subject.unit) : run.reload(task.subject.unit);
    return;
  }
  const CopyLane::Ticket copy = copies_.at(*task.started_by);
  stores ? run.wait_stored(task.subject.unit, copy) : run.wait_reloaded(copy);
}

void PlanRun::run_chunk(const Task& task) {
  ChunkRun& run = chunk_run(task);
  switch (task.action) {
    case TaskAction::kLoadInputs:
      stage(task);
      return run.bring();
    case TaskAction::kRunProgram:
      run.run(task.subject.program, task.subject.part, observers_.nodes);
      return progress();
    case TaskAction::kRoundGradients:
      return parts_.parameters.round_gradients(run.parameters_of(task.subject.program));
    case TaskAction::kSumBalance:
      return run.sum_balance();
    case TaskAction::kPublish:
      return publish(run);
    default:
      refuse_task(task);
  }
}

void PlanRun::run_step(const Task& task) {
  StepParameters& parameters = parts_.parameters;
  switch (task.action) {
    case TaskAction::kBegin:
      return begin();
    case TaskAction::kCollect:
      return collect();
    case TaskAction::kCollectLosses:
      return collect_losses();
    case TaskAction::kPrepareUpdate:
      parameters.prepare(input_);
      return parameters.give_factors();
    case TaskAction::kFinishGradients:
      return parameters.finish_gradients();
    case TaskAction::kShareResults:
      may_update_ = host_.share(result_);
      return;
    case TaskAction::kJudge:
      return judge();
    case TaskAction::kUpdate:
      return parameters.update(task.subject.unit, input_);
    case TaskAction::kEnd:
      return host_.end(update_);
    default:
      refuse_task(task);
  }
}

/// Back ends without a thread of their own move data only when they are called.
void PlanRun::progress() {
  std::erase_if(under_way_, [&](TaskId start) { return messages_[start].done(); });
  parts_.parameters.progress();
}

void PlanRun::publish(ChunkRun& run) {
  run.finish();
  published_.push_back(&run);
  if (const Tensor loss = run.finished_loss()) losses_.push_back(loss);
}

void PlanRun::collect() {
  if (!knows_results_ || is_observed()) device().synchronize();
  for (ChunkRun* run : published_) result_ += run->collect();
  if (StashPool* const stash = parts_.model.stash()) result_.missing_pages = stash->missing();
}

void PlanRun::collect_losses() {
  device().synchronize();
  for (ChunkRun* run : published_) result_.loss += run->collect_loss();
}

void PlanRun::judge() {
  if (!may_update_) {
    update_.grad_norm = std::numeric_limits<double>::quiet_NaN();
    return parts_.parameters.discard();
  }
  update_ = parts_.parameters.judge(input_);
}

/// Started, it is the device's work, which comes behind that of the results; then the host waits.
void PlanRun::judge_on_device(TaskPhase phase) {
  StepParameters& parameters = parts_.parameters;
  if (phase == TaskPhase::kWait) {
    update_ = parameters.wait_clip();
    knows_results_ = true;
    return;
  }
  parameters.prepare(input_);
  parameters.give_clip(losses_, input_);
  if (!device().is_recording()) mark_clip();
}

}  // namespace tessera
