#include "program/compile/recompute.h"

#include <algorithm>
#include <map>
#include <set>

#include "ops/tallies.h"
#include "program/import.h"

namespace tessera {
namespace {

/// An operator that runs a second time: what it sees was counted the first time.
OperatorPtr repeated(const OperatorPtr& op) {
  const auto* tallies = dynamic_cast<const Tallies*>(op.get());
  return tallies == nullptr ? op : tallies->without_tally();
}

/// Copies a backward program node by node, putting forward nodes in front of the first use of a
/// dropped value.
class Recomputer {
 public:
  Recomputer(const Program& forward, const Backward& old, const std::vector<ValueId>& dropped)
      : forward_(forward),
        old_(old),
        dropped_(dropped.begin(), dropped.end()),
        result_{Program(old.program.name()), {}, {}, {}, {}, {}},
        importer_(forward, result_) {
    for (const Node& node : forward.nodes()) {
      for (const ValueId id : node.outputs) producer_[id] = &node;
    }
    for (const Link& link : old.saved) forward_of_[link.backward] = link.forward;
    for (const Link& link : old.bound) forward_of_[link.backward] = link.forward;
  }

  Backward run() {
    copy_links(old_.grad_outputs, result_.grad_outputs);
    for (const Node& node : old_.program.nodes()) copy_node(node);
    copy_links(old_.grad_inputs, result_.grad_inputs);
    std::vector<ValueId> outputs;
    for (const ValueId id : old_.program.outputs()) outputs.push_back(translate(id));
    result_.program.set_outputs(std::move(outputs));
    return std::move(result_);
  }

 private:
  void copy_links(const std::vector<Link>& from, std::vector<Link>& to) {
    for (const Link& link : from) to.push_back({link.forward, translate(link.backward)});
  }

  /// The new program's value for a value of the old backward program.
  ValueId translate(ValueId id) {
    const auto forward_value = forward_of_.find(id);
    if (forward_value != forward_of_.end()) return obtain(forward_value->second);
    const auto found = translated_.find(id);
    if (found != translated_.end()) return found->second;
    const Value& value = old_.program.value(id);
    ensure(value.kind != ValueKind::kIntermediate, "recompute: '{}' is used before it is made",
           value.name);
    const ValueType type = translate_type(value.type);
    const ValueId copy = value.kind == ValueKind::kAccumulator
                             ? add_accumulator(id, value.name, type)
                             : result_.program.add_input(value.name, type);
    translated_[id] = copy;
    return copy;
  }

  ValueId add_accumulator(ValueId old_id, const std::string& name, const ValueType& type) {
    const ValueId copy = result_.program.add_accumulator(name, type);
    for (const Link& link : old_.accumulators) {
      if (link.backward == old_id) result_.accumulators.push_back({link.forward, copy});
    }
    return copy;
  }

  ValueType translate_type(ValueType type) {
    if (type.ragged()) type.extent = translate(type.extent.value());
    return type;
  }

  /// A forward value in the new program: kept, or computed again.
  ValueId obtain(ValueId id) {
    const bool is_intermediate = forward_.value(id).kind == ValueKind::kIntermediate;
    if (importer_.knows(id) || !is_intermediate || is_kept(id)) return importer_.import(id);
    const Node& node = *producer_.at(id);
    require(node.op->recomputable(),
            "recompute: '{}' comes from operator '{}', which may not run twice; keep it",
            forward_.value(id).name, node.op->name());
    std::vector<ValueId> inputs;
    for (const ValueId input : node.inputs) inputs.push_back(obtain(input));
    std::vector<std::string> names;
    for (const ValueId output : node.outputs) names.push_back(forward_.value(output).name);
    const auto outputs = result_.program.add(repeated(node.op), std::move(inputs), names);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!is_kept(node.outputs[i])) importer_.provide(node.outputs[i], outputs[i]);
    }
    return importer_.import(id);
  }

  /// Kept values: those the old program read and that are not dropped, and what may not be computed
  /// twice.
  bool is_kept(ValueId id) const {
    if (dropped_.contains(id)) return false;
    const bool was_saved =
        std::ranges::any_of(old_.saved, [&](const Link& link) { return link.forward == id; });
    return was_saved || !producer_.at(id)->op->recomputable();
  }

  /// Unless it makes what is a value of the forward program.
  void copy_node(const Node& node) {
    if (std::ranges::all_of(node.outputs, [&](ValueId id) { return forward_of_.contains(id); }))
      return;
    std::vector<ValueId> inputs;
    for (const ValueId id : node.inputs) inputs.push_back(translate(id));
    std::vector<ValueId> accumulators;
    std::vector<std::string> names;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.op->accumulates(static_cast<int>(i)))
        accumulators.push_back(translate(node.outputs[i]));
      names.push_back(old_.program.value(node.outputs[i]).name);
    }
    const auto outputs = result_.program.add(node.op, std::move(inputs), names, accumulators);
    for (size_t i = 0; i < outputs.size(); ++i) translated_[node.outputs[i]] = outputs[i];
  }

  const Program& forward_;
  const Backward& old_;
  std::set<ValueId> dropped_;
  Backward result_;
  ForwardImporter importer_;
  std::map<ValueId, const Node*> producer_;
  std::map<ValueId, ValueId> forward_of_;
  std::map<ValueId, ValueId> translated_;
};

bool may_run_twice(const Program& program, ValueId id) {
  for (const Node& node : program.nodes()) {
    if (std::ranges::find(node.outputs, id) != node.outputs.end()) return node.op->recomputable();
  }
  return false;
}

}  // namespace

Backward recompute(const Program& forward, const Backward& backward,
                   const std::vector<ValueId>& dropped) {
  return Recomputer(forward, backward, dropped).run();
}

bool is_dropped(const Program& forward, ValueId id, const RecomputePolicy& policy) {
  const bool listed = std::ranges::find(policy, forward.value(id).name) != policy.end();
  const bool all = std::ranges::find(policy, "all") != policy.end();
  return listed || (all && may_run_twice(forward, id));
}

std::vector<ValueId> choose_dropped(const Program& forward, const Backward& backward,
                                    const RecomputePolicy& policy) {
  std::vector<ValueId> dropped;
  for (const Link& link : backward.saved) {
    if (is_dropped(forward, link.forward, policy)) dropped.push_back(link.forward);
  }
  return dropped;
}

}  // namespace tessera
