#include "step/run/step_runner.h"

#include "step/run/plan_run.h"

namespace tessera {

StepRunner::StepRunner(TrainingModel& model, PipelinePlace pipeline, StepParameters& parameters)
    : parts_{model, std::move(pipeline), parameters} {
  parts_.pipeline.activations->connect_neighbours();
  parts_.pipeline.gradients->connect_neighbours();
}

void StepRunner::run(const StepPlan& plan, StepHost& host, const StepObservers& observers) {
  PlanRun(parts_, plan, host, observers).run(TaskId{0}, plan.tasks.next());
}

}  // namespace tessera
