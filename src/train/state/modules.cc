#include "train/state/modules.h"

#include <map>

namespace tessera {

std::vector<std::vector<size_t>> list_modules(const std::vector<std::optional<int64_t>>& layers) {
  std::vector<std::vector<size_t>> modules;
  std::map<int64_t, size_t> module_of;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto known = layers[i] ? module_of.find(*layers[i]) : module_of.end();
    if (known != module_of.end()) {
      modules[known->second].push_back(i);
      continue;
    }
    if (layers[i]) module_of[*layers[i]] = modules.size();
    modules.push_back({i});
  }
  return modules;
}

}  // namespace tessera
