#pragma once

#include <memory>
#include <string>
#include <vector>

#include "step/run/plan_run.h"
#include "step/run/step_runner.h"
#include "train/trainer/step_feed.h"

namespace tessera {

/// Runs the steps of a plan, as StepRunner, and lets the device repeat what it can: where nothing
/// between a step's begin and the host's wait for its results needs the host, the device records
/// all of it. Not thread-safe. All references must outlive it.
///
/// The first step's kernels are launched one by one; the second is recorded, and from then on a
/// step is two launches (RunControl::graphs): the passes with the clipping, and the updates, while
/// which the host, which has waited for the clipping alone, prepares the next step. What the host
/// changes from step to step lies in memory that the device reads: inputs, the learning rate, what
/// clips. With a feed, the next step's inputs are read and put there beside the recorded work of
/// this one, by the feed's thread, and this one only says which they are. What cannot be recorded
/// is noted once, and its programs are recorded one by one; steps with observers run plainly.
class RecordedSteps {
 public:
  /// `records`: whether whole steps may be recorded, which takes memory with each operator. `feed`:
  /// where the hosts' micro-batches come from, or null; its thread must be done, or it gone, before
  /// this is.
  RecordedSteps(const StepRunner& runner, const StepPlan& plan, bool records,
                StepFeed* feed = nullptr);

  void run(StepHost& host, const StepObservers& observers = {});
  /// Steps for which this thread copied no inputs.
  int64_t num_read_ahead() const { return num_read_ahead_; }

 private:
  enum class State : uint8_t {
    kNew,  ///< no step was run: kernels may still make what they keep
    kRun,  ///< one was
    kRecorded,
    kPlain,  ///< steps are not recorded
  };

  Device& device() const { return backend_.device(); }
  void split_plan();
  int64_t count_before(const Task& task) const;
  void drop_old_recording();
  void run_plainly(PlanRun& run, StepHost& host);
  void run_with_update(PlanRun& run, StepHost& host, TaskId begin, TaskId end) const;
  /// Gives the device the recorded step, which is recorded first if need be; false where it cannot.
  bool repeat(PlanRun& run, StepHost& host);
  bool record(PlanRun& run);
  Recording record_tasks(PlanRun& run, TaskId begin, TaskId end) const;
  bool give_up(const std::string& why_not);
  void stage_again(PlanRun& run, StepHost& host);
  void read_ahead();

  const StepRunner& runner_;
  const StepPlan& plan_;
  const Backend& backend_;
  State state_;
  // The plan's parts. Before the first of them the host begins, after the last it takes what came.
  TaskId passes_{};        ///< to the clipping
  TaskId updates_{};       ///< behind it, where any are
  TaskId results_{};       ///< for which the host waits
  TaskId first_update_{};  ///< the first that changes weights or state
  std::vector<StagingTask> loads_;
  std::vector<TaskId> publications_;
  std::unique_ptr<RecordedWork> recorded_passes_, recorded_updates_;
  int64_t version_ = 0;        ///< of the kernels' context
  int64_t num_operators_ = 0;  ///< in the recording
  StepFeed* feed_;
  LossScales filled_scales_;  ///< of what the feed's thread wrote last
  int64_t num_read_ahead_ = 0;
};

}  // namespace tessera
