#include "program/fusion/fuse_sums.h"

#include <algorithm>
#include <set>
#include <utility>

#include "ops/add/add.h"
#include "ops/addend.h"
#include "program/dependencies.h"
#include "program/fusion/fuse_nodes.h"

namespace tessera {
namespace {

constexpr int kNoProducer = -1;

/// Takes the sums of a program one after the other into the nodes before them.
class SumFuser {
 public:
  explicit SumFuser(const Program& program)
      : program_(program),
        nodes_(program.nodes()),
        producer_(program.num_values(), kNoProducer),
        readers_(program.num_values(), 0),
        exchanges_(program.num_values()) {
    for (const ValueId id : program.outputs()) ++readers_[id];
    for (int idx = 0; idx < std::ssize(nodes_); ++idx) look_at(idx);
  }

  Program run() {
    return fuse_nodes(program_, nodes_, [this](const Node& node) { return fuse(node); });
  }

 private:
  int& producer(ValueId id) { return producer_[id]; }
  Node& node(int idx) { return nodes_[idx]; }

  void look_at(int idx) {
    const NodeAccess access = find_access(program_, node(idx));
    std::set<int> needed;
    for (const ValueId id : access.reads) {
      ++readers_[id];
      needed.insert(exchanges_[id].begin(), exchanges_[id].end());
    }
    if (node(idx).op->communicates()) needed.insert(idx);
    for (const ValueId id : access.writes) {
      producer(id) = idx;
      exchanges_[id] = needed;
    }
  }

  /// Whether `node` is a sum that another node makes from now on.
  bool fuse(const Node& sum) {
    if (dynamic_cast<const Add*>(sum.op.get()) == nullptr) return false;
    ValueId operand = sum.inputs[0];
    ValueId addend = sum.inputs[1];
    if (producer(addend) > producer(operand)) std::swap(addend, operand);
    if (!may_be_fused(operand, addend)) return false;
    Node& maker = node(producer(operand));
    const auto* op = dynamic_cast<const TakesAddend*>(maker.op.get());
    OperatorPtr summing = op == nullptr ? nullptr : op->with_addend(program_.types(maker.inputs));
    if (summing == nullptr) return false;
    maker.op = std::move(summing);
    maker.inputs.push_back(addend);
    maker.outputs[0] = sum.outputs[0];
    producer(sum.outputs[0]) = producer(operand);
    return true;
  }

  bool may_be_fused(ValueId operand, ValueId addend) {
    if (program_.value(operand).kind != ValueKind::kIntermediate || readers_[operand] != 1 ||
        node(producer(operand)).outputs[0] != operand)
      return false;
    // What an accumulator holds depends on when it is read.
    if (producer(addend) >= producer(operand) ||
        program_.value(addend).kind == ValueKind::kAccumulator)
      return false;
    return std::ranges::includes(exchanges_[operand], exchanges_[addend]);
  }

  const Program& program_;
  std::vector<Node> nodes_;
  IdVector<ValueId, int> producer_;
  IdVector<ValueId, int> readers_;
  IdVector<ValueId, std::set<int>> exchanges_;  ///< that must be complete before the value is there
};

}  // namespace

Program fuse_sums(const Program& program) {
  return SumFuser(program).run();
}

}  // namespace tessera
