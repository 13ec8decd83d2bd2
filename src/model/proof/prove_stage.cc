#include "model/proof/prove_stage.h"

#include <algorithm>

namespace tessera {
namespace {

using Kind = ShardState::Kind;

bool is_tp(RankAxis axis) {
  return axis == RankAxis::kTpCopies || axis == RankAxis::kTpParts;
}

/// Of dense axes: `in_batch` among the ranks that share a micro-batch, `across` between
/// micro-batches.
Sharding by_batch(const RankAxes& axes, const ShardState& in_batch, const ShardState& across) {
  Sharding result;
  for (const RankAxis axis : axes.of(Factoring::kDense))
    result.along(axis) = axis == RankAxis::kDp ? across : in_batch;
  result.set_known(Factoring::kDense);
  axes.complete(result);
  return result;
}

/// The tokens of a tensor-parallel group.
Sharding group_tokens(const RankAxes& axes) {
  Sharding result = axes.own_tokens();
  for (const RankAxis axis : axes.of(Factoring::kDense))
    if (is_tp(axis)) result.along(axis) = ShardState::replicated();
  result.experts = false;
  axes.complete(result);
  return result;
}

/// Along which dim a slice is a part; -1 where it is whole.
int cut_dim(const Slice& slice) {
  const Shape shape = slice.shape();
  for (int dim = 0; dim < shape.rank(); ++dim)
    if (shape[dim] != slice.global[dim]) return dim;
  return -1;
}

Sharding expert_sharding(const RankAxes& axes) {
  Sharding result;
  if (axes.degree(RankAxis::kEp) > 1) result.along(RankAxis::kEp) = ShardState::by_expert(0);
  if (axes.degree(RankAxis::kEtp) > 1) result.along(RankAxis::kEtp) = ShardState::sharded(0);
  result.set_known(Factoring::kExperts);
  return result;
}

/// Whether `part` of `parts` equal ones, or ones that differ by one, has that many of them all.
bool is_share(int64_t part, int64_t all, int64_t parts) {
  return part >= all / parts && part <= (all + parts - 1) / parts;
}

Sharding dense_sharding(const std::string& name, const WeightPlacement& placement,
                        const RankAxes& axes, ShardingFaults& faults) {
  const int64_t tp = axes.degree(RankAxis::kTpCopies) * axes.degree(RankAxis::kTpParts);
  const int dim = cut_dim(placement.slice);
  Sharding result;
  result.set_known(Factoring::kDense);
  const int64_t parts = std::max<int64_t>(tp / std::max<int64_t>(placement.tp_copies, 1), 1);
  const bool along_axes = placement.tp_copies == 1 || placement.tp_copies == tp ||
                          placement.tp_copies == axes.degree(RankAxis::kTpCopies);
  const Slice& slice = placement.slice;
  const bool fits = dim < 0 ? parts == 1 : is_share(slice.shape()[dim], slice.global[dim], parts);
  if (!along_axes || !fits) {
    faults.push_back(
        fmt::format("weight '{}' is {}, but is said to be the same on {} neighbours of TP {}", name,
                    slice.to_string(), placement.tp_copies, tp));
    return result;
  }
  for (const RankAxis axis : axes.of(Factoring::kDense)) {
    const bool same =
        !is_tp(axis) || parts == 1 || (axis == RankAxis::kTpCopies && placement.tp_copies > 1);
    if (!same) result.along(axis) = ShardState::sharded(dim);
  }
  return result;
}

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

class Prover {
 public:
  Prover(const ProgramParts& parts, const RankAxes& axes, const StageGroups& groups,
         StageProof& proof)
      : parts_(parts), axes_(axes), groups_(groups), proof_(proof) {}

  void run() {
    prove_forward();
    for (size_t i = 0; i < parts_.backwards.size(); ++i) prove_backward(i);
  }

 private:
  void keep(const Program& program, const char* direction, InferredShardings found) {
    auto& faults = proof_.faults;
    faults.insert(faults.end(), found.faults.begin(), found.faults.end());
    proof_.programs.push_back(
        {fmt::format("{}, {}", program.name(), direction), program, std::move(found.values)});
  }

