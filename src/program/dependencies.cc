#include "program/dependencies.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tessera {
namespace {

bool contains(const std::vector<ValueId>& ids, ValueId id) {
  return std::ranges::find(ids, id) != ids.end();
}

bool meet(const std::vector<ValueId>& a, const std::vector<ValueId>& b) {
  return std::ranges::any_of(a, [&](ValueId id) { return contains(b, id); });
}

/// Walks the nodes in order and remembers who touched each value last.
class DependencyFinder {
 public:
  explicit DependencyFinder(const Program& program)
      : program_(program), last_writer_(program.num_values(), -1), readers_(program.num_values()) {}

  std::vector<int> add(int idx) {
    const Node& node = program_.nodes()[idx];
    const NodeAccess access = find_access(program_, node);
    std::set<int> before;
    for (const ValueId id : access.reads) before.insert(writer(id));
    for (const ValueId id : access.writes) {
      before.insert(writer(id));
      before.insert(readers(id).begin(), readers(id).end());
    }
    if (node.op->communicates()) before.insert(std::exchange(last_exchange_, idx));
    before.erase(-1);
    for (const ValueId id : access.reads) readers(id).push_back(idx);
    for (const ValueId id : access.writes) {
      writer(id) = idx;
      readers(id).clear();
    }
    return {before.begin(), before.end()};
  }

 private:
  int& writer(ValueId id) { return last_writer_[id]; }
  std::vector<int>& readers(ValueId id) { return readers_[id]; }

  const Program& program_;
  IdVector<ValueId, int> last_writer_;
  IdVector<ValueId, std::vector<int>> readers_;  ///< since the last write
  int last_exchange_ = -1;
};

}  // namespace

NodeAccess find_access(const Program& program, const Node& node) {
  NodeAccess access{node.inputs, node.outputs};
  const auto read_extent = [&](ValueId id) {
    const ValueType& type = program.type(id);
    if (type.ragged() && !contains(node.outputs, type.extent.value()))
      access.reads.push_back(type.extent.value());
  };
  std::ranges::for_each(node.inputs, read_extent);
  std::ranges::for_each(node.outputs, read_extent);
  return access;
}

bool must_wait(const NodeAccess& exchange, const NodeAccess& later) {
  return meet(exchange.writes, later.reads) || meet(exchange.writes, later.writes) ||
         meet(exchange.reads, later.writes);
}

std::vector<std::vector<int>> find_dependencies(const Program& program) {
  DependencyFinder finder(program);
  std::vector<std::vector<int>> dependencies;
  for (int idx = 0; idx < std::ssize(program.nodes()); ++idx)
    dependencies.push_back(finder.add(idx));
  return dependencies;
}

std::vector<int> find_waits(const Program& program) {
  const int num_nodes = static_cast<int>(program.nodes().size());
  std::vector<NodeAccess> accesses;
  for (const Node& node : program.nodes()) accesses.push_back(find_access(program, node));
  std::vector<int> waits;
  for (int idx = 0; idx < num_nodes; ++idx) {
    const NodeAccess& own = accesses[idx];
    int at = idx + 1;
    const Node& node = program.nodes()[idx];
    if (node.op->communicates() || node.aside) {
      while (at < num_nodes && !must_wait(own, accesses[at])) ++at;
    }
    waits.push_back(at);
  }
  return waits;
}

}  // namespace tessera
