#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/proof/proof_testing.h"
#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/collective/head_exchange.h"
#include "ops/collective/ragged_collective.h"
#include "ops/expert_clones/clone_weights.h"
#include "ops/linear/linear.h"
#include "ops/repeat_heads/repeat_heads.h"

/// Programs with one mistake each, of the kinds that are silent elsewhere: they run, and train.
namespace tessera::testing {

/// A trained program of a stage that can be changed.
struct LooseProgram {
  ModelProgram layout;
  std::vector<Program>
      programs;  ///< forward, backward, and the weights' part where it is split off
  std::vector<Backward> links;
  std::vector<KeptValue> kept;

  LooseProgram(const ModelProgram& built, const DerivedProgram& derived)
      : layout(built),
        programs{derived.forward.program(), derived.backward.program()},
        links{derived.derived} {
    if (!derived.weights) return;
    programs.push_back(derived.weights->program.program());
    links.push_back(derived.weights->derived);
    kept = derived.weights->kept;
  }
  ShardingFaults prove(const RankAxes& axes, const StageGroups& groups) const {
    ProgramParts parts{.layout = layout, .forward = programs[0], .kept = kept};
    for (size_t i = 0; i < links.size(); ++i)
      parts.backwards.push_back({programs[i + 1], links[i]});
    StageProof proof;
    prove_program(parts, axes, groups, proof);
    return proof.faults;
  }
};

/// Makes every mistake that can be made in one place of a program, and calls `visit` with what it
/// is and the program that has it: an exchange is left out, made twice or made in another group;
/// something whole is added before a reduction; a weight's gradient is made of the tokens of
/// another extent; a weight is told to be the same on more or fewer ranks. Those that change
/// nothing, such as another group of the same ranks, are left out.
class Mutator {
 public:
  using Visit = std::function<void(const std::string&, const LooseProgram&)>;

  Mutator(const LooseProgram& original, const StageGroups& groups, const RankAxes& axes,
          Visit visit)
      : original_(original), groups_(groups), axes_(axes), visit_(std::move(visit)) {}

  void run() {
    for (size_t i = 0; i < original_.programs.size(); ++i) {
      for (size_t node = 0; node < original_.programs[i].nodes().size(); ++node) {
        mutate_exchange(i, node);
        mutate_wgrad(i, node);
      }
    }
    mutate_placements();
  }

 private:
  void visit(size_t idx, size_t node, const std::string& what, Program program) {
    LooseProgram mutant = original_;
    const Node& changed = original_.programs[idx].nodes()[node];
    const std::string name = original_.programs[idx].value(changed.outputs[0]).name;
    mutant.programs[idx] = std::move(program);
    visit_(
        fmt::format("{}, {} '{}': {}", mutant.programs[idx].name(), changed.op->name(), name, what),
        mutant);
  }

  /// The program with another node in place of one, and before it those that `insert` adds at the
  /// end of the program.
  template <typename Change>
  void replace(size_t idx, size_t place, const std::string& what, Change change) {
    Program program = original_.programs[idx];
    const size_t size = program.nodes().size();
    Node node = program.nodes()[place];
    try {
      change(program, node);
    } catch (const UserError&) {
      return;  // what the shapes show is not silent
    }
    std::vector<Node> nodes = program.nodes();
    const auto middle = nodes.begin() + static_cast<std::ptrdiff_t>(size);
    std::vector<Node> added(middle, nodes.end());
    nodes.erase(middle, nodes.end());
    nodes[place] = node;
    nodes.insert(nodes.begin() + static_cast<std::ptrdiff_t>(place), added.begin(), added.end());
    visit(idx, place, what, program.with_nodes(std::move(nodes)));
  }

  void mutate_exchange(size_t idx, size_t place) {
    const Node& node = original_.programs[idx].nodes()[place];
    const auto* exchange = dynamic_cast<const CollectiveOperator*>(node.op.get());
    if (exchange == nullptr) return;
    const std::vector<RankAxis>& own = *axes_.find(exchange->comm());
    if (own.empty()) return;
    replace(idx, place, "left out", [](Program&, Node& n) {
      if (moves_clones(*n.op)) user_error("slots are not as many as experts");
      n.op = make_sum_heads(1, 1);  // gives what it reads
      n.inputs.resize(1);
    });
    replace(idx, place, "of what is summed already", [&](Program& program, Node& n) {
      n.inputs[0] =
          program.add1(make_all_reduce_constant(exchange->comm_ptr()), {n.inputs[0]}, "sum");
    });
    for (const CommunicatorPtr& group :
         {groups_.tp, groups_.ring, groups_.heads, groups_.micro_batch, groups_.dp, groups_.etp,
          groups_.ep, groups_.experts}) {
      if (*axes_.find(*group) == own || group->ranks() == exchange->comm().ranks()) continue;
      replace(idx, place, fmt::format("in group {}", group->name()),
              [&](Program&, Node& n) { n.op = with_group(*n.op, group); });
    }
    if (node.op->name() == "reduce_scatter") mutate_reduction(idx, place, exchange->comm_ptr());
  }

