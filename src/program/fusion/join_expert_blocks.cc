#include "program/fusion/join_expert_blocks.h"

#include <algorithm>
#include <map>
#include <optional>

#include "ops/block_sparse/block_sparse.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/route_map/route_map.h"

namespace tessera {
namespace {

/// The nodes of a layer's experts, by their place in the program.
struct SparseExperts {
  size_t first;
  std::optional<size_t> bias;  ///< of what the first product makes
  size_t activation;
  size_t second;
  ValueId offsets;
};

class BlockJoiner {
 public:
  explicit BlockJoiner(const Program& program) : program_(program), nodes_(program.nodes()) {
    for (size_t idx = 0; idx < nodes_.size(); ++idx) {
      for (const ValueId id : nodes_[idx].inputs) readers_[id].push_back(idx);
      for (const ValueId id : nodes_[idx].outputs) producer_[id] = idx;
    }
  }

  Program run() {
    std::vector<ValueId> offsets;
    for (size_t idx = 0; idx < nodes_.size(); ++idx) {
      if (const auto experts = find_experts(idx)) {
        join(*experts);
        offsets.push_back(experts->offsets);
      }
    }
    if (offsets.empty()) return program_;
    std::erase_if(nodes_, [this](const Node& node) { return is_idle_topology(node); });
    std::ranges::for_each(offsets, [this](ValueId id) { drop_padding(id); });
    return program_.with_inferred_nodes(std::move(nodes_));
  }

 private:
  template <typename Op>
  const Op* op_of(size_t idx) const {
    return dynamic_cast<const Op*>(nodes_[idx].op.get());
  }

  /// The one node that reads a value nobody else needs.
  std::optional<size_t> only_reader(ValueId id) const {
    const auto found = readers_.find(id);
    if (found == readers_.end() || found->second.size() != 1 || program_.is_output(id))
      return std::nullopt;
    return found->second[0];
  }

  /// The offsets that a product's topology was made from, -1 where they are not known.
  ValueId offsets_of(const Node& product) const {
    const auto found = producer_.find(product.inputs[BlockSparseProduct::kRowOffsets]);
    if (found == producer_.end() || op_of<BlockTopologyOp>(found->second) == nullptr) return -1;
    return nodes_[found->second].inputs[0];
  }

  /// The node that adds biases to a product's sparse values.
  std::optional<size_t> find_bias(ValueId pre) const {
    const auto found = producer_.find(pre);
    if (found == producer_.end()) return std::nullopt;
    const auto* bias = op_of<ExpertBias>(found->second);
    if (bias == nullptr || !bias->is_sparse()) return std::nullopt;
    return found->second;
  }

  std::optional<SparseExperts> find_experts(size_t activation) const {
    const auto* op = op_of<BlockSparseActivation>(activation);
    if (op == nullptr) return std::nullopt;
    const ValueId pre = nodes_[activation].inputs[0];
    const std::optional<size_t> bias = find_bias(pre);
    const ValueId made = bias ? nodes_[*bias].inputs[ExpertBias::kX] : pre;
    const auto first = producer_.find(made);
    const auto second = only_reader(nodes_[activation].outputs[0]);
    if (first == producer_.end() || !second || only_reader(pre) != activation ||
        only_reader(made) != bias.value_or(activation))
      return std::nullopt;
    const auto* fc1 = op_of<BlockSparseProduct>(first->second);
    const auto* fc2 = op_of<BlockSparseProduct>(*second);
    if (fc1 == nullptr || fc2 == nullptr || !are_layers(*fc1, *fc2)) return std::nullopt;
    const Node& fc1_node = nodes_[first->second];
    const ValueId offsets = offsets_of(fc1_node);
    const ValueType& rows = program_.type(fc1_node.inputs[0]);
    const ValueType& y = program_.type(nodes_[*second].outputs[0]);
    const bool same_rows = rows.shape[0] == y.shape[0] && rows.extent == y.extent;
    if (offsets < 0 || offsets != offsets_of(nodes_[*second]) || !same_rows ||
        rows.dtype != DType::kBF16)
      return std::nullopt;
    return SparseExperts{first->second, bias, activation, *second, offsets};
  }

