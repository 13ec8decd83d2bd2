#pragma once

#include <map>
#include <vector>

#include "step/run/step_runner.h"

namespace tessera {

/// A task that stages a micro-batch, as which of those of its chunk and place in the step.
struct StagingTask {
  TaskId id;
  int64_t number;
};

/// One run of a plan, as StepRunner's. What it started is given up with it where it does not come
/// to its end.
class PlanRun {
 public:
  PlanRun(const StepParts& parts, const StepPlan& plan, StepHost& host,
          const StepObservers& observers)
      : parts_(parts), plan_(plan), host_(host), observers_(observers) {}

  /// The tasks from `begin` to before `end`, which follow those run before.
  void run(TaskId begin, TaskId end);

  /// Whether somebody is told of the device's work, which is when it is synchronised. Known behind
  /// the plan's begin.
  bool is_observed() const { return observers_.nodes || observers_.tasks || input_.observer; }
  /// Back to where the plan has begun.
  void begin_anew();
  /// The host's part of the passes and the clipping, where the device repeats its own.
  /// `from_spare`: the inputs were written to ChunkRun::spare_inputs before.
  void stage_again(const std::vector<StagingTask>& loads, const std::vector<TaskId>& publications,
                   bool from_spare);
  /// Behind the clipping, where the device repeats it.
  void mark_clip() { parts_.parameters.mark_clip(); }

 private:
  Device& device() const { return parts_.model.device(); }
  ChunkRun& chunk_run(const Task& task) const {
    return parts_.model.run_at({task.subject.chunk, task.subject.place});
  }

  void run_observed(TaskId id);
  void run_named(TaskId id);
  void run_task(TaskId id);
  void run_message(TaskId id);
  void run_copy(TaskId id);
  void run_chunk(const Task& task);
  void run_step(const Task& task);
  void progress();
  void begin();
  void stage(const Task& task);
  void publish(ChunkRun& run);
  void collect();
  void collect_losses();
  void judge();
  void judge_on_device(TaskPhase phase);

  const StepParts& parts_;
  const StepPlan& plan_;
  StepHost& host_;
  const StepObservers& observers_;
  std::map<TaskId, Pending> messages_;         // by start
  std::map<TaskId, CopyLane::Ticket> copies_;  // by start
  std::vector<TaskId> under_way_;     // messages that were not complete when last looked at
  std::vector<ChunkRun*> published_;  // whose results wait, in order
  std::vector<Tensor> losses_;        // of those that have one
  MicroBatchResult result_;
  bool knows_results_ = false;  // the device has come to the end of the results
  bool may_update_ = false;
  StepInput input_;
  StepResult update_;
};

}  // namespace tessera
