#include "program/fusion/fuse_quantize.h"

#include <algorithm>

#include "ops/quantize/gives_quantized.h"

namespace tessera {
namespace {

/// Has the node that makes what `quantize` reads give its result too. Whether it can.
bool join(std::vector<Node>& nodes, const Node& quantize) {
  const auto& op = static_cast<const Quantize&>(*quantize.op);
  const ValueId values = quantize.inputs[Quantize::kX];
  for (Node& node : nodes) {
    const auto made = std::ranges::find(node.outputs, values);
    if (made == node.outputs.end()) continue;
    const auto* giver = dynamic_cast<const GivesQuantized*>(node.op.get());
    if (giver == nullptr) return false;
    OperatorPtr joint = giver->giving_quantized(static_cast<int>(made - node.outputs.begin()), op);
    if (joint == nullptr) return false;
    node.op = std::move(joint);
    node.outputs.push_back(quantize.outputs[Quantize::kY]);
    return true;
  }
  return false;
}

}  // namespace

Program fuse_quantize(const Program& program) {
  std::vector<Node> nodes;
  for (const Node& node : program.nodes()) {
    const bool quantizes = dynamic_cast<const Quantize*>(node.op.get()) != nullptr;
    if (!quantizes || !join(nodes, node)) nodes.push_back(node);
  }
  return program.with_nodes(std::move(nodes));
}

}  // namespace tessera
