#include "step/print_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/memory.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string phase_name(TaskPhase phase) {
  return phase == TaskPhase::kStart ? "start" : phase == TaskPhase::kWait ? "wait" : "";
}

std::string kind_text(const Task& task) {
  const std::string phase = phase_name(task.phase);
  return fmt::format("{}{}{}", task_kind_name(task.kind), phase.empty() ? "" : " ", phase);
}

std::string flops_text(double flops) {
  if (flops <= 0) return "";
  constexpr const char* kUnits[] = {"", "k", "M", "G", "T", "P"};
  size_t unit = 0;
  while (flops >= 1000 && unit + 1 < std::size(kUnits)) {
    flops /= 1000;
    ++unit;
  }
  return fmt::format("{:.3g} {}FLOP", flops, kUnits[unit]);
}

/// Dependencies that no other one of them has itself.
std::vector<TaskId> shorten(const IdVector<TaskId, std::vector<TaskId>>& dependencies, TaskId id) {
  std::vector<TaskId> result;
  for (const TaskId before : dependencies[id]) {
    const bool implied = std::ranges::any_of(dependencies[id], [&](TaskId other) {
      return std::ranges::find(dependencies[other], before) != dependencies[other].end();
    });
    if (!implied) result.push_back(before);
  }
  return result;
}

std::string after_text(const std::vector<TaskId>& before) {
  std::string text;
  constexpr size_t kMost = 6;
  for (size_t i = 0; i < std::min(before.size(), kMost); ++i)
    text += fmt::format(" {}", number_of(before[i]));
  return before.size() > kMost ? text + " ..." : text;
}

std::string task_line(const StepPlan& plan, const PlanTimes& times, TaskId id,
                      const std::vector<TaskId>& before) {
  const Task& task = plan.tasks[id];
  std::string line = fmt::format(
      "{:>5}  {:<18} {:<14} {:<58} {:>11} {:>10} {:>9.3f} {}", number_of(id),
      plan.lanes[task.lane].name, kind_text(task), task.name, flops_text(task.flops),
      task.bytes > 0 ? format_bytes(task.bytes) : "", times[id].begin * 1e3, after_text(before));
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string lanes_text(const StepPlan& plan) {
  std::string text;
  for (const Lane& lane : plan.lanes) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", lane.name);
    if (!lane.ranks.empty()) text += fmt::format(" ({} ranks)", lane.ranks.size());
  }
  return text;
}

Json to_json(const std::vector<TaskId>& ids) {
  Json list = Json::array();
  for (const TaskId id : ids) list.push_back(number_of(id));
  return list;
}

Json to_json(const std::vector<BufferId>& ids) {
  Json list = Json::array();
  for (const BufferId id : ids) list.push_back(number_of(id));
  return list;
}

Json task_to_json(const StepPlan& plan, const PlanTimes& times, TaskId id,
                  const std::vector<TaskId>& before) {
  const Task& task = plan.tasks[id];
  Json json = {{"name", task.name},
               {"kind", task_kind_name(task.kind)},
               {"lane", number_of(task.lane)},
               {"reads", to_json(task.reads)},
               {"writes", to_json(task.writes)},
               {"after", to_json(before)},
               {"flops", task.flops},
               {"bytes", task.bytes},
               {"begin", times[id].begin},
               {"end", times[id].end}};
  if (task.phase != TaskPhase::kWhole) json["phase"] = phase_name(task.phase);
  if (task.started_by) json["started_by"] = number_of(*task.started_by);
  for (const InnerExchanges& inner : task.inside) {
    json["inside"].push_back(
        {{"lane", number_of(inner.lane)}, {"count", inner.count}, {"bytes", inner.bytes}});
  }
  return json;
}

Json memory_to_json(const StepMemory& memory) {
  Json json = {{"slabs", memory.slabs},
               {"placed", memory.placed},
               {"most", memory.most},
               {"fullest", number_of(memory.fullest)}};
  for (size_t p = 0; p < memory.purposes.size(); ++p) {
    json["purposes"][std::string(purpose_name(static_cast<Purpose>(p)))] = {
        {"slabs", memory.purposes[p].slabs}, {"most", memory.purposes[p].most}};
  }
  return json;
}

double length_of(const PlanTimes& times) {
  double length = 0;
  for (const TaskTime& time : times) length = std::max(length, time.end);
  return length;
}

}  // namespace

std::string print_plan(const StepPlan& plan, const PlanTimes& times, size_t max_tasks) {
  std::string text =
      fmt::format("rank {}: {} tasks, {} buffers, estimated {:.3f} ms; lanes {}\n", plan.rank,
                  plan.tasks.size(), plan.buffers.size(), length_of(times) * 1e3, lanes_text(plan));
  text += fmt::format("{:>5}  {:<18} {:<14} {:<58} {:>11} {:>10} {:>9}  after\n", "task", "lane",
                      "kind", "what", "work", "bytes", "at ms");
  const auto dependencies = find_dependencies(plan);
  const size_t first = std::min(plan.tasks.size(), max_tasks * 2 / 3);
  const size_t left_out = plan.tasks.size() > max_tasks ? plan.tasks.size() - max_tasks : size_t{0};
  for (const TaskId id : plan.tasks.ids()) {
    const size_t at = number_of(id);
    if (left_out > 0 && at == first)
      text += fmt::format("       ... {} more tasks; --all prints them\n", left_out);
    if (at >= first && at < first + left_out) continue;
    text += task_line(plan, times, id, shorten(dependencies, id));
  }
  return text;
}

std::string print_step_memory(const StepPlan& plan, const StepMemory& memory) {
  const auto line = [](std::string_view what, int64_t slabs, int64_t most, std::string_view more) {
    std::string text = fmt::format("{:<20} {:>12} {:>12} {:>12}", what, format_bytes(slabs),
                                   format_bytes(most), more);
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string text = fmt::format("{:<20} {:>12} {:>12} {:>12}\n", "memory of the step", "as taken",
                                 "most alive", "by lifetime");
  for (size_t p = 0; p < memory.purposes.size(); ++p) {
    const auto purpose = static_cast<Purpose>(p);
    const PurposeMemory& one = memory.purposes[p];
    if (purpose != Purpose::kState && one.slabs > 0)
      text += line(purpose_name(purpose), one.slabs, one.most, "");
  }
  text += line("together", memory.slabs, memory.most, format_bytes(memory.placed));
  return text + fmt::format("the most is alive at '{}'\n", plan.tasks[memory.fullest].name);
}

Json plan_to_json(const StepPlan& plan, const PlanTimes& times, const StepMemory& memory) {
  Json json = {{"rank", plan.rank}, {"memory", memory_to_json(memory)}};
  for (const Lane& lane : plan.lanes)
    json["lanes"].push_back({{"name", lane.name}, {"ranks", lane.ranks}});
  const auto lives = find_lives(plan);
  for (const BufferId id : plan.buffers.ids()) {
    const StepBuffer& buffer = plan.buffers[id];
    const StepStorage& storage = plan.storages[buffer.storage];
    json["buffers"].push_back({{"name", buffer.name},
                               {"bytes", buffer.bytes},
                               {"storage", storage.name},
                               {"purpose", purpose_name(storage.purpose)},
                               {"home", storage.home == Home::kDevice ? "device" : "host"},
                               {"first", number_of(lives[id].first)},
                               {"last", number_of(lives[id].last)}});
  }
  const auto dependencies = find_dependencies(plan);
  for (const TaskId id : plan.tasks.ids())
    json["tasks"].push_back(task_to_json(plan, times, id, dependencies[id]));
  return json;
}

}  // namespace tessera
