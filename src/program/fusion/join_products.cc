#include "program/fusion/join_products.h"

#include <algorithm>
#include <memory>

#include "ops/linear/joined_linear.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

constexpr int kNone = -1;

class ProductJoiner {
 public:
  ProductJoiner(const Program& program, const std::vector<ValueId>& kept)
      : program_(program),
        nodes_(program.nodes()),
        gone_(program.nodes().size()),
        producer_(program.num_values(), kNone),
        readers_(program.num_values()) {
    for (const auto* ids : {&program.outputs(), &kept})
      for (const ValueId id : *ids) ++readers_[id];
    for (int idx = 0; idx < std::ssize(nodes_); ++idx) {
      for (const ValueId id : nodes_[idx].inputs) ++readers_[id];
      for (const ValueId id : nodes_[idx].outputs) producer_[id] = idx;
    }
  }

  Program run() {
    for (int idx = 0; idx < std::ssize(nodes_); ++idx) join_readers(idx);
    for (int idx = static_cast<int>(nodes_.size()) - 1; idx >= 0; --idx) {
      join_summands(idx);
      join_weights(idx);
    }
    std::vector<Node> left;
    for (size_t idx = 0; idx < nodes_.size(); ++idx)
      if (!gone_[idx]) left.push_back(std::move(nodes_[idx]));
    return program_.with_nodes(std::move(left));
  }

 private:
  bool takes(const Node& node) const {
    return std::ranges::all_of(node.inputs, [this](ValueId id) {
      const ValueType& type = program_.type(id);
      return type.dtype == DType::kBF16 && !type.ragged() && type.num_bytes() > 0;
    });
  }

  /// Whether a node multiplies rows by a weight that is there from the beginning, and does no more.
  bool is_product(int idx) const {
    const Node& node = nodes_[idx];
    const auto* op = dynamic_cast<const Linear*>(node.op.get());
    return op != nullptr && op->extra() == Linear::Extra::kNone && !gone_[idx] && takes(node) &&
           producer_[node.inputs[Linear::kWeight]] == kNone;
  }

  /// Node `first` also makes the products of later nodes that read the same rows.
  void join_readers(int first) {
    if (!is_product(first)) return;
    const ValueId x = nodes_[first].inputs[Linear::kX];
    std::vector<int64_t> features;
    std::vector<int> joined;
    for (int idx = first; idx < std::ssize(nodes_); ++idx) {
      if (!is_product(idx) || nodes_[idx].inputs[Linear::kX] != x) continue;
      features.push_back(program_.type(nodes_[idx].outputs[0]).shape[1]);
      joined.push_back(idx);
      if (joined.size() == JoinedLinear::kMost) break;
    }
    if (joined.size() < 2 ||
        !suits_joined_kernel(count_joined_tiles(program_.type(x).shape[0], features)))
      return;
    Node joint{std::make_shared<JoinedLinear>(static_cast<int>(joined.size())), {x}, {}};
    for (const int idx : joined) {
      joint.inputs.push_back(nodes_[idx].inputs[Linear::kWeight]);
      joint.outputs.push_back(nodes_[idx].outputs[0]);
      gone_[idx] = idx != first;
    }
    nodes_[first] = std::move(joint);
  }

  bool is_weight_gradient(int idx) const {
    return !gone_[idx] && takes(nodes_[idx]) &&
           dynamic_cast<const LinearWgrad*>(nodes_[idx].op.get()) != nullptr;
  }

  /// Node `last` also makes the gradients of weights that multiply the same rows.
  void join_weights(int last) {
    if (!is_weight_gradient(last)) return;
    const ValueId x = nodes_[last].inputs[LinearWgrad::kX];
    std::vector<int64_t> features;
    std::vector<int> joined;
    for (int idx = last; idx >= 0 && joined.size() < JoinedLinear::kMost; --idx) {
      if (!is_weight_gradient(idx) || nodes_[idx].inputs[LinearWgrad::kX] != x) continue;
      features.push_back(program_.type(nodes_[idx].inputs[LinearWgrad::kGrad]).shape[1]);
      joined.push_back(idx);
    }
    if (joined.size() < 2 ||
        !suits_joined_kernel(count_joined_tiles(program_.type(x).shape[0], features)))
      return;
    Node joint{std::make_shared<JoinedLinearWgrad>(static_cast<int>(joined.size())), {x}, {}};
    for (const int idx : joined) {
      joint.inputs.push_back(nodes_[idx].inputs[LinearWgrad::kGrad]);
      joint.outputs.push_back(nodes_[idx].outputs[0]);
      gone_[idx] = idx != last;
    }
    nodes_[last] = std::move(joint);
  }

  const LinearDgrad* gradient_at(int idx) const {
    return idx == kNone || gone_[idx] || !takes(nodes_[idx])
               ? nullptr
               : dynamic_cast<const LinearDgrad*>(nodes_[idx].op.get());
  }

  /// The node whose product only `idx` reads, and adds to its own; kNone: there is none.
  int summand_of(int idx) const {
    const LinearDgrad* const op = gradient_at(idx);
    if (op == nullptr || !op->addend()) return kNone;
    const ValueId addend = nodes_[idx].inputs[LinearDgrad::kAddend];
    const int maker = producer_[addend];
    return readers_[addend] == 1 && gradient_at(maker) != nullptr ? maker : kNone;
  }

  /// Node `last` also makes the products that are summed before its own.
  void join_summands(int last) {
    std::vector<int> summands = {last};
    for (int idx = summand_of(last); idx != kNone && summands.size() < JoinedLinear::kMost;
         idx = summand_of(idx))
      summands.push_back(idx);
    if (summands.size() < 2) return;
    std::ranges::reverse(summands);
    const Shape& shape = program_.type(nodes_[last].outputs[0]).shape;
    const int64_t features[] = {shape[1]};
    if (!suits_joined_kernel(count_joined_tiles(shape[0], features))) return;
    const Node& first = nodes_[summands.front()];
    const bool addend = gradient_at(summands.front())->addend();
    Node joint{std::make_shared<JoinedLinearDgrad>(static_cast<int>(summands.size()), addend),
               {},
               nodes_[last].outputs};
    for (const int idx : summands)
      joint.inputs.insert(joint.inputs.end(), nodes_[idx].inputs.begin(),
                          nodes_[idx].inputs.begin() + 2);
    if (addend) joint.inputs.push_back(first.inputs[LinearDgrad::kAddend]);
    for (const int idx : summands) gone_[idx] = idx != last;
    nodes_[last] = std::move(joint);
  }

  const Program& program_;
  std::vector<Node> nodes_;
  std::vector<bool> gone_;
  IdVector<ValueId, int> producer_;
  IdVector<ValueId, int> readers_;
};

}  // namespace

Program join_products(const Program& program, const std::vector<ValueId>& kept) {
  return ProductJoiner(program, kept).run();
}

}  // namespace tessera
