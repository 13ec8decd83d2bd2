#include "sim/software.h"

#include <algorithm>

#include "ops/attention/attention.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "sim/units.h"
#include "step/build/node_types.h"

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

/// What makes what an exchange sums, or first reads what it gathers.
std::optional<size_t> find_product(const Program& program, size_t exchange) {
  const auto& nodes = program.nodes();
  const Node& node = nodes[exchange];
  if (node.op->name().starts_with("reduce_scatter")) {
    for (size_t i = exchange; i-- > 0;)
      if (contains(nodes[i].outputs, node.inputs.front())) return i;
  } else if (node.op->name().starts_with("all_gather")) {
    for (size_t i = exchange + 1; i < nodes.size(); ++i)
      if (contains(nodes[i].inputs, node.outputs.front())) return i;
  }
  return std::nullopt;
}

/// Experts through which an operator that multiplies their rows, or quantizes them for that, goes;
/// 0 of others.
int64_t num_experts(const Program& program, const Node& node) {
  const std::string_view name = node.op->name();
  if (!name.starts_with("grouped_matmul") && !name.starts_with("scaled_grouped_") &&
      name != QuantizeTokens::kName)
    return 0;
  for (const ValueType& type : program.types(node.inputs)) {
    if (type.dtype == DType::kI64 && type.shape[0] > 1) return type.shape[0] - 1;
  }
  return 0;
}

}  // namespace

double host_seconds(const Software& software, const Hardware& hardware, const Program& program,
                    const Node& node) {
  const bool recorded = software.graphs == LaunchGraphs::kAll ||
                        (software.graphs == LaunchGraphs::kStatic && !is_ragged(program, node));
  if (recorded) return kMicro * hardware.graph_microseconds;
  const double launch = software.launch_microseconds.value_or(hardware.launch_microseconds);
  const auto experts = static_cast<double>(num_experts(program, node));
  return kMicro * (launch + software.expert_microseconds * experts);
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
         bytes / (hardware.memory_share * hardware.memory_rate());
}

Pieces find_pieces(const Software& software, const Program& program) {
  const auto& nodes = program.nodes();
  Pieces pieces{.of_node = std::vector<int64_t>(nodes.size(), 1)};
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Communicator* const group = group_of(*nodes[i].op);
    if (group == nullptr ||
        std::ranges::find(software.pipelined, group->name()) == software.pipelined.end())
      continue;
    const std::optional<size_t> product = find_product(program, i);
    if (!product || group_of(*nodes[*product].op) != nullptr) continue;
    pieces.of_node[i] = pieces.of_node[*product] = group->size();
    pieces.product_of[i] = *product;
  }
  return pieces;
}

double pipelined_seconds(double exchange, double product, int64_t num_ranks) {
  const double piece = 1 / static_cast<double>(num_ranks);
  return std::max(exchange * piece, exchange - product * (1 - piece));
}

}  // namespace tessera
