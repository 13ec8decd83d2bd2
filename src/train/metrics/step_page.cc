#include "train/metrics/step_page.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/memory.h"
#include "step/step_memory.h"
#include "train/metrics/page.h"
#include "train/metrics/report_assets.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string_view phase_name(TaskPhase phase) {
  return phase == TaskPhase::kStart ? "start" : phase == TaskPhase::kWait ? "wait" : "whole";
}

Json tasks_json(const StepPlan& plan, const PlanTimes& times) {
  Json tasks = Json::array();
  const auto dependencies = find_dependencies(plan);
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    Json after = Json::array();
    for (const TaskId before : dependencies[id]) after.push_back(number_of(before));
    tasks.push_back({{"id", number_of(id)},
                     {"name", task.name},
                     {"kind", task_kind_name(task.kind)},
                     {"phase", phase_name(task.phase)},
                     {"lane", number_of(task.lane)},
                     {"begin", times[id].begin},
                     {"end", times[id].end},
                     {"flops", task.flops},
                     {"bytes", task.bytes},
                     {"after", after}});
  }
  return tasks;
}

/// Times and bytes that are alive from then on. What is started may begin later; the next task does
/// not.
Json memory_json(const StepPlan& plan, const PlanTimes& times) {
  Json points = Json::array();
  const std::vector<int64_t> alive = find_alive_bytes(plan);
  for (const TaskId id : plan.tasks.ids()) {
    if (plan.tasks[id].phase == TaskPhase::kStart) continue;
    points.push_back({times[id].begin, alive[number_of(id)]});
  }
  return points;
}

double length_of(const PlanTimes& times) {
  double length = 0;
  for (const TaskTime& time : times) length = std::max(length, time.end);
  return length;
}

Json rank_json(const StepPlan& plan, const PlanTimes& times) {
  Json lanes = Json::array();
  for (const Lane& lane : plan.lanes) lanes.push_back(lane.name);
  return {{"rank", plan.rank},
          {"length", length_of(times)},
          {"lanes", lanes},
          {"tasks", tasks_json(plan, times)},
          {"memory", memory_json(plan, times)}};
}

std::string card(std::string_view label, const std::string& value, const std::string& remark) {
  return fmt::format(
      "<div class=\"card\"><dt>{}</dt><dd>{}</dd><dd class=\"remark\">{}</dd></div>\n", label,
      escape_html(value), escape_html(remark));
}

std::string cards(const StepPlan& plan, const PlanTimes& times) {
  const StepMemory memory = find_step_memory(plan);
  return card(fmt::format("rank {}", plan.rank), fmt::format("{:.3g} ms", length_of(times) * 1e3),
              fmt::format("{} tasks, estimated", plan.tasks.size())) +
         card(fmt::format("rank {}, memory", plan.rank), format_bytes(memory.slabs),
              fmt::format("{} by lifetime", format_bytes(memory.placed)));
}

}  // namespace

std::string make_step_page(std::span<const StepPlan> plans, std::span<const PlanTimes> times,
                           const StepPageInfo& info) {
  Json data = {{"ranks", Json::array()}};
  const StepSpeeds& speeds = info.speeds;
  if (!speeds.empty()) {
    data["speeds"] = {{"computing", speeds.computing},
                      {"links", speeds.links},
                      {"seconds", speeds.seconds},
                      {"exposed", speeds.exposed}};
  }
  std::string all_cards;
  for (size_t i = 0; i < plans.size(); ++i) {
    data["ranks"].push_back(rank_json(plans[i], times[i]));
    all_cards += cards(plans[i], times[i]);
  }
  return fill_page(kStepHtml, {{"title", escape_html(info.title)},
                               {"style", std::string(kStyleCss)},
                               {"status", escape_html(info.status)},
                               {"cards", all_cards},
                               {"data", escape_json(data.dump())},
                               {"step", std::string(kStepJs)}});
}

}  // namespace tessera
