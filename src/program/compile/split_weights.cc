#include "program/compile/split_weights.h"

#include <algorithm>
#include <map>

#include "program/dependencies.h"
#include "program/import.h"

namespace tessera {
namespace {

/// For each node, whether it stays in the input part.
std::vector<bool> find_input_part(const Program& program) {
  IdVector<ValueId, bool> needed(program.num_values(), false);
  std::vector<bool> stays(program.nodes().size(), false);
  const auto need = [&](ValueId id) { needed[id] = true; };
  std::ranges::for_each(program.outputs(), need);
  // An accumulator that becomes needed brings in nodes on both sides, so one pass may not do.
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t idx = stays.size(); idx-- > 0;) {
      const NodeAccess access = find_access(program, program.nodes()[idx]);
      const bool wanted =
          std::ranges::any_of(access.writes, [&](ValueId id) { return needed[id]; });
      if (stays[idx] || !wanted) continue;
      stays[idx] = changed = true;
      std::ranges::for_each(access.reads, need);
      std::ranges::for_each(access.writes, need);
    }
  }
  return stays;
}

/// Copies some nodes of a backward program into a new one.
class PartBuilder {
 public:
  PartBuilder(const Backward& whole, const std::string& suffix)
      : whole_(whole), part_{Program(whole.program.name() + suffix), {}, {}, {}, {}, {}} {}

  /// The part's value for a value of the whole program; made on first use.
  ValueId translate(ValueId id) {
    const auto found = translated_.find(id);
    if (found != translated_.end()) return found->second;
    const Value& value = whole_.program.value(id);
    const ValueType type = translate_type(value.type);
    const ValueId copy = add_bound(value, type);
    translated_[id] = copy;
    if (value.kind == ValueKind::kIntermediate) foreign_.push_back({id, copy});
    for (const auto member :
         {&Backward::saved, &Backward::bound, &Backward::grad_outputs, &Backward::accumulators}) {
      copy_link(whole_.*member, id, copy, part_.*member);
    }
    return copy;
  }

  void add(const Node& node) {
    const auto outputs = copy_node(part_.program, whole_.program, node,
                                   [this](ValueId id) { return translate(id); });
    for (size_t i = 0; i < outputs.size(); ++i) translated_[node.outputs[i]] = outputs[i];
  }

  void set_outputs() {
    std::vector<ValueId> outputs;
    for (const ValueId id : whole_.program.outputs()) outputs.push_back(translate(id));
    part_.program.set_outputs(std::move(outputs));
    for (const Link& link : whole_.grad_inputs)
      part_.grad_inputs.push_back({link.forward, translate(link.backward)});
  }

  /// Values of the whole program that no node of this part makes (forward), as its inputs
  /// (backward).
  const std::vector<Link>& foreign() const { return foreign_; }
  Backward take() { return std::move(part_); }

 private:
  ValueType translate_type(ValueType type) {
    if (type.ragged()) type.extent = translate(type.extent.value());
    return type;
  }

  ValueId add_bound(const Value& value, const ValueType& type) {
    if (value.kind == ValueKind::kWeight) return part_.program.add_weight(value.name, type);
    if (value.kind == ValueKind::kAccumulator)
      return part_.program.add_accumulator(value.name, type);
    return part_.program.add_input(value.name, type);
  }

  static void copy_link(const std::vector<Link>& from, ValueId id, ValueId copy,
                        std::vector<Link>& to) {
    for (const Link& link : from) {
      if (link.backward == id) to.push_back({link.forward, copy});
    }
  }

  const Backward& whole_;
  Backward part_;
  std::map<ValueId, ValueId> translated_;
  std::vector<Link> foreign_;
};

}  // namespace

std::vector<ValueId> SplitBackward::kept_intermediates() const {
  std::vector<ValueId> ids;
  for (const KeptValue& value : kept) {
    const bool is_bound = input.program.value(value.input_part).kind != ValueKind::kIntermediate ||
                          input.program.is_output(value.input_part);
    if (!is_bound) ids.push_back(value.input_part);
  }
  return ids;
}

SplitBackward split_weights(const Backward& backward) {
  const std::vector<bool> stays = find_input_part(backward.program);
  PartBuilder input(backward, ".input");
  PartBuilder weight(backward, ".weight");
  for (const Link& link : backward.grad_outputs) input.translate(link.backward);
  for (size_t idx = 0; idx < stays.size(); ++idx)
    (stays[idx] ? input : weight).add(backward.program.nodes()[idx]);
  input.set_outputs();
  ensure(input.foreign().empty(), "split_weights: '{}' reads '{}', which its weight part makes",
         backward.program.name(),
         input.foreign().empty() ? "" : backward.program.value(input.foreign()[0].forward).name);
  SplitBackward result;
  for (const Link& link : weight.foreign())
    result.kept.push_back({input.translate(link.forward), link.backward});
  result.input = input.take();
  result.weight = weight.take();
  return result;
}

}  // namespace tessera
