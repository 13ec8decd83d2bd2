#include "program/compile/set_aside.h"

#include <algorithm>

namespace tessera {
namespace {

bool needs_the_host(const Node& node, const Backend& backend) {
  return node.op->communicates() || backend.kernel(*node.op).tells_the_host();
}

bool only_accumulates(const Node& node) {
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (!node.op->accumulates(static_cast<int>(i))) return false;
  }
  return !node.outputs.empty();
}

}  // namespace

Program set_aside(const Program& program, const Backend& backend) {
  std::vector<Node> nodes = program.nodes();
  if (std::ranges::any_of(nodes, [&](const Node& node) { return needs_the_host(node, backend); }))
    return program;
  for (Node& node : nodes) {
    const Cost cost = node.op->cost(program.types(node.inputs), program.types(node.outputs));
    node.aside = only_accumulates(node) && backend.side_lane()->suits(cost);
  }
  return program.with_nodes(std::move(nodes));
}

}  // namespace tessera
