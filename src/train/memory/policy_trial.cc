#include "train/memory/policy_trial.h"

#include <algorithm>
#include <set>

#include "step/build/estimate_passes.h"
#include "step/build/place_saved.h"

namespace tessera {
namespace {

MachineRates rates_of(const Settings& settings, const Backend& backend) {
  MachineRates rates = estimated_rates(backend.is_host());
  rates.host_bytes = settings.train.saved_policy().offload.link_bytes;
  return rates;
}

/// What a program keeps where routing is balanced.
int64_t balanced_saved_bytes(const Executable& executable) {
  int64_t bytes = 0;
  executable.list_memory(1, [&](Storage storage, int64_t /*offset*/, int64_t num_bytes) {
    if (storage == Storage::kSaved || storage == Storage::kOffloaded) bytes += num_bytes;
  });
  return bytes;
}

double estimate_model(const Settings& settings, const RunLayout& layout,
                      const TrainingModel& model) {
  const StagePrograms& programs = model.programs();
  const std::vector<StepRun> runs = list_step_passes(programs, nullptr, layout.steps).runs;
  return estimate_passes(runs, programs, model.placement(), rates_of(settings, programs.backend));
}

}  // namespace

double estimate_passes(const Settings& settings, const PlannedRank& rank) {
  return estimate_model(settings, rank.layout, rank.model);
}

PolicyTrial::PolicyTrial(const Settings& settings, const PlannedRank& rank,
                         const ModelState::Bytes& state, bool leaves_room)
    : settings_(settings),
      rank_(rank),
      rates_(rates_of(settings, rank.backend)),
      state_(state),
      snapshot_(snapshot_bytes(settings, rank.layout)),
      leaves_room_(leaves_room) {}

std::vector<int64_t> PolicyTrial::layers() const {
  std::vector<int64_t> layers;
  for (const auto& [layer, program] : programs().of_layers) layers.push_back(layer);
  return layers;
}

LayerCost PolicyTrial::judge_layer(const LayerProgramKey& key) const {
  const auto [found, is_new] = judged_.try_emplace(key);
  LayerCost& cost = found->second;
  if (!is_new) return cost;
  const DerivedProgram& derived = programs().compile_kind(key).derived;
  cost.bytes = balanced_saved_bytes(derived.forward);
  const auto add = [&](const Executable& executable) {
    cost.transient = std::max(cost.transient, executable.plan().transient_bytes);
    cost.seconds += estimate_seconds(executable, rates_);
  };
  add(derived.forward);
  add(derived.backward);
  if (derived.weights) add(derived.weights->program);
  return cost;
}

TrainingModel PolicyTrial::make_model(const SavedPolicy& policy) const {
  TrainingModel model(programs().with_policy(policy));
  model.place(place_saved(model.programs(), rank_.layout.steps));
  return model;
}

PolicyCost PolicyTrial::judge(const SavedPolicy& policy) const {
  const TrainingModel model = make_model(policy);
  return {.memory = {.state = state_,
                     .activations = model.activation_bytes(),
                     .overhead = predict_overhead(settings_, rank_.layout, model, rank_.backend),
                     .snapshot = snapshot_,
                     .on_host = rank_.backend.is_host()},
          .seconds = estimate_model(settings_, rank_.layout, model),
          .skewed = leaves_room_ ? model.skewed_bytes(kExpectedSkew) : 0};
}

std::vector<int64_t> PolicyTrial::find_offloading(const SavedPolicy& policy) const {
  const TrainingModel model = make_model(policy);
  std::set<int64_t> layers;
  for (const LayerOffload& offload : model.placement().offloads)
    layers.insert(model.part().chunks[offload.chunk].first_layer + offload.layer);
  return {layers.begin(), layers.end()};
}

}  // namespace tessera
