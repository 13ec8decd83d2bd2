#include "model/run/weight_store.h"

namespace tessera {

std::string accumulated_weight(const Value& accumulator) {
  constexpr std::string_view kPrefix = "grad.";
  ensure(accumulator.kind == ValueKind::kAccumulator && accumulator.name.starts_with(kPrefix),
         "'{}' accumulates no weight's gradient", accumulator.name);
  return accumulator.name.substr(kPrefix.size());
}

ProgramParameters find_parameters(const Program& program, const ParameterSet& parameters,
                                  const std::string& prefix) {
  ProgramParameters result;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kWeight)
      result.weights.push_back({id, parameters.index(prefix + value.name)});
    if (value.kind == ValueKind::kAccumulator)
      result.gradients.push_back({id, parameters.index(prefix + accumulated_weight(value))});
  }
  return result;
}

}  // namespace tessera
