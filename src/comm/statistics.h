#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class CommKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kSend,
  kReceive,
  kBroadcast,
  kBarrier,
};

/// "all_gather", ...
std::string_view comm_kind_name(CommKind kind);

struct CommCount {
  int64_t calls = 0;
  /// Bytes that leave this rank where each byte travels as few times as possible: of an all-gather
  /// (P-1) · own rows, of a reduce-scatter all rows but the own part, of an all-reduce
  /// 2 · (P-1)/P · bytes (rounded down), of an all-to-all all rows but those for this rank itself,
  /// of a send its bytes, of a receive none, of a broadcast its bytes from the root alone.
  int64_t bytes = 0;
};

/// Calls and bytes of one rank by group name and kind. Bytes do not depend on timing, so tests
/// compare them with formulas. Not thread-safe.
class CommStatistics {
 public:
  using Key = std::pair<std::string, CommKind>;

  void add(const std::string& group, CommKind kind, int64_t bytes);
  void clear() { counts_.clear(); }
  const std::map<Key, CommCount>& counts() const { return counts_; }
  /// Zero where there was no such call.
  CommCount count(const std::string& group, CommKind kind) const;
  int64_t total_bytes() const;

 private:
  std::map<Key, CommCount> counts_;
};

}  // namespace tessera
