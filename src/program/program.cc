#include "program/program.h"

#include <algorithm>

namespace tessera {
namespace {

/// Replaces an extent that is an operand of the node by the value that stands there.
ValueType resolve_extent(ValueType type, const std::vector<ValueId>& inputs,
                         const std::vector<ValueId>& outputs) {
  const Extent extent = type.extent;
  if (extent.kind() == Extent::Kind::kOwnOutput) type.extent = outputs.at(extent.index());
  if (extent.kind() == Extent::Kind::kOwnInput) type.extent = inputs.at(extent.index());
  return type;
}

}  // namespace

ValueId Program::add_value(Value value) {
  return values_.add(std::move(value));
}

ValueId Program::add_input(std::string name, const ValueType& type) {
  return add_value({std::move(name), type, ValueKind::kInput});
}

ValueId Program::add_weight(std::string name, const ValueType& type) {
  return add_value({std::move(name), type, ValueKind::kWeight});
}

ValueId Program::add_accumulator(std::string name, const ValueType& type) {
  return add_value({std::move(name), type, ValueKind::kAccumulator});
}

std::vector<ValueId> Program::add(OperatorPtr op, std::vector<ValueId> inputs,
                                  const std::vector<std::string>& names,
                                  const std::vector<ValueId>& accumulators) {
  const std::vector<ValueType> result = op->infer(types(inputs));
  std::vector<ValueId> outputs;
  size_t next_accumulator = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    if (op->accumulates(static_cast<int>(i))) {
      ensure(next_accumulator < accumulators.size(),
             "{}: output {} accumulates but no accumulator was given", op->name(), i);
      const ValueId target = accumulators[next_accumulator++];
      ensure(type(target).shape == result[i].shape && type(target).dtype == result[i].dtype,
             "{}: accumulator {} is {}, expected {}", op->name(), value(target).name,
             type(target).to_string(), result[i].to_string());
      outputs.push_back(target);
    } else {
      outputs.push_back(
          add_value({i < names.size() ? names[i] : std::string(op->name()), result[i]}));
    }
  }
  ensure(next_accumulator == accumulators.size(), "{}: {} accumulators given, {} used", op->name(),
         accumulators.size(), next_accumulator);
  for (size_t i = 0; i < outputs.size(); ++i) {
    Value& output = values_[outputs[i]];
    output.type = resolve_extent(output.type, inputs, outputs);
  }
  nodes_.push_back({std::move(op), std::move(inputs), outputs});
  return outputs;
}

ValueId Program::add1(OperatorPtr op, std::vector<ValueId> inputs, std::string name) {
  const std::string op_name(op->name());
  const auto outputs = add(std::move(op), std::move(inputs), {std::move(name)});
  ensure(outputs.size() == 1, "{} has {} outputs, expected one", op_name, outputs.size());
  return outputs[0];
}

Program Program::reordered(const std::vector<int>& order) const {
  ensure(order.size() == nodes_.size(), "program '{}': an order of {} for {} nodes", name_,
         order.size(), nodes_.size());
  std::vector<Node> nodes;
  std::vector<bool> used(nodes_.size(), false);
  for (const int idx : order) {
    nodes.push_back(nodes_.at(idx));
    ensure(!used[idx], "program '{}': node {} stands twice", name_, idx);
    used[idx] = true;
  }
  return with_nodes(std::move(nodes));
}

Program Program::with_nodes(std::vector<Node> nodes) const {
  IdVector<ValueId, bool> made(values_.size());
  for (ValueId id = 0; id < num_values(); ++id)
    made[id] = values_[id].kind != ValueKind::kIntermediate;
  const auto check_made = [&](ValueId id) {
    ensure(made[id], "program '{}': '{}' is read before it is made", name_, value(id).name);
  };
  for (const Node& node : nodes) {
    std::ranges::for_each(node.inputs, check_made);
    for (const ValueId id : node.outputs) made[id] = true;
  }
  std::ranges::for_each(outputs_, check_made);
  Program result = *this;
  result.nodes_ = std::move(nodes);
  return result;
}

Program Program::with_weight_type(ValueId weight, const ValueType& type) const {
  ensure(value(weight).kind == ValueKind::kWeight, "program '{}': '{}' is no weight", name_,
         value(weight).name);
  Program result = *this;
  result.values_[weight].type = type;
  return result;
}

Program Program::with_inferred_nodes(std::vector<Node> nodes) const {
  Program result = with_nodes(std::move(nodes));
  for (const Node& node : result.nodes_) {
    const std::vector<ValueType> types = node.op->infer(result.types(node.inputs));
    for (size_t i = 0; i < types.size(); ++i) {
      Value& output = result.values_[node.outputs[i]];
      if (output.kind == ValueKind::kIntermediate)
        output.type = resolve_extent(types[i], node.inputs, node.outputs);
    }
  }
  return result;
}

bool Program::is_output(ValueId id) const {
  return std::ranges::find(outputs_, id) != outputs_.end();
}

ValueId Program::find(std::string_view name) const {
  const auto found =
      std::ranges::find_if(values_, [&](const Value& value) { return value.name == name; });
  ensure(found != values_.end(), "program '{}' has no value '{}'", name_, name);
  return ValueId(found - values_.begin());
}

std::vector<ValueType> Program::types(const std::vector<ValueId>& ids) const {
  std::vector<ValueType> result;
  for (const ValueId id : ids) {
    ensure(id >= 0 && id < num_values(), "program '{}': value {} does not exist", name_, id);
    result.push_back(type(id));
  }
  return result;
}

Cost Program::cost() const {
  Cost total;
  for (const Node& node : nodes_) total += node.op->cost(types(node.inputs), types(node.outputs));
  return total;
}

}  // namespace tessera
