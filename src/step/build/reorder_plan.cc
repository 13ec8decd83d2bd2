#include "step/build/reorder_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "step/build/build_step.h"

namespace tessera {
namespace {

using Order = std::vector<TaskId>;

/// Where the task at `from` may stand at the earliest, not before `limit`: behind all that it
/// depends on, and behind the last message of its lane, either way, which keeps the order of the
/// messages between two ranks.
size_t earliest(const StepPlan& plan, const std::vector<TaskId>& dependencies, const Order& order,
                size_t from, size_t limit) {
  const Task& task = plan.tasks[order[from]];
  for (size_t at = from; at > limit; --at) {
    const Task& before = plan.tasks[order[at - 1]];
    const bool needed = std::ranges::find(dependencies, order[at - 1]) != dependencies.end();
    const bool same_way =
        before.kind == task.kind && before.phase == TaskPhase::kStart && before.lane == task.lane;
    if (needed || same_way) return at;
  }
  return limit;
}

/// In front of the last run before `from`; `from` where there is none.
size_t a_run_ahead(const StepPlan& plan, const Order& order, size_t from) {
  for (size_t at = from; at > 0; --at) {
    if (plan.tasks[order[at - 1]].kind == TaskKind::kRun) return at - 1;
  }
  return from;
}

}  // namespace

StepPlan reorder(StepPlan plan, const Order& order) {
  ensure(order.size() == plan.tasks.size(), "an order of {} tasks for a plan of {}", order.size(),
         plan.tasks.size());
  IdVector<TaskId, std::optional<TaskId>> places(plan.tasks.size());
  IdVector<TaskId, Task> tasks = std::exchange(plan.tasks, {});
  for (const TaskId id : order) {
    ensure(tasks.holds(id) && !places[id], "task {} stands twice in an order", number_of(id));
    places[id] = plan.tasks.add(std::move(tasks[id]));
  }
  for (Task& task : plan.tasks) {
    for (TaskId& before : task.after) before = *places[before];
    if (task.started_by) task.started_by = *places[*task.started_by];
  }
  return plan;
}

StepPlan post_receives_ahead(StepPlan plan) {
  const auto receives = [](const Task& task) { return task.kind == TaskKind::kReceive; };
  if (std::ranges::none_of(plan.tasks, receives)) return plan;
  const auto dependencies = find_dependencies(plan);
  Order order = plan.tasks.ids();
  for (size_t i = 0; i < order.size(); ++i) {
    const TaskId id = order[i];
    const Task& task = plan.tasks[id];
    if (task.kind != TaskKind::kReceive || task.phase != TaskPhase::kStart) continue;
    const size_t to = earliest(plan, dependencies[id], order, i, a_run_ahead(plan, order, i));
    std::rotate(order.begin() + static_cast<ptrdiff_t>(to),
                order.begin() + static_cast<ptrdiff_t>(i),
                order.begin() + static_cast<ptrdiff_t>(i) + 1);
  }
  return reorder(std::move(plan), order);
}

}  // namespace tessera
