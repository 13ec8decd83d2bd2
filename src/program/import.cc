#include "program/import.h"

namespace tessera {

ValueType ForwardImporter::import_type(ValueType type) {
  if (type.ragged()) type.extent = import(type.extent.value());
  return type;
}

ValueId ForwardImporter::import(ValueId id) {
  const auto found = known_.find(id);
  if (found != known_.end()) return found->second;
  const Value& value = forward_.value(id);
  const ValueType type = import_type(value.type);
  const ValueKind kind = value.kind == ValueKind::kWeight ? ValueKind::kWeight : ValueKind::kInput;
  const ValueId imported = kind == ValueKind::kWeight
                               ? backward_.program.add_weight(value.name, type)
                               : backward_.program.add_input(value.name, type);
  auto& links = value.kind == ValueKind::kIntermediate ? backward_.saved : backward_.bound;
  links.push_back({id, imported});
  known_[id] = imported;
  return imported;
}

std::vector<ValueId> copy_node(Program& to, const Program& from, const Node& node,
                               const std::function<ValueId(ValueId)>& translate) {
  std::vector<ValueId> inputs;
  for (const ValueId id : node.inputs) inputs.push_back(translate(id));
  std::vector<ValueId> accumulators;
  std::vector<std::string> names;
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.op->accumulates(static_cast<int>(i)))
      accumulators.push_back(translate(node.outputs[i]));
    names.push_back(from.value(node.outputs[i]).name);
  }
  return to.add(node.op, std::move(inputs), names, accumulators);
}

}  // namespace tessera
