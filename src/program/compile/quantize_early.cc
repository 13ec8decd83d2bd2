#include "program/compile/quantize_early.h"

#include <algorithm>
#include <map>
#include <optional>

#include "ops/collective/collective.h"
#include "ops/collective/ragged_collective.h"
#include "ops/permute/permute.h"
#include "ops/quantize/quantize.h"
#include "ops/scaled_rows.h"

namespace tessera {
namespace {

template <typename... Operators>
bool is_any(const Operator& op) {
  return ((dynamic_cast<const Operators*>(&op) != nullptr) || ...);
}

/// Their input 0 gives output 0, row by row.
bool moves_rows(const Operator& op) {
  return is_any<AllGather, AllToAll, AllToAllV, AllGatherV, Permute>(op);
}

bool quantizes_rows(const Node& node) {
  const auto* op = dynamic_cast<const Quantize*>(node.op.get());
  return op != nullptr && !op->is_turned() && op->block_rows() == 1;
}

class Mover {
 public:
  Mover(Program program, const std::vector<ValueId>& kept)
      : program_(std::move(program)), kept_(kept) {}

  Program run() {
    drop_unread();
    while (const auto place = find_place()) move(*place);
    return share_equal();
  }

 private:
  /// A node that moves rows, and behind it one that quantizes them.
  struct Place {
    size_t mover = 0;
    size_t quantize = 0;
  };

  bool outlives(ValueId value) const {
    return program_.is_output(value) || std::ranges::find(kept_, value) != kept_.end();
  }

  int64_t count_reads(ValueId value) const {
    int64_t reads = 0;
    for (const Node& node : program_.nodes()) reads += std::ranges::count(node.inputs, value);
    return reads;
  }

  void drop_unread() {
    for (auto i = std::ssize(program_.nodes()) - 1; i >= 0; --i) {
      const Node& node = program_.nodes()[i];
      const ValueId rows = node.outputs.empty() ? ValueId() : node.outputs[0];
      if (!moves_rows(*node.op) || outlives(rows) || count_reads(rows) > 0) continue;
      std::vector<Node> nodes = program_.nodes();
      nodes.erase(nodes.begin() + i);
      program_ = program_.with_nodes(std::move(nodes));
    }
  }

  std::optional<Place> find_place() const {
    const std::vector<Node>& nodes = program_.nodes();
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!quantizes_rows(nodes[i])) continue;
      const ValueId rows = nodes[i].inputs[Quantize::kX];
      for (size_t j = 0; j < i; ++j) {
        const bool moves = moves_rows(*nodes[j].op) && nodes[j].outputs[0] == rows;
        if (moves && !outlives(rows) && count_reads(rows) == 1) return Place{j, i};
      }
    }
    return std::nullopt;
  }

  /// Quantizes what the mover reads; the mover gives what the Quantize gave.
  void move(const Place& place) {
    const Node mover = program_.nodes()[place.mover];
    const Node quantize = program_.nodes()[place.quantize];
    const ValueId before = mover.inputs[0];
    const bool is_f16 = program_.type(quantize.outputs[0]).dtype == DType::kF16;
    const std::string name = program_.value(before).name + (is_f16 ? ".f16" : ".fp8");
    const ValueId early = program_.add1(quantize.op, {before}, name);
    std::vector<Node> nodes = program_.nodes();
    const Node added = nodes.back();
    nodes.pop_back();
    nodes[place.mover].inputs[0] = early;
    nodes[place.mover].outputs = quantize.outputs;
    nodes.erase(nodes.begin() + static_cast<ptrdiff_t>(place.quantize));
    nodes.insert(nodes.begin() + static_cast<ptrdiff_t>(place.mover), added);
    program_ = program_.with_nodes(std::move(nodes));
  }

  /// Of nodes that quantize one value alike all but the first are left out.
  Program share_equal() const {
    std::map<std::pair<ValueId, std::string>, ValueId> made;
    std::map<ValueId, ValueId> same;
    std::vector<Node> nodes;
    for (Node node : program_.nodes()) {
      for (ValueId& input : node.inputs) {
        const auto found = same.find(input);
        if (found != same.end()) input = found->second;
      }
      if (quantizes_rows(node)) {
        const ValueId y = node.outputs[Quantize::kY];
        const auto [first, is_new] =
            made.try_emplace({node.inputs[Quantize::kX], node.op->attributes()}, y);
        if (!is_new && !outlives(y)) {
          same[y] = first->second;
          continue;
        }
      }
      nodes.push_back(std::move(node));
    }
    return program_.with_nodes(std::move(nodes));
  }

  Program program_;
  const std::vector<ValueId>& kept_;
};

}  // namespace

Program quantize_early(const Program& program, const std::vector<ValueId>& kept) {
  return Mover(program, kept).run();
}

}  // namespace tessera
