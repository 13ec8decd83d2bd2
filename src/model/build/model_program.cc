#include "model/build/model_program.h"

#include "ops/scale/scale.h"

namespace tessera {

std::vector<ValueId> frozen_weights(const ModelProgram& program) {
  std::vector<ValueId> frozen;
  for (ValueId id = 0; id < program.forward.num_values(); ++id) {
    const Value& value = program.forward.value(id);
    if (value.kind == ValueKind::kWeight && program.placements.at(value.name).frozen)
      frozen.push_back(id);
  }
  return frozen;
}

ValueId add_scaled(Program& program, ValueId x, double factor, const char* name) {
  return factor == 1.0 ? x : program.add1(make_scale(factor), {x}, name);
}

}  // namespace tessera
