#include "sim/software.h"

#include <algorithm>

#include "ops/attention/attention.h"
#include "sim/units.h"

namespace tessera {
namespace {

/// Whether its shapes depend on the routing, so that software whose host knows the shapes of what
/// it launches cannot record it.
bool is_ragged(const Program& program, const Node& node) {
  for (const auto* ids : {&node.inputs, &node.outputs}) {
    for (const ValueType& type : program.types(*ids)) {
      if (type.ragged()) return true;
    }
  }
  return false;
}

bool contains(const std::vector<ValueId>& ids, ValueId id) {
  return std::ranges::find(ids, id) != ids.end();
}

}  // namespace

double host_seconds(const Software& software, const Hardware& hardware, const Program& program,
                    const Node& node) {
  const bool recorded = software.graphs == LaunchGraphs::kAll ||
                        (software.graphs == LaunchGraphs::kStatic && !is_ragged(program, node));
  return kMicro * (recorded ? hardware.graph_microseconds
                            : software.launch_microseconds.value_or(hardware.launch_microseconds));
}

std::optional<double> stored_scores_seconds(const Node& node, const ValueType& q,
                                            const Hardware& hardware) {
  const auto* op = dynamic_cast<const AttentionOperator*>(node.op.get());
  if (op == nullptr) return std::nullopt;
  const AttentionSpec& spec = op->spec();
  const auto tokens = static_cast<double>(q.shape[0]);
  const double length =
      spec.sequence_length > 0 ? static_cast<double>(spec.sequence_length) : tokens;
  const double scores = tokens * length * static_cast<double>(spec.num_heads);
  const int64_t value_size = spec.head_size_v > 0 ? spec.head_size_v : spec.head_size;
  const bool backward = node.op->name().ends_with("backward");
  // Forward: scores are written, read and written by the softmax, read. Backward: probabilities'
  // gradient is written, read with the probabilities to write that of scores, which two products
  // read, and one the probabilities.
  const double passes = backward ? 7 : 4;
  const double products = backward ? 2 : 1;
  const double flops = products * 2 * scores * static_cast<double>(spec.head_size + value_size);
  const double bytes = passes * scores * static_cast<double>(dtype_size(q.dtype));
  return flops / (hardware.product_share * hardware.matrix_rate(dtype_name(q.dtype))) +
         bytes / (hardware.memory_share * kGiga * hardware.memory_gbs);
}

std::optional<size_t> find_piece_product(const Program& program, size_t exchange) {
  const auto& nodes = program.nodes();
  const Node& node = nodes[exchange];
  const bool sums = node.op->name().starts_with("reduce_scatter");
  const ValueId value = sums ? node.inputs.front() : node.outputs.front();
  if (sums) {
    for (size_t i = exchange; i-- > 0;)
      if (contains(nodes[i].outputs, value)) return i;
  } else {
    for (size_t i = exchange + 1; i < nodes.size(); ++i)
      if (contains(nodes[i].inputs, value)) return i;
  }
  return std::nullopt;
}

double pipelined_seconds(double exchange, double product, int64_t num_ranks) {
  const double piece = 1 / static_cast<double>(num_ranks);
  return std::max(exchange * piece, exchange - product * (1 - piece));
}

}  // namespace tessera
