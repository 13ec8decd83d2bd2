#include "comm/statistics.h"

#include "core/error.h"

namespace tessera {

std::string_view comm_kind_name(CommKind kind) {
  switch (kind) {
    case CommKind::kAllGather:
      return "all_gather";
    case CommKind::kReduceScatter:
      return "reduce_scatter";
    case CommKind::kAllReduce:
      return "all_reduce";
    case CommKind::kAllToAll:
      return "all_to_all";
    case CommKind::kSend:
      return "send";
    case CommKind::kReceive:
      return "receive";
    case CommKind::kBroadcast:
      return "broadcast";
    case CommKind::kBarrier:
      return "barrier";
  }
  throw InternalError("comm_kind_name: unknown kind");
}

void CommStatistics::add(const std::string& group, CommKind kind, int64_t bytes) {
  CommCount& count = counts_[{group, kind}];
  ++count.calls;
  count.bytes += bytes;
}

CommCount CommStatistics::count(const std::string& group, CommKind kind) const {
  const auto found = counts_.find({group, kind});
  return found == counts_.end() ? CommCount{} : found->second;
}

int64_t CommStatistics::total_bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, count] : counts_) bytes += count.bytes;
  return bytes;
}

}  // namespace tessera
