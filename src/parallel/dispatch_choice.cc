#include "parallel/dispatch_choice.h"

#include <cmath>

#include "core/error.h"

namespace tessera {
namespace {

void check_sizes(const DispatchSizes& sizes) {
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

}  // namespace

std::string_view dispatcher_name(DispatcherKind kind) {
  switch (kind) {
    case DispatcherKind::kLocal:
      return "local";
    case DispatcherKind::kAllToAll:
      return "all_to_all";
    case DispatcherKind::kAllGather:
      return "all_gather";
  }
  throw InternalError("unknown dispatcher");
}

DispatchVolumes dispatch_volumes(const DispatchSizes& sizes) {
  const auto top_k = static_cast<double>(sizes.top_k);
  const auto ep = static_cast<double>(sizes.ep);
  const auto etp = static_cast<double>(sizes.etp);
  const double rows = sizes.rows_per_peer > 0 ? sizes.rows_per_peer * ep : top_k;
  return {.all_to_all = 2 * rows * ((ep - 1) / ep + (etp - 1)), .all_gather = 2 * (ep * etp - 1)};
}

std::string DispatchChoice::to_string() const {
  if (kind == DispatcherKind::kLocal) return "local: all experts are here";
  const bool all_to_all = kind == DispatcherKind::kAllToAll;
  const auto other = all_to_all ? DispatcherKind::kAllGather : DispatcherKind::kAllToAll;
  std::string text = fmt::format(
      "{}{}: {:.4g} rows a token leave a rank, {} would move {:.4g}", dispatcher_name(kind),
      by_request ? " (as asked)" : "", all_to_all ? volumes.all_to_all : volumes.all_gather,
      dispatcher_name(other), all_to_all ? volumes.all_gather : volumes.all_to_all);
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
  if (!choice.by_request) {
    choice.kind = cheaper(choice.volumes, sizes.all_to_all_efficiency);
  } else {
    choice.kind = request == DispatcherRequest::kAllToAll ? DispatcherKind::kAllToAll
                                                          : DispatcherKind::kAllGather;
  }
  return choice;
}

}  // namespace tessera
