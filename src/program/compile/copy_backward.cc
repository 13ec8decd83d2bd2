#include "program/compile/copy_backward.h"

#include <algorithm>

namespace tessera {

BackwardCopier::BackwardCopier(const Program& forward, const Backward& old)
    : forward_(forward),
      old_(old),
      result_{Program(old.program.name()), {}, {}, {}, {}, {}},
      importer_(forward, result_) {
  for (const Link& link : old.saved) forward_of_[link.backward] = link.forward;
  for (const Link& link : old.bound) forward_of_[link.backward] = link.forward;
}

Backward BackwardCopier::run() {
  copy_links(old_.grad_outputs, result_.grad_outputs);
  for (const Node& node : old_.program.nodes()) copy_node(node);
  copy_links(old_.grad_inputs, result_.grad_inputs);
  std::vector<ValueId> outputs;
  for (const ValueId id : old_.program.outputs()) outputs.push_back(translate(id));
  result_.program.set_outputs(std::move(outputs));
  return std::move(result_);
}

void BackwardCopier::copy_links(const std::vector<Link>& from, std::vector<Link>& to) {
  for (const Link& link : from) to.push_back({link.forward, translate(link.backward)});
}

/// The new program's value for a value of the old backward program.
ValueId BackwardCopier::translate(ValueId id) {
  const auto forward_value = forward_of_.find(id);
  if (forward_value != forward_of_.end()) return obtain(forward_value->second);
  const auto found = translated_.find(id);
  if (found != translated_.end()) return found->second;
  const Value& value = old_.program.value(id);
  ensure(value.kind != ValueKind::kIntermediate, "program '{}': '{}' is used before it is made",
         old_.program.name(), value.name);
  const ValueType type = translate_type(value.type);
  const ValueId copy = value.kind == ValueKind::kAccumulator
                           ? add_accumulator(id, value.name, type)
                           : result_.program.add_input(value.name, type);
  translated_[id] = copy;
  return copy;
}

ValueId BackwardCopier::add_accumulator(ValueId old_id, const std::string& name,
                                        const ValueType& type) {
  const ValueId copy = result_.program.add_accumulator(name, type);
  for (const Link& link : old_.accumulators) {
    if (link.backward == old_id) result_.accumulators.push_back({link.forward, copy});
  }
  return copy;
}

ValueType BackwardCopier::translate_type(ValueType type) {
  if (type.ragged()) type.extent = translate(type.extent.value());
  return type;
}

/// Unless it makes what is a value of the forward program.
void BackwardCopier::copy_node(const Node& node) {
  if (std::ranges::all_of(node.outputs, [&](ValueId id) { return forward_of_.contains(id); }))
    return;
  const auto outputs = tessera::copy_node(result_.program, old_.program, node,
                                          [this](ValueId id) { return translate(id); });
  for (size_t i = 0; i < outputs.size(); ++i) translated_[node.outputs[i]] = outputs[i];
}

}  // namespace tessera
