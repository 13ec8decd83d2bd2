#pragma once

#include <memory>
#include <optional>

#include "optim/sharded/step_exchanges.h"
#include "step/build/step_runs.h"
#include "step/plan_writer.h"

namespace tessera {

/// Writes the tasks that bring weights to a step's runs, take their gradients away and update. For
/// each run in order: before_run, then the run's task is added, then after_run.
class ParameterTasks {
 public:
  virtual ~ParameterTasks() = default;
  ParameterTasks(const ParameterTasks&) = delete;
  ParameterTasks& operator=(const ParameterTasks&) = delete;

  /// Adds what comes before run `idx`, and to its task the weights and gradients that it touches.
  virtual void before_run(size_t idx, Task& task) = 0;
  virtual void after_run(size_t idx) = 0;
  /// All sums are in their owners' rows after it.
  virtual void finish_gradients() = 0;
  /// Norm, clipping, update, and new weights on their way. Where the device decides about the step,
  /// by the norm and the `results`, the host learns of it in the task that is returned.
  virtual std::optional<TaskId> update(const Communicator& world,
                                       const std::vector<BufferId>& results) = 0;

 protected:
  ParameterTasks() = default;
};

struct BucketTaskOptions {
  bool trains = true;          ///< the runs are a training step's, not an evaluation's
  bool device_judges = false;  ///< and updates before the host knows of it: on one rank
};

/// Weights and gradients stay where they are; gradients are reduced bucket by bucket when no later
/// run adds to them, and the updated weights, gathered since the step before, are waited for in
/// front of their first reader. `runs` must outlive it. Without buckets nothing is exchanged or
/// updated.
std::unique_ptr<ParameterTasks> write_bucket_tasks(PlanWriter& writer,
                                                   const ReplicatedExchanges& exchanges,
                                                   const std::vector<StepRun>& runs,
                                                   size_t num_parameters,
                                                   const BucketTaskOptions& options);

/// Full sharding: modules are gathered for the runs that read them, as early as the run before, and
/// the gradients of each run are reduced behind it; both as far as there are buffers.
std::unique_ptr<ParameterTasks> write_module_tasks(PlanWriter& writer,
                                                   const ShardedExchanges& exchanges,
                                                   const std::vector<StepRun>& runs);

}  // namespace tessera
