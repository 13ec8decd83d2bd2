#include "model/run/layer_copies.h"

namespace tessera {
namespace {

/// Calls use(layer, name, type, offset) for each copy, one behind the other; returns the bytes.
template <typename Use>
int64_t visit_copies(const StagePrograms& programs, const Use& use) {
  int64_t offset = 0;
  for (const auto& [layer, kind] : programs.of_layers) {
    if (!kind->derived.weight_copies) continue;
    const Program& program = kind->derived.weight_copies->program();
    for (const ValueId id : program.outputs()) {
      const Value& value = program.value(id);
      use(layer, value.name, value.type, offset);
      offset += align_up(value.type.num_bytes());
    }
  }
  return offset;
}

}  // namespace

int64_t LayerCopies::count_bytes(const StagePrograms& programs) {
  return visit_copies(programs, [](auto&&...) {});
}

LayerCopies::LayerCopies(const StagePrograms& programs)
    : memory_(count_bytes(programs), "copies of rounded weights", programs.backend.device()) {
  for (const auto& [layer, kind] : programs.of_layers) layers_.try_emplace(layer);
  visit_copies(programs, [this](int64_t layer, const std::string& name, const ValueType& type,
                                int64_t offset) {
    Tensor tensor = memory_.tensor(offset, type.dtype, type.shape);
    tensor.scale = type.scale;
    layers_.at(layer).tensors.emplace(name, tensor);
  });
}

void LayerCopies::forget() {
  for (auto& [number, layer] : layers_) layer.is_stale = true;
}

bool LayerCopies::take_turn(int64_t layer) {
  Layer& own = layers_.at(layer);
  return std::exchange(own.is_stale, false) && !own.tensors.empty();
}

}  // namespace tessera
