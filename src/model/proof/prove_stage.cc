#include "model/proof/prove_stage.h"

#include <algorithm>

#include "model/proof/bound_sharding.h"
#include "program/rounding/delayed_roundings.h"

namespace tessera {
namespace {

using Kind = ShardState::Kind;

/// Statistics are summed over a micro-batch's ranks; of the micro-batches each has its own, which
/// no rank adds up, and both is right to say along DP.
bool is_statistic(Port port) {
  switch (port) {
    case Port::kBalanceLoss:
    case Port::kZLoss:
    case Port::kScoreMeans:
    case Port::kCounts:
      return true;
    default:
      return false;
  }
}

bool is_stash(const std::string& name) {
  return name == kStashPages || name == kStashFree || name == kStashState;
}

class Prover {
 public:
  Prover(const ProgramParts& parts, const RankAxes& axes, const StageGroups& groups,
         StageProof& proof)
      : parts_(parts), axes_(axes), groups_(groups), proof_(proof) {}

  void run() {
    if (parts_.copies != nullptr) prove_copies();
    prove_forward();
    for (size_t i = 0; i < parts_.backwards.size(); ++i) prove_backward(i);
  }

 private:
  void keep(const Program& program, const char* direction, InferredShardings found) {
    auto& faults = proof_.faults;
    faults.insert(faults.end(), found.faults.begin(), found.faults.end());
    proof_.programs.push_back({fmt::format("{}, {}", program.name(), direction), program,
                               std::move(found.values), axes_});
  }

  /// Of weights, the transpose of which their gradients' are.
  Sharding of_weight(const std::string& name) {
    const auto placement = parts_.layout.placements.find(name);
    if (placement != parts_.layout.placements.end())
      return weight_sharding(name, placement->second, axes_, proof_.faults);
    proof_.faults.push_back(fmt::format("weight '{}' has no placement", name));
    return axes_.whole();
  }

  Sharding of_gradient(ValueId weight) {
    const std::string& name = parts_.forward.value(weight).name;
    const Sharding sharding = of_weight(name).dual();
    const auto placement = parts_.layout.placements.find(name);
    if (placement != parts_.layout.placements.end()) add_summed(name, placement->second, sharding);
    return sharding;
  }

  void add_summed(const std::string& name, const WeightPlacement& placement,
                  const Sharding& gradient) {
    SummedWeight weight{.name = name,
                        .expert = placement.expert,
                        .tp_copies = placement.tp_copies,
                        .kv_heads = axes_.kv_heads(),
                        .axes = {}};
    for (const RankAxis axis :
         axes_.of(placement.expert ? Factoring::kExperts : Factoring::kDense)) {
      if (gradient.along(axis).is(Kind::kPartial)) weight.axes.insert(axis);
    }
    const bool is_known = std::ranges::find(proof_.weights, weight) != proof_.weights.end();
    if (!is_known) proof_.weights.push_back(std::move(weight));
  }

  void prove_copies() {
    const Program& program = *parts_.copies;
    std::map<ValueId, Sharding> bound;
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const Value& value = program.value(id);
      if (value.kind == ValueKind::kWeight) bound[id] = of_weight(value.name);
    }
    InferredShardings found = infer_shardings(program, bound, axes_);
    for (const ValueId id : program.outputs()) copies_[program.value(id).name] = found.values[id];
    keep(program, "weights in FP8", std::move(found));
  }

  /// Of inputs that are copies, and what delayed scales and a stash are bound to.
  void bind_copies(const Program& program, std::map<ValueId, Sharding>& bound) const {
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const std::string& name = program.value(id).name;
      const bool is_scale = name == kScalesName || name == kGradScalesName || name == kTallyName;
      if (is_scale || is_stash(name)) bound[id] = axes_.whole();
      const auto copy = copies_.find(name);
      if (copy != copies_.end()) bound[id] = copy->second;
    }
  }

