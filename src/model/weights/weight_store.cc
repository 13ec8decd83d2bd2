#include "model/weights/weight_store.h"

namespace tessera {

ProgramParameters find_parameters(const Program& program, const Program& forward,
                                  const std::vector<Link>& accumulators,
                                  const ParameterSet& parameters, const WeightNames& names) {
  ProgramParameters result;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kWeight)
      result.weights.push_back({id, parameters.index(names.of(value.name))});
  }
  for (const Link& link : accumulators) {
    const size_t weight = parameters.index(names.of(forward.value(link.forward).name));
    if (!parameters.all()[weight].is_frozen()) result.gradients.push_back({link.backward, weight});
  }
  return result;
}

void bind_parameters(const ProgramParameters& program, const ParameterSet& parameters,
                     Bindings& bindings) {
  for (const ProgramParameters::Place& place : program.weights)
    bindings.tensors[place.value] = parameters.all()[place.parameter].weight;
  for (const ProgramParameters::Place& place : program.gradients)
    bindings.tensors[place.value] = parameters.all()[place.parameter].sum;
}

}  // namespace tessera
