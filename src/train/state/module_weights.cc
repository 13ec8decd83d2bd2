#include "train/state/module_weights.h"

#include <algorithm>
#include <map>

namespace tessera {

std::vector<std::vector<size_t>> list_modules(const std::vector<std::string>& parameters) {
  std::vector<std::vector<size_t>> modules;
  std::map<std::string, size_t> layers;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string prefix = layer_prefix(parameters[i]);
    const auto layer = layers.find(prefix);
    if (layer != layers.end()) {
      modules[layer->second].push_back(i);
      continue;
    }
    if (!prefix.empty()) layers[prefix] = modules.size();
    modules.push_back({i});
  }
  return modules;
}

std::vector<size_t> ModuleWeights::modules_of(
    const std::vector<ProgramParameters::Place>& places) const {
  std::vector<size_t> modules;
  for (const ProgramParameters::Place& place : places) {
    const size_t module = sharded_.module_of(place.parameter);
    if (std::ranges::find(modules, module) == modules.end()) modules.push_back(module);
  }
  std::ranges::stable_sort(modules, std::greater<>(),
                           [&](size_t module) { return sharded_.gathered_bytes(module); });
  return modules;
}

void ModuleWeights::prepare(const ProgramParameters& program) {
  for (const size_t module : modules_of(program.weights)) {
    if (sharded_.can_gather(module)) sharded_.gather(module);
  }
}

void ModuleWeights::bind(const ProgramParameters& program, Bindings& bindings) {
  for (const auto& [value, parameter] : program.weights)
    bindings.tensors[static_cast<size_t>(value)] = sharded_.weight(parameter);
  for (const auto& [value, parameter] : program.gradients)
    bindings.tensors[static_cast<size_t>(value)] = sharded_.gradient(parameter);
}

void ModuleWeights::done(const ProgramParameters& program) {
  for (const size_t module : modules_of(program.weights)) sharded_.release(module);
  for (const size_t module : modules_of(program.gradients)) sharded_.reduce(module);
}

}  // namespace tessera
