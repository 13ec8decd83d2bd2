#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "step/simulate_plan.h"
#include "step/step_memory.h"

namespace tessera {

/// A plan with its estimated times, as a person reads it: one line a task with its lane, kind, cost
/// and what it must come after. Plans of more than `max_tasks` tasks are cut in the middle.
std::string print_plan(const StepPlan& plan, const PlanTimes& times, size_t max_tasks);

/// "saved activations  1.2 GiB  800 MiB": a line a purpose, slabs beside what lifetimes allow.
std::string print_step_memory(const StepPlan& plan, const StepMemory& memory);

/// All of it.
nlohmann::ordered_json plan_to_json(const StepPlan& plan, const PlanTimes& times,
                                    const StepMemory& memory);

}  // namespace tessera
