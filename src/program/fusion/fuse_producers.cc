#include "program/fusion/fuse_producers.h"

#include <algorithm>
#include <optional>

#include "ops/joins_producer.h"

namespace tessera {
namespace {

constexpr int kNoNode = -1;

/// A node that does the work of two, and stands in the place of the second.
struct Joined {
  Node node;
  int maker = kNoNode;
  int reader = kNoNode;
};

/// Joins nodes of a program one after the other, as long as there are any.
class ProducerFuser {
 public:
  ProducerFuser(const Program& program, std::span<const ValueId> kept)
      : program_(program), nodes_(program.nodes()), wanted_(program.outputs()) {
    wanted_.insert(wanted_.end(), kept.begin(), kept.end());
  }

  Program run() {
    look_at_all();
    for (int idx = 0; idx < std::ssize(nodes_); ++idx) {
      if (!is_left(idx)) continue;
      if (auto joined = join(idx)) replace(std::move(*joined));
    }
    std::erase_if(nodes_, [](const Node& node) { return node.op == nullptr; });
    return program_.with_nodes(std::move(nodes_));
  }

 private:
  Node& node(int idx) { return nodes_[idx]; }
  bool is_left(int idx) { return node(idx).op != nullptr; }

  void look_at_all() {
    producer_ = IdVector<ValueId, int>(program_.num_values(), kNoNode);
    readers_ = IdVector<ValueId, std::vector<int>>(program_.num_values());
    for (int idx = 0; idx < std::ssize(nodes_); ++idx) {
      for (const ValueId id : node(idx).inputs) readers_[id].push_back(idx);
      for (const ValueId id : node(idx).outputs) producer_[id] = idx;
    }
  }

  /// What `reader` and the node in front of it become together.
  std::optional<Joined> join(int reader) {
    const auto* op = dynamic_cast<const JoinsProducer*>(node(reader).op.get());
    if (op == nullptr) return std::nullopt;
    const ValueId between = node(reader).inputs[0];
    const int maker = producer_[between];
    if (maker == kNoNode || node(maker).outputs.size() != 1 ||
        program_.value(between).kind != ValueKind::kIntermediate)
      return std::nullopt;
    const auto& readers = readers_[between];
    const bool keeps = readers.size() > 1 || std::ranges::find(wanted_, between) != wanted_.end();
    OperatorPtr joint =
        op->joined_with({*node(maker).op, node(maker).inputs, node(reader).inputs}, keeps);
    if (joint == nullptr) return std::nullopt;
    Joined joined{{std::move(joint), node(maker).inputs, node(reader).outputs}, maker, reader};
    joined.node.inputs.insert(joined.node.inputs.end(), node(reader).inputs.begin() + 1,
                              node(reader).inputs.end());
    if (keeps) joined.node.outputs.push_back(between);
    if (!may_stand(joined)) return std::nullopt;
    return joined;
  }

  /// Whether what it reads is the same at its place, and none reads before it what it makes.
  bool may_stand(const Joined& joined) {
    const auto is_there = [&](ValueId id) {
      // What an accumulator holds depends on when it is read.
      return program_.value(id).kind != ValueKind::kAccumulator;
    };
    const auto is_in_time = [&](ValueId id) {
      return std::ranges::all_of(readers_[id], [&](int reader) { return reader >= joined.reader; });
    };
    return std::ranges::all_of(joined.node.inputs, is_there) &&
           std::ranges::all_of(joined.node.outputs, is_in_time);
  }

  void replace(Joined joined) {
    node(joined.maker) = Node{};
    node(joined.reader) = std::move(joined.node);
    look_at_all();
  }

  const Program& program_;
  std::vector<Node> nodes_;  ///< those without an operator are gone
  std::vector<ValueId> wanted_;
  IdVector<ValueId, int> producer_;
  IdVector<ValueId, std::vector<int>> readers_;
};

}  // namespace

Program fuse_producers(const Program& program, std::span<const ValueId> kept) {
  return ProducerFuser(program, kept).run();
}

}  // namespace tessera
