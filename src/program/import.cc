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

}  // namespace tessera