  void prove_forward() {
    const Program& program = parts_.forward;
    std::map<ValueId, Sharding> bound;
    bind_copies(program, bound);
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const Value& value = program.value(id);
      if (value.kind == ValueKind::kWeight) bound[id] = of_weight(value.name);
      if (value.kind == ValueKind::kInput && !bound.contains(id))
        bound[id] = port_sharding(parts_.layout.ports.port_of(id), axes_, groups_);
    }
    for (const Link& link : parts_.layout.accumulators)
      bound[link.backward] = of_gradient(link.forward);
    InferredShardings found = infer_shardings(program, bound, axes_);
    for (const ValueId id : program.outputs()) check_output(id, found);
    forward_ = found.values;
    keep(program, parts_.backwards.empty() ? "evaluation" : "forward", std::move(found));
  }

  void check_output(ValueId id, InferredShardings& found) {
    const Port port = parts_.layout.ports.port_of(id);
    if (!is_checked(port, id)) return;
    const Sharding& given = found.values[id];
    Sharding expected = port_sharding(port, axes_, groups_);
    if (is_statistic(port) && given.along(RankAxis::kDp).is(Kind::kVarying)) {
      expected.along(RankAxis::kDp) = ShardState::varying();
      expected.experts = false;
    }
    require_sharding(parts_.forward, id, given, expected, axes_, found.faults);
  }

  /// A router's own balance loss means nothing where another is asked for; what was dropped is
  /// counted only.
  bool is_checked(Port port, ValueId id) const {
    if (port == Port::kDropped) return false;
    if (port != Port::kBalanceLoss && port != Port::kScoreMeans) return true;
    return std::ranges::any_of(parts_.backwards, [&](const ProgramParts::Backwards& part) {
      return std::ranges::find(part.links.grad_outputs, id, &Link::forward) !=
             part.links.grad_outputs.end();
    });
  }

  void prove_backward(size_t part) {
    const auto& [program, links] = parts_.backwards[part];
    std::map<ValueId, Sharding> bound;
    bind_copies(program, bound);
    for (const auto* shared : {&links.saved, &links.bound})
      for (const Link& link : *shared) bound[link.backward] = forward_[link.forward];
    for (const Link& link : links.grad_outputs) {
      const Port port = parts_.layout.ports.port_of(link.forward);
      bound[link.backward] = port_sharding(port, axes_, groups_).dual();
    }
    for (const Link& link : links.accumulators) bound[link.backward] = of_gradient(link.forward);
    if (part > 0) {
      for (const KeptValue& kept : parts_.kept)
        bound[kept.weight_part] = backward_[kept.input_part];
    }
    InferredShardings found = infer_shardings(program, bound, axes_);
    for (const Link& link : links.grad_inputs) {
      require_sharding(program, link.backward, found.values[link.backward],
                       forward_[link.forward].dual(), axes_, found.faults);
    }
    backward_ = found.values;
    keep(program, part == 0 ? "backward" : "weight gradients", std::move(found));
  }

  const ProgramParts& parts_;
  const RankAxes& axes_;
  const StageGroups& groups_;
  StageProof& proof_;
  std::map<std::string, Sharding> copies_;
  Shardings forward_;
  Shardings backward_;
};

ProgramParts parts_of(const ModelProgram& layout, const DerivedProgram& derived) {
  ProgramParts parts{.layout = layout, .forward = derived.forward.program()};
  parts.backwards.push_back({derived.backward.program(), derived.derived});
  if (derived.weights) {
    parts.backwards.push_back({derived.weights->program.program(), derived.weights->derived});
    parts.kept = derived.weights->kept;
  }
  if (derived.weight_copies) parts.copies = &derived.weight_copies->program();
  return parts;
}

}  // namespace

void prove_program(const ProgramParts& parts, const RankAxes& axes, const StageGroups& groups,
                   StageProof& proof) {
  Prover(parts, axes, groups, proof).run();
}

StageProof prove_stage(const StagePrograms& stage) {
  const StageGroups& groups = stage.part.groups;
  const RankAxes axes(groups, stage.config.kv_heads());
  StageProof proof;
  if (stage.embedding)
    prove_program(parts_of(stage.embedding_layout, *stage.embedding), axes, groups, proof);
  for (const auto& [key, kind] : stage.kinds) {
    const RankAxes own(groups, stage.config.of_layer(key.kind).kv_heads());
    prove_program(parts_of(kind->layout, kind->derived), own, groups, proof);
  }
  for (const HeadPasses& head : stage.heads)
    prove_program(parts_of(head.layout, head.derived), axes, groups, proof);
  if (stage.evaluation_head) {
    prove_program({.layout = stage.evaluation_layout, .forward = stage.evaluation_head->program()},
                  axes, groups, proof);
  }
  return proof;
}

}  // namespace tessera
