#include "train/state/modules.h"

#include <map>

#include "model/run/parameters.h"

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

}  // namespace tessera
