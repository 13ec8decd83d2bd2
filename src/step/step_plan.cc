#include "step/step_plan.h"

#include <algorithm>
#include <array>
#include <set>

#include "core/error.h"

namespace tessera {
namespace {

/// Who touched a buffer's storage so far.
class DependencyFinder {
 public:
  explicit DependencyFinder(const StepPlan& plan)
      : plan_(plan), writers_(plan.buffers.size()), readers_(plan.buffers.size()) {
    occupants_ = IdVector<StorageId, std::optional<BufferId>>(plan.storages.size());
  }

  std::vector<TaskId> add(TaskId id) {
    const Task& task = plan_.tasks[id];
    std::set<TaskId> before(task.after.begin(), task.after.end());
    if (task.started_by && *task.started_by < id) before.insert(*task.started_by);
    for (const BufferId buffer : task.reads) {
      if (writers_[buffer]) before.insert(*writers_[buffer]);
    }
    for (const BufferId buffer : task.writes) follow_all(buffer, before);
    for (const BufferId buffer : task.reads) {
      readers_[buffer].push_back(id);
      occupants_[plan_.buffers[buffer].storage] = buffer;
    }
    for (const BufferId buffer : task.writes) {
      writers_[buffer] = id;
      readers_[buffer].clear();
      occupants_[plan_.buffers[buffer].storage] = buffer;
    }
    before.erase(id);
    return {before.begin(), before.end()};
  }

 private:
  /// A writer comes after everyone who used the value, or the one before it in the same storage.
  void follow_all(BufferId buffer, std::set<TaskId>& before) const {
    const std::optional<BufferId> occupant = occupants_[plan_.buffers[buffer].storage];
    for (const std::optional<BufferId> used : {std::optional(buffer), occupant}) {
      if (!used) continue;
      if (writers_[*used]) before.insert(*writers_[*used]);
      before.insert(readers_[*used].begin(), readers_[*used].end());
    }
  }

  const StepPlan& plan_;
  IdVector<BufferId, std::optional<TaskId>> writers_;
  IdVector<BufferId, std::vector<TaskId>> readers_;
  IdVector<StorageId, std::optional<BufferId>> occupants_;
};

}  // namespace

std::string_view purpose_name(Purpose purpose) {
  constexpr std::array<std::string_view, 9> kNames = {"saved activations",
                                                      "hidden states",
                                                      "working memory",
                                                      "inputs",
                                                      "gathered weights",
                                                      "gradients to reduce",
                                                      "offloaded activations",
                                                      "stashed activations",
                                                      "state"};
  return kNames[number_of(purpose)];
}

std::string_view task_kind_name(TaskKind kind) {
  constexpr std::array<std::string_view, 7> kNames = {"run",  "send",      "receive", "exchange",
                                                      "copy", "optimizer", "host"};
  return kNames[number_of(kind)];
}

IdVector<TaskId, std::optional<TaskId>> find_waits(const StepPlan& plan) {
  IdVector<TaskId, std::optional<TaskId>> waits(plan.tasks.size());
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    if (task.phase != TaskPhase::kWait) continue;
    ensure(task.started_by && plan.tasks.holds(*task.started_by) &&
               plan.tasks[*task.started_by].phase == TaskPhase::kStart,
           "step plan: task {} '{}' waits for nothing that a task starts", number_of(id),
           task.name);
    std::optional<TaskId>& wait = waits[*task.started_by];
    ensure(!wait, "step plan: '{}' is waited for twice", plan.tasks[*task.started_by].name);
    wait = id;
  }
  for (const TaskId id : plan.tasks.ids()) {
    ensure(plan.tasks[id].phase != TaskPhase::kStart || waits[id],
           "step plan: task {} '{}' is started and not waited for", number_of(id),
           plan.tasks[id].name);
  }
  return waits;
}

IdVector<TaskId, std::vector<TaskId>> find_dependencies(const StepPlan& plan) {
  DependencyFinder finder(plan);
  IdVector<TaskId, std::vector<TaskId>> dependencies;
  for (const TaskId id : plan.tasks.ids()) dependencies.add(finder.add(id));
  return dependencies;
}

IdVector<BufferId, BufferLife> find_lives(const StepPlan& plan) {
  const auto last_task = static_cast<TaskId>(static_cast<int32_t>(plan.tasks.size()) - 1);
  IdVector<BufferId, BufferLife> lives(plan.buffers.size(), {last_task, TaskId{0}});
  const auto touch = [&](BufferId buffer, TaskId id) {
    lives[buffer].first = std::min(lives[buffer].first, id);
    lives[buffer].last = std::max(lives[buffer].last, id);
  };
  for (const TaskId id : plan.tasks.ids()) {
    for (const BufferId buffer : plan.tasks[id].reads) touch(buffer, id);
    for (const BufferId buffer : plan.tasks[id].writes) touch(buffer, id);
  }
  for (const BufferId buffer : plan.buffers.ids()) {
    if (plan.buffers[buffer].outlives) lives[buffer] = {TaskId{0}, last_task};
  }
  return lives;
}

}  // namespace tessera
