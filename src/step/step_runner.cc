#include "step/step_runner.h"

#include <algorithm>
#include <limits>

#include "comm/error.h"

namespace tessera {
namespace {

bool is_message(TaskAction action) {
  return action == TaskAction::kForwardMessage || action == TaskAction::kBackwardMessage;
}

std::string in_task(const std::exception& error, const Task& task) {
  return fmt::format("{} (in the step's task '{}')", error.what(), task.name);
}

}  // namespace

/// One run of a plan. What it started is given up with it where it does not come to its end.
class StepRunner::Run {
 public:
  Run(StepRunner& runner, const StepPlan& plan, StepHost& host, const StepObservers& observers)
      : runner_(runner),
        plan_(plan),
        host_(host),
        observers_(observers),
        messages_(plan.tasks.size()) {}

  void run() {
    for (const TaskId id : plan_.tasks.ids()) {
      const Task& task = plan_.tasks[id];
      if (task.only_on_update && !update_.updated) continue;
      if (observers_.tasks) {
        run_observed(id);
      } else {
        run_named(id);
      }
    }
  }

 private:
  Device& device() const { return runner_.model_.device(); }
  ChunkRun& chunk_run(const Task& task) const {
    return runner_.model_.run_at({task.subject.chunk, task.subject.place});
  }

  void run_observed(TaskId id) {
    const Device::Mark begin = mark(plan_.tasks[id]);
    run_named(id);
    device().when_known(begin, mark(plan_.tasks[id]),
                        [&task = plan_.tasks[id], observer = observers_.tasks](auto from, auto to) {
                          observer(task, from, to);
                        });
  }

  /// In the lane that does the task's work.
  Device::Mark mark(const Task& task) const {
    const bool aside = task.action == TaskAction::kUpdate && task.phase == TaskPhase::kStart;
    const LaneScope lane(device(), aside ? Device::Lane::kSide : Device::Lane::kMain);
    return device().mark();
  }

  void run_named(TaskId id) {
    const Task& task = plan_.tasks[id];
    try {
      run_task(id);
    } catch (const CommError& error) {
      throw CommError(in_task(error, task));
    } catch (const InternalError& error) {
      throw InternalError(in_task(error, task));
    }
  }

  void run_task(TaskId id) {
    const Task& task = plan_.tasks[id];
    if (is_message(task.action)) return run_message(id);
    if (task.action == TaskAction::kJudge && task.phase != TaskPhase::kWhole)
      return judge_on_device(task.phase);
    if (task.phase == TaskPhase::kStart)
      return runner_.parameters_.start(task.action, task.subject.unit);
    if (task.phase == TaskPhase::kWait)
      return runner_.parameters_.wait(task.action, task.subject.unit);
    if (task.subject.chunk >= 0) return run_chunk(task);
    run_step(task);
  }

  /// Sends and receives are under way from one task to another.
  void run_message(TaskId id) {
    const Task& task = plan_.tasks[id];
    if (task.phase == TaskPhase::kWait) return messages_[*task.started_by].wait();
    const bool forward = task.action == TaskAction::kForwardMessage;
    const ChunkRun& run = chunk_run(task);
    const ChunkRun::Messages messages = forward ? run.forward_messages() : run.backward_messages();
    Communicator& group = forward ? *runner_.pipeline_.activations : *runner_.pipeline_.gradients;
    const size_t stream = task.subject.stream;
    messages_[id] = task.kind == TaskKind::kSend
                        ? group.send(messages.out.at(stream), task.subject.peer)
                        : group.receive(messages.in.at(stream), task.subject.peer);
    under_way_.push_back(id);
  }

  void run_chunk(const Task& task) {
    ChunkRun& run = chunk_run(task);
    switch (task.action) {
      case TaskAction::kLoadInputs:
        return run.load(host_.micro_batch(task.subject.micro_batch), host_.scales());
      case TaskAction::kRunProgram:
        run.run(task.subject.program, observers_.nodes);
        return progress();
      case TaskAction::kSumBalance:
        return run.sum_balance();
      case TaskAction::kPublish:
        return publish(run);
      default:
        refuse(task);
    }
  }

  void run_step(const Task& task) {
    StepParameters& parameters = runner_.parameters_;
    switch (task.action) {
      case TaskAction::kBegin:
        parameters.begin();
        runner_.model_.begin_step();
        return host_.begin();
      case TaskAction::kCollect:
        return collect();
      case TaskAction::kCollectLosses:
        return collect_losses();
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
        refuse(task);
    }
  }

  [[noreturn]] static void refuse(const Task& task) {
    throw InternalError(fmt::format("'{}' is nothing that a step does", task.name));
  }

  /// Back ends without a thread of their own move data only when they are called.
  void progress() {
    std::erase_if(under_way_, [&](TaskId start) { return messages_[start].done(); });
    runner_.parameters_.progress();
  }

  void publish(ChunkRun& run) {
    run.finish();
    finished_.push_back(&run);
    if (const Tensor loss = run.finished_loss()) losses_.push_back(loss);
  }

  /// Observers are told of the device's work when it is synchronised.
  bool is_observed() const { return observers_.nodes || observers_.tasks || input_.observer; }

  void collect() {
    if (!knows_results_ || is_observed()) device().synchronize();
    for (ChunkRun* run : finished_) result_ += run->collect();
  }

  void collect_losses() {
    device().synchronize();
    for (ChunkRun* run : finished_) result_.loss += run->collect_loss();
  }

  void judge() {
    if (!may_update_) {
      update_.grad_norm = std::numeric_limits<double>::quiet_NaN();
      return runner_.parameters_.discard();
    }
    input_ = host_.update_input();
    update_ = runner_.parameters_.judge(input_);
  }

  /// Started, it is the device's work, which comes behind that of the results; then the host waits.
  void judge_on_device(TaskPhase phase) {
    StepParameters& parameters = runner_.parameters_;
    if (phase == TaskPhase::kWait) {
      update_ = parameters.wait_clip();
      knows_results_ = true;
      return;
    }
    input_ = host_.update_input();
    parameters.prepare(input_);
    parameters.give_clip(losses_);
    parameters.order_updates();
  }

  StepRunner& runner_;
  const StepPlan& plan_;
  StepHost& host_;
  const StepObservers& observers_;
  IdVector<TaskId, Pending> messages_;  // by start
  std::vector<TaskId> under_way_;       // messages that were not complete when last looked at
  std::vector<ChunkRun*> finished_;     // whose results wait, in order
  std::vector<Tensor> losses_;          // of those that have one
  MicroBatchResult result_;
  bool knows_results_ = false;  // the device has come to the end of the results
  bool may_update_ = false;
  StepInput input_;
  StepResult update_;
};

StepRunner::StepRunner(TrainingModel& model, PipelinePlace pipeline, StepParameters& parameters)
    : model_(model), pipeline_(std::move(pipeline)), parameters_(parameters) {
  pipeline_.activations->connect_neighbours();
  pipeline_.gradients->connect_neighbours();
}

void StepRunner::run(const StepPlan& plan, StepHost& host, const StepObservers& observers) {
  Run(*this, plan, host, observers).run();
}

}  // namespace tessera