  static bool moves_clones(const Operator& op) {
    return op.name() == CloneWeights::kName || op.name() == ReturnClones::kName;
  }

  static OperatorPtr clones_in_group(CloneSlots slots, bool back, const CommunicatorPtr& group) {
    if (group->size() != slots.num_ranks) user_error("slots of another number of ranks");
    slots.rank = group->rank();
    return back ? std::make_shared<ReturnClones>(group, slots) : make_clone_weights(group, slots);
  }

  static OperatorPtr with_group(const Operator& op, const CommunicatorPtr& group) {
    const std::string_view name = op.name();
    if (const auto* clones = dynamic_cast<const CloneWeights*>(&op))
      return clones_in_group(clones->slots(), false, group);
    if (const auto* clones = dynamic_cast<const ReturnClones*>(&op))
      return clones_in_group(clones->slots(), true, group);
    if (name == "all_gather") return make_all_gather(group);
    if (name == "reduce_scatter") return make_reduce_scatter(group);
    if (name == "all_reduce_constant") return make_all_reduce_constant(group);
    if (name == "all_to_all") return make_all_to_all(group);
    if (const auto* heads = dynamic_cast<const HeadExchange*>(&op)) {
      return name == "gather_heads" ? make_gather_heads(group, heads->num_heads())
                                    : make_scatter_heads(group, heads->num_heads());
    }
    const int64_t rows = dynamic_cast<const RaggedCollective&>(op).max_rows();
    if (name == "all_to_all_v") return make_all_to_all_v(group, rows);
    if (name == "all_gather_v") return make_all_gather_v(group, rows);
    return make_reduce_scatter_v(group, rows);
  }

  /// The first value of that kind and type; throws UserError where there is none.
  static ValueId find_value(const Program& program, ValueKind kind, const ValueType& type) {
    for (ValueId id = 0; id < program.num_values(); ++id) {
      if (program.value(id).kind == kind && program.type(id) == type) return id;
    }
    user_error("nothing to add");
  }

  /// Residuals and biases that are added to partial sums count once for each rank.
  void mutate_reduction(size_t idx, size_t place, const CommunicatorPtr& group) {
    const Program& before = original_.programs[idx];
    const ValueType type = before.type(before.nodes()[place].outputs[0]);
    replace(idx, place, "of a sum with what is whole", [&](Program& program, Node& n) {
      const ValueId given = find_value(before, ValueKind::kInput, type);
      const ValueId all = program.add1(make_all_gather(group), {given}, "all");
      n.inputs[0] = program.add1(make_add(), {n.inputs[0], all}, "sum");
    });
    replace(idx, place, "of a sum with a bias", [&](Program& program, Node& n) {
      const ValueId bias =
          find_value(before, ValueKind::kWeight, {DType::kF32, {type.shape.last()}});
      n.inputs[0] = program.add1(make_add_bias(), {n.inputs[0], bias}, "biased");
    });
  }

  /// Of a rank's own tokens where its gradient is of the group's, or the reverse.
  void mutate_wgrad(size_t idx, size_t place) {
    const Program& before = original_.programs[idx];
    if (dynamic_cast<const LinearWgrad*>(before.nodes()[place].op.get()) == nullptr) return;
    for (size_t earlier = 0; earlier < place; ++earlier) {
      const Node& other = before.nodes()[earlier];
      const auto* gather = dynamic_cast<const AllGather*>(other.op.get());
      if (gather == nullptr || axes_.find(gather->comm())->empty()) continue;
      for (const auto input : {LinearWgrad::kX, LinearWgrad::kGrad}) {
        if (before.nodes()[place].inputs[input] != other.outputs[0]) continue;
        replace(idx, place, "of own tokens alone",
                [&](Program&, Node& n) { n.inputs[input] = other.inputs[0]; });
      }
    }
  }

  void mutate_placements() {
    for (const auto& [name, placement] : original_.layout.placements) {
      const auto change = [&, &key = name](const std::string& what, auto set) {
        LooseProgram mutant = original_;
        set(mutant.layout.placements.at(key));
        visit_(fmt::format("weight '{}': {}", key, what), mutant);
      };
      const int64_t tp = groups_.tp->size();
      if (tp > 1 && !placement.expert) {
        const int64_t other = placement.tp_copies == 1 ? tp : 1;
        change(fmt::format("the same on {} neighbours", other),
               [&](WeightPlacement& p) { p.tp_copies = other; });
      }
      if (placement.expert && groups_.experts->size() > 1)
        change("held by the dense layout", [](WeightPlacement& p) { p.expert = false; });
      if (!placement.expert && groups_.experts->size() > 1)
        change("held by the experts' layout", [](WeightPlacement& p) { p.expert = true; });
    }
  }

  const LooseProgram& original_;
  const StageGroups& groups_;
  const RankAxes& axes_;
  Visit visit_;
};

}  // namespace tessera::testing
