#include "ops/registry/operator_names.h"

#include <vector>

#include "core/text/names.h"
#include "ops/registry/cpu_kernels.h"

namespace tessera {

std::string judge_operator_name(std::string_view name) {
  // Every operator has a kernel for the CPU, as the plain form of the GPU's.
  const KernelTable kernels = make_cpu_kernels();
  if (kernels.contains(name)) return "";
  std::vector<std::string> names;
  for (const auto& [own, kernel] : kernels) names.push_back(own);
  return ", which is no operator" + did_you_mean(name, names);
}

}  // namespace tessera