  /// Of weights, the transpose of which their gradients' are.
  Sharding of_weight(ValueId id) {
    const std::string& name = parts_.forward.value(id).name;
    const auto placement = parts_.layout.placements.find(name);
    if (placement != parts_.layout.placements.end())
      return weight_sharding(name, placement->second, axes_, proof_.faults);
    proof_.faults.push_back(fmt::format("weight '{}' has no placement", name));
    return axes_.whole();
  }

  Sharding of_gradient(ValueId weight) {
    const Sharding sharding = of_weight(weight).dual();
    const std::string& name = parts_.forward.value(weight).name;
    const auto placement = parts_.layout.placements.find(name);
    if (placement != parts_.layout.placements.end()) add_summed(name, placement->second, sharding);
    return sharding;
  }

  void add_summed(const std::string& name, const WeightPlacement& placement,
                  const Sharding& gradient) {
    SummedWeight weight{
        .name = name, .expert = placement.expert, .tp_copies = placement.tp_copies, .axes = {}};
    for (const RankAxis axis :
         axes_.of(placement.expert ? Factoring::kExperts : Factoring::kDense)) {
      if (gradient.along(axis).is(Kind::kPartial)) weight.axes.insert(axis);
    }
    const bool is_known = std::ranges::find(proof_.weights, weight) != proof_.weights.end();
    if (!is_known) proof_.weights.push_back(std::move(weight));
  }

  void prove_forward() {
    const Program& program = parts_.forward;
    std::map<ValueId, Sharding> bound;
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const ValueKind kind = program.value(id).kind;
      if (kind == ValueKind::kWeight) bound[id] = of_weight(id);
      if (kind == ValueKind::kInput)
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
  return parts;
}

}  // namespace

Sharding port_sharding(Port port, const RankAxes& axes, const StageGroups& groups) {
  switch (port) {
    case Port::kHidden:
    case Port::kHiddenOut:
    case Port::kEmbedded:
    case Port::kLabels:
    case Port::kTokenLoss:
    case Port::kLogits:
    case Port::kSegments:
      return axes.own_tokens();
    case Port::kPositions:
      return groups.policy.replicated_attention ? axes.own_tokens() : group_tokens(axes);
    case Port::kTokens:
    case Port::kGatheredLabels:
      return group_tokens(axes);
    case Port::kCuSeqlens:
    case Port::kTokenOrder:
      return by_batch(axes, ShardState::replicated(), ShardState::varying());
    case Port::kLoss:
    case Port::kBalanceLoss:
    case Port::kZLoss:
    case Port::kScoreMeans:
    case Port::kCounts:
      return by_batch(axes, ShardState::partial(), ShardState::partial());
    case Port::kDropped:
      return by_batch(axes, ShardState::varying(), ShardState::varying());
    case Port::kLossScale:
    case Port::kExpertBias:
    case Port::kEarlierCounts:
    case Port::kCountsSoFar:
    case Port::kStart:
    case Port::kCacheLength:
    case Port::kKeyCache:
    case Port::kValueCache:
      break;
  }
  return axes.whole();
}

Sharding weight_sharding(const std::string& name, const WeightPlacement& placement,
                         const RankAxes& axes, ShardingFaults& faults) {
  Sharding result =
      placement.expert ? expert_sharding(axes) : dense_sharding(name, placement, axes, faults);
  const bool cut = std::ranges::any_of(result.states, &ShardState::is_cut);
  if (!cut) axes.complete(result);
  return result;
}

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
  for (const auto& [key, kind] : stage.kinds)
    prove_program(parts_of(kind->layout, kind->derived), axes, groups, proof);
  for (const HeadPasses& head : stage.heads)
    prove_program(parts_of(head.layout, head.derived), axes, groups, proof);
  if (stage.evaluation_head) {
    prove_program({.layout = stage.evaluation_layout, .forward = stage.evaluation_head->program()},
                  axes, groups, proof);
  }
  return proof;
}

}  // namespace tessera
