#include "sharding/infer_sharding.h"

#include <algorithm>

#include "sharding/operator_rules.h"

namespace tessera {
namespace {

class Walk {
 public:
  Walk(const Program& program, const std::map<ValueId, Sharding>& bound, const RankAxes& axes)
      : program_(program), bound_(bound), axes_(axes) {
    result_.values.resize(static_cast<size_t>(program.num_values()));
    for (const auto& [id, sharding] : bound) result_.values[id] = sharding;
  }

  InferredShardings run() {
    for (const Node& node : program_.nodes()) visit(node);
    return std::move(result_);
  }

 private:
  void visit(const Node& node) {
    for (const ValueId id : node.inputs) {
      if (result_.values[id].is_known()) continue;
      const bool was_bound = program_.value(id).kind != ValueKind::kIntermediate;
      if (was_bound && !bound_.contains(id))
        result_.faults.push_back(fmt::format("{}: nobody says how value '{}' is spread",
                                             program_.name(), program_.value(id).name));
      return;
    }
    std::vector<Sharding> outputs(node.outputs.size());
    bool is_known = false;
    for (const Factoring factoring : kFactorings) {
      try {
        is_known |= infer(node, factoring, outputs);
      } catch (const ShardFault& fault) {
        result_.faults.push_back(describe(node, fault.what()));
        return;
      }
    }
    if (!is_known) {
      result_.faults.push_back(describe(
          node,
          "some of what it reads is spread over the dense axes alone, some over the experts'"));
      return;
    }
    for (size_t i = 0; i < outputs.size(); ++i) give(node, i, outputs[i]);
  }

  bool infer(const Node& node, Factoring factoring, std::vector<Sharding>& outputs) const {
    for (const ValueId id : node.inputs) {
      if (!result_.values[id].is_known(factoring)) return false;
    }
    const std::vector<ValueType> types = program_.types(node.inputs);
    std::vector<Sharding> found = outputs;
    for (const RankAxis axis : axes_.of(factoring)) {
      std::vector<ShardState> inputs;
      for (const ValueId id : node.inputs) inputs.push_back(result_.values[id].along(axis));
      const auto states = infer_along(node, types, axis, inputs);
      if (!states) return false;
      ensure(states->size() >= outputs.size(), "operator {}: a rule of {} outputs for {}",
             node.op->name(), states->size(), outputs.size());
      for (size_t i = 0; i < outputs.size(); ++i) found[i].along(axis) = (*states)[i];
    }
    for (Sharding& output : found) output.set_known(factoring);
    outputs = std::move(found);
    return true;
  }

  ShardStatesOf infer_along(const Node& node, const std::vector<ValueType>& types, RankAxis axis,
                            const std::vector<ShardState>& inputs) const {
    try {
      return infer_axis({*node.op, types, axis, inputs, axes_});
    } catch (const ShardFault& fault) {
      throw ShardFault(fmt::format("along {}: {}", rank_axis_name(axis), fault.what()));
    }
  }

  void give(const Node& node, size_t output, Sharding sharding) {
    axes_.complete(sharding);
    const ValueId id = node.outputs[output];
    if (node.op->accumulates(static_cast<int>(output)))
      return require_sharding(program_, id, sharding, result_.values[id], axes_, result_.faults);
    result_.values[id] = sharding;
  }

  std::string describe(const Node& node, std::string_view what) const {
    std::string text = fmt::format("{}: {}: {}", program_.name(), node.op->name(), what);
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      text += fmt::format("{} {} '{}' ({})", i == 0 ? "; operands" : ",", i,
                          program_.value(id).name, axes_.describe(result_.values[id]));
    }
    return text;
  }

  const Program& program_;
  const std::map<ValueId, Sharding>& bound_;
  const RankAxes& axes_;
  InferredShardings result_;
};

}  // namespace

InferredShardings infer_shardings(const Program& program, const std::map<ValueId, Sharding>& bound,
                                  const RankAxes& axes) {
  return Walk(program, bound, axes).run();
}

void require_sharding(const Program& program, ValueId id, const Sharding& found,
                      const Sharding& expected, const RankAxes& axes, ShardingFaults& faults) {
  if (!found.is_known()) return;  // what led to it is a fault already
  bool is_compared = false;
  for (const Factoring factoring : kFactorings) {
    if (!expected.is_known(factoring) || !found.is_known(factoring)) continue;
    is_compared = true;
    const bool agrees = std::ranges::all_of(axes.of(factoring), [&](RankAxis axis) {
      return found.along(axis) == expected.along(axis);
    });
    if (agrees) continue;
    faults.push_back(fmt::format("{}: '{}' is spread as {}, expected {}", program.name(),
                                 program.value(id).name, axes.describe(found),
                                 axes.describe(expected)));
    return;
  }
  if (!is_compared) {
    faults.push_back(fmt::format("{}: '{}' is spread as {}, expected {}: over other axes",
                                 program.name(), program.value(id).name, axes.describe(found),
                                 axes.describe(expected)));
  }
}

}  // namespace tessera