  /// Whether they are products of rows with experts of one size, stored by rows.
  static bool are_layers(const BlockSparseProduct& fc1, const BlockSparseProduct& fc2) {
    const BlockSparseProductSpec& first = fc1.spec();
    const BlockSparseProductSpec& second = fc2.spec();
    return first.kind == ProductKind::kSdd && !first.transpose_left && first.transpose_right &&
           second.kind == ProductKind::kDsd && !second.transpose_left && !second.transpose_right &&
           fc1.experts() != nullptr && fc2.experts() != nullptr && fc1.experts()->are_equal() &&
           fc2.experts()->are_equal();
  }

  void join(const SparseExperts& experts) {
    Node& first = nodes_[experts.first];
    Node& activation = nodes_[experts.activation];
    Node& second = nodes_[experts.second];
    const auto sizes_of = [](const Node& node) {
      return static_cast<const BlockSparseProduct&>(*node.op).experts()->values();
    };
    const auto function =
        static_cast<const BlockSparseActivation&>(*activation.op).spec().activation;
    const std::vector<int64_t> sizes = sizes_of(second);
    first = {make_grouped_matmul({.group_sizes = sizes_of(first), .side = GroupedSide::kOut}),
             {first.inputs[0], first.inputs[1], experts.offsets},
             first.outputs};
    if (experts.bias) {
      Node& bias = nodes_[*experts.bias];
      bias = {
          make_expert_bias({.sizes = static_cast<const ExpertBias&>(*bias.op).sizes().values()}),
          {bias.inputs[ExpertBias::kX], bias.inputs[ExpertBias::kBias], experts.offsets},
          bias.outputs};
    }
    activation = {
        make_expert_activation({.function = function, .expert_sizes = sizes, .apply_prob = true}),
        {activation.inputs[0], activation.inputs[1], experts.offsets},
        activation.outputs};
    second = {make_grouped_matmul({.group_sizes = sizes, .side = GroupedSide::kIn}),
              {second.inputs[0], second.inputs[1], experts.offsets},
              second.outputs};
  }

  /// Whether nobody reads the topology any more.
  bool is_idle_topology(const Node& node) const {
    if (dynamic_cast<const BlockTopologyOp*>(node.op.get()) == nullptr) return false;
    return std::ranges::none_of(node.outputs, [this](ValueId id) {
      return program_.is_output(id) || std::ranges::any_of(nodes_, [id](const Node& reader) {
               return std::ranges::find(reader.inputs, id) != reader.inputs.end();
             });
    });
  }

  /// Rows are no longer padded to blocks where none are left, unless other ranks know their bounds.
  void drop_padding(ValueId offsets) {
    const auto needs_padding = [offsets](const Node& node) {
      const bool reads = std::ranges::find(node.inputs, offsets) != node.inputs.end();
      return node.op->communicates() || (reads && node.op->name() == BlockTopologyOp::kName);
    };
    if (std::ranges::any_of(nodes_, needs_padding)) return;
    for (Node& node : nodes_) {
      const auto* map = dynamic_cast<const RouteMap*>(node.op.get());
      if (map == nullptr || map->spec().has_slots() ||
          std::ranges::find(node.outputs, offsets) == node.outputs.end())
        continue;
      RouteMapSpec spec = map->spec();
      spec.alignment = 1;
      node.op = make_route_map(spec);
    }
  }

  const Program& program_;
  std::vector<Node> nodes_;
  std::map<ValueId, std::vector<size_t>> readers_;
  std::map<ValueId, size_t> producer_;
};

}  // namespace

Program join_expert_blocks(const Program& program) {
  return BlockJoiner(program).run();
}

}  // namespace tessera
