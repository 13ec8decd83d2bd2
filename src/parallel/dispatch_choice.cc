#include "parallel/dispatch_choice.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"

namespace tessera {
namespace {

void check_sizes(const DispatchSizes& sizes) {
  ensure(sizes.nodes >= 1 && sizes.ep % std::max<int64_t>(sizes.nodes, 1) == 0,
         "dispatcher: {} ranks on {} nodes", sizes.ep, sizes.nodes);
  require(sizes.top_k >= 1 && sizes.ep >= 1 && sizes.etp >= 1,
          "dispatcher: top-k {} over EP {} x ETP {}; expected at least 1 of each", sizes.top_k,
          sizes.ep, sizes.etp);
  ensure(std::isfinite(sizes.rows_per_peer) && sizes.rows_per_peer >= 0,
         "dispatcher: {} rows to each rank", sizes.rows_per_peer);
  require(std::isfinite(sizes.all_to_all_efficiency) && sizes.all_to_all_efficiency > 0,
          "dispatcher: the efficiency of an all-to-all is {}, expected above 0",
          sizes.all_to_all_efficiency);
}

DispatcherKind cheaper(const DispatchVolumes& volumes, double all_to_all_efficiency) {
  return volumes.all_to_all / all_to_all_efficiency > volumes.all_gather
             ? DispatcherKind::kAllGather
             : DispatcherKind::kAllToAll;
}

/// That none of `count` different ones of `all` is among `some` of them.
double share_of_none(int64_t all, int64_t some, int64_t count) {
  double share = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (all - some <= i) return 0;
    share *= static_cast<double>(all - some - i) / static_cast<double>(all - i);
  }
  return share;
}

/// That j of `count` different ones of `all` are among `some` of them, for each j.
std::vector<double> shares_of_some(int64_t all, int64_t some, int64_t count) {
  std::vector<double> shares(count + 1, 0.0);
  shares[0] = 1;
  for (int64_t drawn = 0; drawn < count; ++drawn) {
    const auto left = static_cast<double>(all - drawn);
    for (int64_t j = drawn; j >= 0; --j) {
      const double hit = static_cast<double>(std::max<int64_t>(some - j, 0)) / left;
      shares[j + 1] += shares[j] * hit;
      shares[j] *= 1 - hit;
    }
  }
  return shares;
}

}  // namespace

DispatcherKind kind_of(DispatcherRequest request) {
  switch (request) {
    case DispatcherRequest::kAuto:
      break;
    case DispatcherRequest::kAllToAll:
      return DispatcherKind::kAllToAll;
    case DispatcherRequest::kAllGather:
      return DispatcherKind::kAllGather;
    case DispatcherRequest::kDeduplicated:
      return DispatcherKind::kDeduplicated;
    case DispatcherRequest::kHierarchical:
      return DispatcherKind::kHierarchical;
  }
  throw InternalError("no dispatcher is asked for");
}

double reach_of_rank(const RoutedExperts& routed, int64_t ep) {
  const int64_t here = routed.num_experts / ep;
  const int64_t each = routed.num_experts / std::max<int64_t>(routed.num_groups, 1);
  const int64_t open = routed.top_groups * each;
  const bool by_group = routed.num_groups > 1 && (here % each == 0 || each % here == 0);
  if (!by_group) return 1 - share_of_none(routed.num_experts, here, routed.top_k);
  if (here < each) {
    return static_cast<double>(routed.top_groups) / static_cast<double>(routed.num_groups) *
           (1 - share_of_none(open, here, routed.top_k));
  }
  const std::vector<double> shares =
      shares_of_some(routed.num_groups, here / each, routed.top_groups);
  double reach = 0;
  for (int64_t j = 1; j < std::ssize(shares); ++j)
    reach += shares[j] * (1 - share_of_none(open, j * each, routed.top_k));
  return reach;
}

std::string_view dispatcher_name(DispatcherKind kind) {
  switch (kind) {
    case DispatcherKind::kLocal:
      return "local";
    case DispatcherKind::kAllToAll:
      return "all_to_all";
    case DispatcherKind::kAllGather:
      return "all_gather";
    case DispatcherKind::kDeduplicated:
      return "deduplicated";
    case DispatcherKind::kHierarchical:
      return "hierarchical";
  }
  throw InternalError("unknown dispatcher");
}

DispatchVolumes dispatch_volumes(const DispatchSizes& sizes) {
  const auto top_k = static_cast<double>(sizes.top_k);
  const auto ep = static_cast<double>(sizes.ep);
  const auto etp = static_cast<double>(sizes.etp);
  const double rows = sizes.rows_per_peer > 0 ? sizes.rows_per_peer * ep : top_k;
  const auto or_any = [&](double reach, double members) {
    return reach > 0 ? reach : 1 - std::pow(1 - 1 / members, top_k);
  };
  const auto nodes = static_cast<double>(sizes.nodes);
  const double reach = or_any(sizes.reach, ep);
  const double between = nodes > 1 ? 2 * or_any(sizes.node_reach, nodes) * (nodes - 1) : 0;
  const double shards = ep * (etp - 1);
  return {.all_to_all = 2 * rows * ((ep - 1) / ep + (etp - 1)),
          .all_gather = 2 * (ep * etp - 1),
          .deduplicated = 2 * reach * (ep - 1 + shards),
          .hierarchical = between + 2 * reach * (ep - nodes + shards),
          .between_nodes = between};
}

double DispatchVolumes::of(DispatcherKind kind) const {
  switch (kind) {
    case DispatcherKind::kLocal:
      return 0;
    case DispatcherKind::kAllToAll:
      return all_to_all;
    case DispatcherKind::kAllGather:
      return all_gather;
    case DispatcherKind::kDeduplicated:
      return deduplicated;
    case DispatcherKind::kHierarchical:
      return hierarchical;
  }
  throw InternalError("unknown dispatcher");
}

std::string DispatchChoice::to_string() const {
  if (kind == DispatcherKind::kLocal) return "local: all experts are here";
  const auto other =
      kind == DispatcherKind::kAllToAll ? DispatcherKind::kAllGather : DispatcherKind::kAllToAll;
  std::string text = fmt::format("{}{}: {:.4g} rows a token leave a rank, {} would move {:.4g}",
                                 dispatcher_name(kind), by_request ? " (as asked)" : "",
                                 volumes.of(kind), dispatcher_name(other), volumes.of(other));
  if (kind == DispatcherKind::kHierarchical)
    return text + fmt::format("; {:.4g} leave the node", volumes.between_nodes);
  if (by_request || all_to_all_efficiency == 1.0) return text;
  return text + fmt::format("; an all-to-all's count {:.4g} at an efficiency of {:.4g}",
                            volumes.all_to_all / all_to_all_efficiency, all_to_all_efficiency);
}

DispatchChoice choose_dispatcher(const DispatchSizes& sizes, DispatcherRequest request) {
  check_sizes(sizes);
  DispatchChoice choice{.kind = DispatcherKind::kLocal,
                        .volumes = dispatch_volumes(sizes),
                        .all_to_all_efficiency = sizes.all_to_all_efficiency};
  if (sizes.ep * sizes.etp == 1) return choice;
  choice.by_request = request != DispatcherRequest::kAuto;
  choice.kind =
      choice.by_request ? kind_of(request) : cheaper(choice.volumes, sizes.all_to_all_efficiency);
  return choice;
}

}  // namespace tessera
