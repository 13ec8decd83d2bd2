#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/file/file.h"
#include "core/file/output_path.h"
#include "core/process/progress.h"
#include "step/print_plan.h"
#include "train/memory/planned_rank.h"
#include "train/metrics/step_page.h"

namespace tessera {
namespace {

/// The plans of the first rank of each stage.
struct StepPlans {
  bool on_host = true;
  std::vector<StepPlan> plans;
  std::vector<PlanTimes> times;
};

StepPlans make_plans(const Settings& settings, int64_t num_ranks) {
  StepPlans result;
  for (const int64_t rank : Layout(settings.parallel.layout, num_ranks).group(0, Axis::kPp)) {
    const PlannedRank planned = plan_rank(settings, rank, num_ranks);
    result.on_host = planned.backend.is_host();
    result.plans.push_back(plan_step(settings, planned));
  }
  result.times = simulate_plans(result.plans, estimated_rates(result.on_host));
  return result;
}

void print_json(const StepPlans& step) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (size_t i = 0; i < step.plans.size(); ++i)
    list.push_back(plan_to_json(step.plans[i], step.times[i], find_step_memory(step.plans[i])));
  std::cout << (list.size() == 1 ? list[0] : list).dump() << "\n";
}

void write_page(const Settings& settings, const StepPlans& step, const std::string& path) {
  const std::string name = settings.preset.empty() ? "a model" : settings.preset;
  const ParameterCount count = count_parameters(settings.model);
  const std::string page = make_step_page(
      step.plans, step.times,
      {.title = fmt::format("A training step of {}", name),
       .status =
           fmt::format("{} parameters, {} stages, {} sequences a micro-batch, durations as on {}",
                       format_count(static_cast<double>(count.total)), step.plans.size(),
                       settings.train.micro_batch,
                       step.on_host ? "a small host" : "H100 GPUs with fast links")});
  replace_file(path, page);
  std::cout << path << "\n";
}

}  // namespace

void show_step(const Settings& settings, int64_t num_ranks, const InspectArguments& arguments) {
  if (!arguments.step_html.empty()) check_output_path("--step-html", arguments.step_html);
  const StepPlans step = make_plans(settings, num_ranks);
  if (!arguments.step_html.empty()) write_page(settings, step, arguments.step_html);
  if (!arguments.step) return;
  if (arguments.json) return print_json(step);
  if (settings.parallel.dynamic_cp)
    std::cout << fmt::format(
        "# as if all micro-batches had the degree of parallel.cp {}; --contexts shows those that "
        "documents get\n",
        settings.parallel.layout.cp);
  constexpr size_t kMaxTasks = 60;
  for (size_t i = 0; i < step.plans.size(); ++i) {
    const StepPlan& plan = step.plans[i];
    if (i > 0) std::cout << "\n";
    std::cout << print_plan(plan, step.times[i], arguments.all ? plan.tasks.size() : kMaxTasks)
              << "\n"
              << print_step_memory(plan, find_step_memory(plan));
  }
}

}  // namespace tessera
