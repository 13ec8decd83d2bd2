#include "program/compile/quantize_saved.h"

#include <algorithm>

#include "ops/permute/permute.h"
#include "ops/quantize/quantize.h"
#include "ops/reads_scaled_rows.h"
#include "ops/scaled_rows.h"
#include "program/compile/recompute.h"

namespace tessera {
namespace {

/// The Quantize by rows that takes this value; null where there is none.
OperatorPtr find_quantize(const Program& program, ValueId value) {
  for (const Node& node : program.nodes()) {
    const auto* op = dynamic_cast<const Quantize*>(node.op.get());
    if (op == nullptr || node.inputs[Quantize::kX] != value) continue;
    if (!op->is_turned() && op->block_rows() == 1 && op->spec().element == DType::kE4M3)
      return node.op;
  }
  return nullptr;
}

/// A node that reads a value, and how what it gives is quantized.
struct QuantizedReader {
  size_t place = 0;
  OperatorPtr quantize;
};

std::optional<QuantizedReader> find_quantized_reader(const Program& forward, ValueId value) {
  const std::vector<Node>& nodes = forward.nodes();
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].outputs.empty() ||
        std::ranges::find(nodes[i].inputs, value) == nodes[i].inputs.end())
      continue;
    if (OperatorPtr quantize = find_quantize(forward, nodes[i].outputs[0]))
      return QuantizedReader{i, std::move(quantize)};
  }
  return std::nullopt;
}

/// A program's nodes where each that reads the value reads rows of FP8 in its place; nullopt where
/// one cannot.
std::optional<std::vector<Node>> reading_scaled(const Program& program, ValueId value) {
  std::vector<Node> nodes = program.nodes();
  for (Node& node : nodes) {
    for (int input = 0; input < std::ssize(node.inputs); ++input) {
      if (node.inputs[input] != value) continue;
      const auto* reader = dynamic_cast<const ReadsScaledRows*>(node.op.get());
      OperatorPtr scaled = reader == nullptr ? nullptr : reader->reading_scaled_rows(input);
      if (scaled == nullptr) return std::nullopt;
      node.op = std::move(scaled);
    }
  }
  return nodes;
}

/// A Quantize of the value behind the node that reads it, and what it gives.
ValueId add_quantize(Program& forward, const QuantizedReader& reader, ValueId value) {
  const ValueId rows = forward.add1(reader.quantize, {value}, forward.value(value).name);
  std::vector<Node> nodes = forward.nodes();
  const auto first = nodes.begin() + static_cast<ptrdiff_t>(reader.place) + 1;
  std::rotate(first, nodes.end() - 1, nodes.end());
  forward = forward.with_nodes(std::move(nodes));
  return rows;
}

int64_t count_exchanges(const Program& program) {
  return std::ranges::count_if(program.nodes(),
                               [](const Node& node) { return node.op->communicates(); });
}

bool are_permuted_rows(const Program& forward, ValueId value) {
  return has_scaled_rows(forward.type(value).format()) &&
         std::ranges::any_of(forward.nodes(), [value](const Node& node) {
           return dynamic_cast<const Permute*>(node.op.get()) != nullptr &&
                  node.outputs[Permute::kRows] == value;
         });
}

}  // namespace

void quantize_saved(Program& forward, Backward& backward) {
  for (Link& link : backward.saved) {
    auto nodes = reading_scaled(backward.program, link.backward);
    const auto reader = find_quantized_reader(forward, link.forward);
    if (!nodes || !reader || backward.program.is_output(link.backward)) continue;
    const ValueType type = reader->quantize->infer(backward.program.types({link.backward})).front();
    const ValueId rows =
        backward.program.add_input(forward.value(link.forward).name + ".rows", type);
    for (Node& node : *nodes) std::ranges::replace(node.inputs, link.backward, rows);
    backward.program = backward.program.with_nodes(std::move(*nodes));
    link = {add_quantize(forward, *reader, link.forward), rows};
  }
  backward = recompute(forward, backward, {});
}

Backward permute_again(const Program& forward, const Backward& backward) {
  Backward best = backward;
  for (const Link& link : backward.saved) {
    if (!are_permuted_rows(forward, link.forward)) continue;
    Backward again = recompute(forward, best, {link.forward});
    if (again.saved_bytes() < best.saved_bytes() &&
        count_exchanges(again.program) == count_exchanges(best.program))
      best = std::move(again);
  }
  return best;
}

}  // namespace tessera
