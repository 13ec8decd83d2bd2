#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "step/step_plan.h"

namespace tessera {

/// What one task does with one buffer.
void read(Task& task, BufferId buffer);
void write(Task& task, BufferId buffer);
void update(Task& task, BufferId buffer);

/// Writes a plan: lanes, storages and buffers are made when they are first named.
class PlanWriter {
 public:
  explicit PlanWriter(int64_t rank) { plan_.rank = rank; }

  LaneId lane(LaneKind kind);
  LaneId group(const Communicator& group, LaneKind kind = LaneKind::kGroup);
  BufferId buffer(const std::string& name, int64_t bytes, const StepStorage& storage);
  /// One that outlives the step, in a storage of its own.
  BufferId state(const std::string& name, int64_t bytes, Home home = Home::kDevice,
                 Purpose purpose = Purpose::kState);

  TaskId add(Task task) { return plan_.tasks.add(std::move(task)); }
  /// Adds a start like `task`; wait_for() adds the task that waits for it.
  TaskId start(Task task);
  TaskId wait_for(TaskId start);
  const Task& task(TaskId id) const { return plan_.tasks[id]; }
  /// The task adds to this buffer too.
  void add_to(TaskId task, BufferId buffer) { update(plan_.tasks[task], buffer); }
  /// For a wait that was written before its start: of the step before.
  void set_start(TaskId wait, TaskId start);
  size_t num_tasks() const { return plan_.tasks.size(); }

  StepPlan take() && { return std::move(plan_); }

 private:
  LaneId find_lane(LaneKind kind, std::string_view name, const std::vector<int64_t>& ranks);

  StepPlan plan_;
  std::map<std::string, BufferId> buffers_;
  std::map<std::string, StorageId> storages_;
};

}  // namespace tessera
