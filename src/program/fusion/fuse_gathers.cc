#include "program/fusion/fuse_gathers.h"

#include <algorithm>
#include <optional>

#include "program/fusion/fuse_nodes.h"

namespace tessera {
namespace {

enum GatherInput : uint8_t { kFrom, kSource, kRowOf };

/// What it is worth not to keep rows for the backward pass, as a share of the time to make them: a
/// permutation twice instead of once took 0.7 % of a training step with the experts of
/// Qwen3-30B-A3B on an H200, and spares 0.5 GiB a layer.
constexpr double kKeptRowsWorth = 0.5;

/// The node that takes a gather in, where `reader` can do so for all of `rows` that it reads.
std::optional<Node> take_gather(const Node& gather, const Node& reader) {
  const auto* op = dynamic_cast<const TakesGather*>(reader.op.get());
  if (op == nullptr) return std::nullopt;
  const ValueId rows = gather.outputs[0];
  const auto found = std::ranges::find(reader.inputs, rows);
  if (std::ranges::count(reader.inputs, rows) != 1) return std::nullopt;
  OperatorPtr gathering = op->with_gather(static_cast<int>(found - reader.inputs.begin()));
  if (gathering == nullptr) return std::nullopt;
  Node result{std::move(gathering), reader.inputs, reader.outputs};
  std::ranges::replace(result.inputs, rows, gather.inputs[kFrom]);
  result.inputs.push_back(gather.inputs[kSource]);
  result.inputs.push_back(gather.inputs[kRowOf]);
  return result;
}

/// Takes the gathers of a program one after the other into the nodes behind them.
class GatherFuser {
 public:
  GatherFuser(const Program& program, const GatherUse& use, bool only_where_it_pays)
      : program_(program),
        use_(use),
        only_where_it_pays_(only_where_it_pays),
        nodes_(program.nodes()),
        readers_(program.num_values()) {
    for (size_t idx = 0; idx < nodes_.size(); ++idx) {
      for (const ValueId id : nodes_[idx].inputs) readers_[id].push_back(idx);
    }
  }

  Program run() {
    return fuse_nodes(program_, nodes_, [this](const Node& node) { return fuse(node); });
  }

 private:
  /// Whether the readers of `gather` make its rows from now on.
  bool fuse(const Node& gather) {
    if (dynamic_cast<const GathersRows*>(gather.op.get()) == nullptr || !may_be_fused(gather))
      return false;
    const std::vector<size_t>& readers = readers_[gather.outputs[0]];
    std::vector<Node> gathering;
    for (const size_t reader : readers) {
      auto node = take_gather(gather, nodes_[reader]);
      if (!node) return false;
      gathering.push_back(std::move(*node));
    }
    if (only_where_it_pays_ && !pays(gather, readers)) return false;
    for (size_t i = 0; i < readers.size(); ++i) nodes_[readers[i]] = std::move(gathering[i]);
    return !readers.empty();
  }

  bool may_be_fused(const Node& gather) const {
    const Value& from = program_.value(gather.inputs[kFrom]);
    // What an accumulator holds depends on when it is read.
    return from.kind != ValueKind::kAccumulator && !program_.is_output(gather.outputs[0]) &&
           from.type.num_bytes() <= program_.type(gather.outputs[0]).num_bytes();
  }

  /// The backward pass gathers too, or makes the rows, as takes less; where they are kept, it has
  /// them.
  bool pays(const Node& gather, const std::vector<size_t>& readers) const {
    const ValueId made = gather.outputs[0];
    const double rows =
        gather.op->cost(program_.types(gather.inputs), program_.types(gather.outputs)).bytes;
    double gathering = 0;
    double of_gradients = 0;
    for (const size_t idx : readers) {
      const auto& reader = dynamic_cast<const TakesGather&>(*nodes_[idx].op);
      const auto types = program_.types(nodes_[idx].inputs);
      gathering += reader.gather_cost(types);
      of_gradients += reader.gradient_gather_cost(types);
    }
    const bool keeps_rows = use_.differentiated && !(use_.made_again && use_.made_again(made));
    if (!keeps_rows) return gathering < rows;
    return gathering + std::min(rows, of_gradients) < (1 + kKeptRowsWorth) * rows;
  }

  const Program& program_;
  GatherUse use_;
  bool only_where_it_pays_;
  std::vector<Node> nodes_;
  IdVector<ValueId, std::vector<size_t>> readers_;
};

}  // namespace

Program fuse_gathers(const Program& program, GatherFusion which, const Backend& backend,
                     const GatherUse& use) {
  const bool is_auto = which == GatherFusion::kAuto;
  if (which == GatherFusion::kNever || (is_auto && backend.is_host())) return program;
  return GatherFuser(program, use, is_auto).run();
}

}  // namespace tessera
