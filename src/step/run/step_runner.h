#pragma once

#include <functional>
#include <vector>

#include "model/run/training_model.h"
#include "parallel/stage_groups.h"
#include "step/run/step_parameters.h"
#include "step/step_plan.h"

namespace tessera {

/// What a step asks of whoever trains, in the order of its tasks.
class StepHost {
 public:
  StepHost() = default;
  virtual ~StepHost() = default;
  StepHost(const StepHost&) = delete;
  StepHost& operator=(const StepHost&) = delete;

  /// Makes the rank's micro-batches of the step ready. All ranks come to it together.
  virtual void begin() {}
  virtual const MicroBatch& micro_batch(int64_t idx) = 0;
  virtual const LossScales& scales() = 0;
  /// Given this rank's parts of the results; whether the step may update, the same on all ranks,
  /// who come to it together. Where the device judges, it has decided the same.
  virtual bool share(const MicroBatchResult& own) = 0;
  virtual StepInput update_input() { return {}; }
  /// The device is given next what changes weights and the optimizer's state. Called in each step,
  /// also in one that is skipped; not while the device records.
  virtual void before_update() {}
  virtual void end(const StepResult& /*update*/) {}
};

/// Told of each task, on the thread that runs the step; on a GPU when the device is next
/// synchronised, with the times at which it did the task's work.
using TaskObserver = std::function<void(const Task& task, Device::Time begin, Device::Time end)>;

struct StepObservers {
  NodeObserver nodes = {};
  TaskObserver tasks = {};
};

/// What plans are run with.
struct StepParts {
  TrainingModel& model;
  PipelinePlace pipeline;
  StepParameters& parameters;
};

/// Runs plans on whatever device the model is on: takes their tasks in order, starting and waiting
/// for exchanges as they say. One object serves all steps of a run; all ranks of the pipeline must
/// construct it. An error names the task in which it came. Not thread-safe. All references must
/// outlive it.
class StepRunner {
 public:
  StepRunner(TrainingModel& model, PipelinePlace pipeline, StepParameters& parameters);

  /// One step, or evaluation. The plan must be of this rank, model and parameters. What is under
  /// way when something throws is given up.
  void run(const StepPlan& plan, StepHost& host, const StepObservers& observers = {});

  const StepParts& parts() const { return parts_; }

 private:
  StepParts parts_;
};

/// A step's host that is given all micro-batches and keeps this rank's results.
class GivenBatches : public StepHost {
 public:
  GivenBatches(std::vector<MicroBatch> batches, const LossScales& scales)
      : batches_(std::move(batches)), scales_(scales) {}

  const MicroBatch& micro_batch(int64_t idx) override { return batches_.at(idx); }
  const LossScales& scales() override { return scales_; }
  bool share(const MicroBatchResult& own) override {
    result_ = own;
    return true;
  }
  const MicroBatchResult& result() const { return result_; }

 private:
  std::vector<MicroBatch> batches_;
  LossScales scales_;
  MicroBatchResult result_;
};

}  // namespace tessera
