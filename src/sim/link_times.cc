#include "sim/link_times.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "sim/units.h"

namespace tessera {
namespace {

double latency(const LinkRates& link, int64_t num_ranks) {
  return kMicro * link.microseconds * std::ceil(std::log2(static_cast<double>(num_ranks)));
}

}  // namespace

double LinkTimes::exchange_seconds(CommKind kind, std::span<const int64_t> ranks,
                                   double sent) const {
  const auto count = static_cast<int64_t>(ranks.size());
  if (count < 2) return 0;
  std::map<int64_t, int64_t> in_node;
  for (const int64_t rank : ranks) ++in_node[node_of(rank)];
  int64_t local = 0;  // ranks of the group in its fullest node
  for (const auto& [node, number] : in_node) local = std::max(local, number);
  const double inside = kGiga * hardware_.node.gbs;
  const double outside = kGiga * hardware_.network.gbs;
  if (in_node.size() == 1) return latency(hardware_.node, count) + sent / inside;
  const double begin = latency(hardware_.network, count);
  if (kind == CommKind::kAllToAll) {
    const double a_rank = sent / static_cast<double>(count - 1);
    const double within = local > 1 ? a_rank * static_cast<double>(local - 1) / inside : 0;
    return begin + std::max(within, a_rank * static_cast<double>(count - local) / outside);
  }
  const double through = outside * static_cast<double>(local);
  return begin + sent / (local > 1 ? std::min(inside, through) : through);
}

LinkKind LinkTimes::link_of(std::span<const int64_t> ranks) const {
  const bool in_one_node = std::ranges::all_of(
      ranks, [&](int64_t rank) { return node_of(rank) == node_of(ranks.front()); });
  return in_one_node ? LinkKind::kNode : LinkKind::kNetwork;
}

double LinkTimes::message_seconds(int64_t from, int64_t to, double bytes) const {
  const LinkRates& link = node_of(from) == node_of(to) ? hardware_.node : hardware_.network;
  return kMicro * link.microseconds + bytes / (kGiga * link.gbs);
}

double sent_bytes(CommKind kind, int64_t num_ranks, double input_bytes) {
  const auto ranks = static_cast<double>(num_ranks);
  switch (kind) {
    case CommKind::kAllGather:
      return (ranks - 1) * input_bytes;
    case CommKind::kReduceScatter:
    case CommKind::kAllToAll:
      return (ranks - 1) / ranks * input_bytes;
    case CommKind::kAllReduce:
      return 2 * (ranks - 1) / ranks * input_bytes;
    default:
      return input_bytes;
  }
}

}  // namespace tessera
