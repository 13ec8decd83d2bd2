#include "train/plan/plan_trace.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr double kMicro = 1e6;

Json named(const char* what, size_t process, int64_t thread, const std::string& name) {
  return {
      {"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", name}}}};
}

void add_tasks(const StepPlan& plan, const PlanTimes& times, size_t process, Json& events) {
  events.push_back(named("process_name", process, 0, fmt::format("rank {}", plan.rank)));
  for (const Lane& lane : plan.lanes) {
    const auto thread = static_cast<int64_t>(&lane - &*plan.lanes.begin());
    events.push_back(named("thread_name", process, thread, lane.name));
  }
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    const TaskTime& time = times[id];
    if (task.phase == TaskPhase::kWait || time.end <= time.begin) continue;
    events.push_back({{"ph", "X"},
                      {"name", task.name},
                      {"pid", process},
                      {"tid", number_of(task.lane)},
                      {"ts", kMicro * time.begin},
                      {"dur", kMicro * (time.end - time.begin)}});
  }
}

/// What buffers hold on the device from their first task to their last.
void add_memory(const StepPlan& plan, const PlanTimes& times, size_t process, Json& events) {
  const auto lives = find_lives(plan);
  std::vector<std::pair<double, int64_t>> changes;
  for (const BufferId id : plan.buffers.ids()) {
    const StepBuffer& buffer = plan.buffers[id];
    if (plan.storages[buffer.storage].home != Home::kDevice || buffer.bytes == 0) continue;
    changes.emplace_back(times[lives[id].first].begin, buffer.bytes);
    changes.emplace_back(times[lives[id].last].end, -buffer.bytes);
  }
  std::ranges::stable_sort(changes, {}, &std::pair<double, int64_t>::first);
  int64_t alive = 0;
  for (const auto& [time, bytes] : changes) {
    alive += bytes;
    events.push_back({{"ph", "C"},
                      {"name", "bytes alive"},
                      {"pid", process},
                      {"ts", kMicro * time},
                      {"args", {{"bytes", alive}}}});
  }
}

}  // namespace

std::string make_plan_trace(const SimulatedPlans& plans) {
  Json events = Json::array();
  for (size_t i = 0; i < plans.plans.size(); ++i) {
    add_tasks(plans.plans[i], plans.clocks[i].times, i, events);
    add_memory(plans.plans[i], plans.clocks[i].times, i, events);
  }
  return Json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump();
}

}  // namespace tessera
