#include "program/compile/recompute.h"

#include <algorithm>
#include <map>
#include <set>

#include "ops/tallies.h"
#include "program/compile/copy_backward.h"

namespace tessera {
namespace {

/// An operator that runs a second time: what it sees was counted the first time.
OperatorPtr repeated(const OperatorPtr& op) {
  const auto* tallies = dynamic_cast<const Tallies*>(op.get());
  return tallies == nullptr ? op : tallies->without_tally();
}

/// Puts forward nodes in front of the first use of a dropped value.
class Recomputer final : public BackwardCopier {
 public:
  Recomputer(const Program& forward, const Backward& old, const std::vector<ValueId>& dropped)
      : BackwardCopier(forward, old), dropped_(dropped.begin(), dropped.end()) {
    for (const Node& node : forward.nodes()) {
      for (const ValueId id : node.outputs) producer_[id] = &node;
    }
  }

 protected:
  /// Kept, or computed again.
  ValueId obtain(ValueId id) override {
    const bool is_intermediate = forward().value(id).kind == ValueKind::kIntermediate;
    if (importer().knows(id) || !is_intermediate || is_kept(id)) return importer().import(id);
    const Node& node = *producer_.at(id);
    require(node.op->recomputable(),
            "recompute: '{}' comes from operator '{}', which may not run twice; keep it",
            forward().value(id).name, node.op->name());
    std::vector<ValueId> inputs;
    for (const ValueId input : node.inputs) inputs.push_back(obtain(input));
    std::vector<std::string> names;
    for (const ValueId output : node.outputs) names.push_back(forward().value(output).name);
    const auto outputs = program().add(repeated(node.op), std::move(inputs), names);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!is_kept(node.outputs[i])) importer().provide(node.outputs[i], outputs[i]);
    }
    return importer().import(id);
  }

 private:
  /// Kept values: those the old program read and that are not dropped, and what may not be computed
  /// twice.
  bool is_kept(ValueId id) const {
    if (dropped_.contains(id)) return false;
    const bool was_saved =
        std::ranges::any_of(old().saved, [&](const Link& link) { return link.forward == id; });
    return was_saved || !producer_.at(id)->op->recomputable();
  }

  std::set<ValueId> dropped_;
  std::map<ValueId, const Node*> producer_;
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
