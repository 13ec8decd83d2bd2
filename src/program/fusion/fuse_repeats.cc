#include "program/fusion/fuse_repeats.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <queue>

#include "ops/joins_producer.h"
#include "program/dependencies.h"

namespace tessera {
namespace {

/// A node that could do another one's work too.
struct Pair {
  int giver;
  int other;
  OperatorPtr joint;
};

const Node& node_at(const Program& program, int idx) {
  return program.nodes()[idx];
}

/// The nodes in an order in which `pair.giver` stands for both nodes of the pair: each as early as
/// its dependencies and the nodes in front of it let it. Without pair.other; nothing where the two
/// wait for each other by way of other nodes.
std::optional<std::vector<int>> order_joined(const Program& program, const Pair& pair) {
  const auto num_nodes = program.nodes().size();
  const auto joined = [&](int idx) { return idx == pair.other ? pair.giver : idx; };
  std::vector<std::vector<int>> later(num_nodes);
  std::vector<int> num_before(num_nodes);
  const auto dependencies = find_dependencies(program);
  for (int idx = 0; idx < std::ssize(dependencies); ++idx) {
    for (const int before : dependencies[idx]) {
      if (joined(before) == joined(idx)) continue;
      later[joined(before)].push_back(joined(idx));
      ++num_before[joined(idx)];
    }
  }
  std::priority_queue<int, std::vector<int>, std::greater<>> ready;
  for (int idx = 0; idx < static_cast<int>(num_nodes); ++idx)
    if (idx != pair.other && num_before[idx] == 0) ready.push(idx);
  std::vector<int> order;
  while (!ready.empty()) {
    order.push_back(ready.top());
    ready.pop();
    for (const int idx : later[order.back()])
      if (--num_before[idx] == 0) ready.push(idx);
  }
  if (order.size() + 1 != num_nodes) return std::nullopt;
  return order;
}

std::optional<Program> join(const Program& program, const Pair& pair) {
  const auto order = order_joined(program, pair);
  if (!order) return std::nullopt;
  std::vector<Node> nodes;
  for (const int idx : *order) nodes.push_back(node_at(program, idx));
  Node& giver = nodes[std::ranges::find(*order, pair.giver) - order->begin()];
  const Node& other = node_at(program, pair.other);
  giver.op = pair.joint;
  giver.outputs.insert(giver.outputs.end(), other.outputs.begin(), other.outputs.end());
  return program.with_nodes(std::move(nodes));
}

/// The program with the first two nodes made one that can be.
std::optional<Program> join_any(const Program& program) {
  const auto num_nodes = static_cast<int>(program.nodes().size());
  for (int giver = 0; giver < num_nodes; ++giver) {
    const Node& node = node_at(program, giver);
    const auto* op = dynamic_cast<const GivesMore*>(node.op.get());
    if (op == nullptr) continue;
    for (int other = 0; other < num_nodes; ++other) {
      const Node& more = node_at(program, other);
      if (other == giver) continue;
      OperatorPtr joint = op->giving_also(node.inputs, *more.op, more.inputs);
      if (joint == nullptr) continue;
      if (auto result = join(program, {giver, other, std::move(joint)})) return result;
    }
  }
  return std::nullopt;
}

}  // namespace

Program fuse_repeats(const Program& program) {
  Program result = program;
  while (auto next = join_any(result)) result = std::move(*next);
  return result;
}

}  // namespace tessera
