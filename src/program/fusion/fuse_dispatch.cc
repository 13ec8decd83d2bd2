#include "program/fusion/fuse_dispatch.h"

#include <algorithm>
#include <optional>

#include "ops/dispatch_rows/dispatch_rows.h"
#include "ops/permute/permute.h"
#include "program/fusion/fuse_nodes.h"

namespace tessera {
namespace {

/// Shorter rows are copied faster than they are looked up.
constexpr int64_t kLeastRowBytes = 1024;
constexpr int64_t kVectorBytes = 16;

bool are_long(const ValueType& rows) {
  if (rows.shape.rank() != 2 || rows.scale.is_scaled()) return false;
  const int64_t bytes = rows.shape[1] * dtype_size(rows.dtype);
  return bytes >= kLeastRowBytes && bytes % kVectorBytes == 0;
}

/// The exchange as it gathers what `permute` would make; nothing where it cannot.
std::optional<Node> take_permute(const Node& permute, const Node& exchange) {
  const auto* op = dynamic_cast<const AllToAllV*>(exchange.op.get());
  const bool device_counts = op != nullptr && op->name() == AllToAllV::kOnDevice &&
                             exchange.inputs.size() == AllToAllV::kExtent + 1 &&
                             op->comm().takes_device_counts();
  if (!device_counts) return std::nullopt;
  Node result{make_dispatch_rows(op->comm_ptr(), op->max_rows()), exchange.inputs,
              exchange.outputs};
  result.inputs[AllToAllV::kX] = permute.inputs[Permute::kX];
  result.inputs.push_back(permute.inputs[Permute::kSource]);
  result.inputs.push_back(permute.inputs[Permute::kRowOf]);
  return result;
}

}  // namespace

Program fuse_dispatch(const Program& program, std::span<const ValueId> kept) {
  std::vector<Node> nodes = program.nodes();
  const auto fuse = [&](const Node& node) {
    if (dynamic_cast<const Permute*>(node.op.get()) == nullptr) return false;
    const ValueId rows = node.outputs[Permute::kRows];
    if (program.is_output(rows) || std::ranges::find(kept, rows) != kept.end() ||
        !are_long(program.type(rows)) ||
        program.value(node.inputs[Permute::kX]).kind == ValueKind::kAccumulator)
      return false;
    const auto reads = [&](const Node& other) {
      return std::ranges::find(other.inputs, rows) != other.inputs.end();
    };
    if (std::ranges::count_if(nodes, reads) != 1) return false;
    const auto reader = std::ranges::find_if(nodes, reads);
    auto fused = take_permute(node, *reader);
    if (fused) *reader = std::move(*fused);
    return fused.has_value();
  };
  return fuse_nodes(program, nodes, fuse);
}

}  // namespace tessera
