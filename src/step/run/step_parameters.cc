#include "step/run/step_parameters.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(TaskAction action) {
  throw InternalError(fmt::format("action {} of a step plan is not one of these parameters",
                                  static_cast<int>(action)));
}

}  // namespace

void StepParameters::round_gradients(const ProgramParameters& /*program*/) {
  refuse(TaskAction::kRoundGradients);
}

void StepParameters::start_update(TaskAction part, int64_t /*unit*/, const StepInput& /*input*/) {
  refuse(part);
}

void StepParameters::prepare(const StepInput& /*input*/) {
  refuse(TaskAction::kJudge);
}

void StepParameters::give_factors() {
  refuse(TaskAction::kPrepareUpdate);
}

void StepParameters::give_clip(std::span<const Tensor> /*losses*/, const StepInput& /*input*/) {
  refuse(TaskAction::kJudge);
}

void StepParameters::mark_clip() {
  refuse(TaskAction::kJudge);
}

StepResult StepParameters::wait_clip() {
  refuse(TaskAction::kJudge);
}

void LocalParameters::start(TaskAction action, int64_t /*unit*/) {
  refuse(action);
}

void LocalParameters::wait(TaskAction action, int64_t /*unit*/) {
  refuse(action);
}

void ReplicatedParameters::begin() {
  parameters_.reset_gradients();
  if (optimizer_.windows() != nullptr) optimizer_.windows()->forget();
}

/// Where the state is in the host's memory: the windows that it comes to.
StateWindows& ReplicatedParameters::windows(TaskAction action) const {
  if (optimizer_.windows() == nullptr) refuse(action);
  return *optimizer_.windows();
}

void ReplicatedParameters::start(TaskAction action, int64_t unit) {
  if (action == TaskAction::kLoadState) return windows(action).load(unit);
  if (action == TaskAction::kStoreState) return windows(action).store(unit);
  if (action == TaskAction::kGatherBucket) return optimizer_.start_gathering(unit);
  if (action != TaskAction::kReduceBucket) refuse(action);
  for (const size_t parameter : optimizer_.buckets().at(unit).parameters) {
    parameters_.settle_gradient(parameter);
    optimizer_.ready(parameter);
  }
}

void ReplicatedParameters::wait(TaskAction action, int64_t unit) {
  if (action == TaskAction::kLoadState) return windows(action).wait_load(unit);
  if (action == TaskAction::kStoreState) return windows(action).wait_store(unit);
  if (action == TaskAction::kStoreGradients) return optimizer_.wait_stored(unit);
  if (action == TaskAction::kUpdate) return optimizer_.wait_updated(unit);
  if (action == TaskAction::kLoadWeights) return optimizer_.wait_loaded(unit);
  if (action == TaskAction::kGatherBucket) return optimizer_.wait_gathering(unit);
  if (action != TaskAction::kReduceBucket) refuse(action);
  optimizer_.wait_reduction(unit);
}

void ReplicatedParameters::round_gradients(const ProgramParameters& program) {
  for (const ProgramParameters::Place& place : program.gradients) {
    const ModelParameter& parameter = parameters_.all()[place.parameter];
    if (!parameter.rounds_gradient()) continue;
    math_.add_rounded(parameter.sum, parameter.grad, parameters_.begin_gradient(place.parameter));
  }
}

void ReplicatedParameters::finish_gradients() {
  if (optimizer_.releases_gradients()) return;  // each was settled with its update
  parameters_.settle_gradients();
  optimizer_.finish_gradients();
}

/// Those that are released are nowhere else.
void ReplicatedParameters::settle(int64_t bucket) {
  if (!optimizer_.releases_gradients()) return;
  for (const size_t parameter : optimizer_.buckets().at(bucket).parameters)
    parameters_.settle_gradient(parameter);
}

void ReplicatedParameters::update(int64_t unit, const StepInput& input) {
  settle(unit);
  optimizer_.update(unit, input.observer);
}

void ReplicatedParameters::start_update(TaskAction part, int64_t unit, const StepInput& input) {
  switch (part) {
    case TaskAction::kStoreGradients:
      settle(unit);
      return optimizer_.store_gradients(unit, input.observer);
    case TaskAction::kUpdate:
      return optimizer_.update_on_host(unit, input.observer);
    case TaskAction::kLoadWeights:
      return optimizer_.load_weights(unit);
    default:
      refuse(part);
  }
}

void ReplicatedParameters::give_clip(std::span<const Tensor> losses, const StepInput& input) {
  optimizer_.give_clip(losses, input.observer);
}

void ShardedParameters::start(TaskAction action, int64_t unit) {
  if (action == TaskAction::kGatherModule) return sharded_.gather(unit);
  if (action != TaskAction::kReduceModule) refuse(action);
  sharded_.reduce(unit);
}

void ShardedParameters::wait(TaskAction action, int64_t unit) {
  if (action == TaskAction::kGatherModule) return sharded_.wait_gathering(unit);
  if (action != TaskAction::kReduceModule) refuse(action);
  sharded_.wait_reduction(unit);
}

void ShardedParameters::update(int64_t /*unit*/, const StepInput& input) {
  sharded_.update(input);
}

void ShardedParameters::bind(const ProgramParameters& program, Bindings& bindings) {
  for (const auto& [value, parameter] : program.weights)
    bindings.tensors[value] = sharded_.weight(parameter);
  for (const auto& [value, parameter] : program.gradients)
    bindings.tensors[value] = sharded_.gradient(parameter);
}

void ShardedParameters::done(const ProgramParameters& program) {
  for (const auto& [value, parameter] : program.weights)
    sharded_.release(sharded_.module_of(parameter));
}

}  // namespace tessera
