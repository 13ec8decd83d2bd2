#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
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

/// One communication as its rank saw it, or as its device measured it, after it was complete.
struct CommEvent {
  using Clock = std::chrono::steady_clock;
  std::string group;
  CommKind kind = CommKind::kBarrier;
  int64_t bytes = 0;          ///< as CommCount's; of a receive those that came
  Clock::time_point begin;    ///< when it was started; on a device when that came to it
  Clock::time_point end;      ///< when the rank saw that it was complete; on a device its end there
  Clock::duration waited{0};  ///< how long the host did nothing but wait for it
};
using CommObserver = std::function<void(const CommEvent&)>;

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

  /// `observer` is told of each communication of several ranks that is started from now on, when it
  /// is complete, or a device's synchronisation has found out when it was; a null one ends that,
  /// also for those under way. It must not communicate.
  void observe(CommObserver observer) { observer_ = std::move(observer); }
  bool observed() const { return observer_ != nullptr; }
  void tell(const CommEvent& event) const {
    if (observer_) observer_(event);
  }

 private:
  std::map<Key, CommCount> counts_;
  CommObserver observer_;
};

}  // namespace tessera
