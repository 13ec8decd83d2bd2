#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/statistics.h"
#include "train/setup/replica_groups.h"

namespace tessera {

/// The ranks of each group that a rank communicates in, by name.
using GroupRanks = std::map<std::string, std::vector<int64_t>>;
GroupRanks list_group_ranks(const Settings& settings, const RunLayout& run);

/// One collective of a group as one of its ranks saw it, in seconds from a moment that all ranks
/// share.
struct TimedExchange {
  double begin = 0;
  double end = 0;
  double waited = 0;  ///< the last part of it, in which the rank did nothing else
};

/// A rank's waits, in the order in which it started them.
struct RankWaits {
  struct Group {
    std::vector<int64_t> ranks;
    std::vector<TimedExchange> exchanges;
  };
  int64_t rank = 0;
  std::map<std::string, Group> groups;
  double messages = 0;    ///< waits for pipeline messages
  double unassigned = 0;  ///< waits in groups whose ranks are not known
};

/// Whom waits were for. A rank's wait for an exchange is as long for the rank that came to it last
/// as that had not come; the rest is for the exchange itself.
struct WaitReport {
  struct Culprit {
    int64_t rank = 0;
    double seconds = 0;  ///< of all ranks together that waited for it
    std::map<std::string, double> by_group;
  };
  std::vector<Culprit> culprits;  ///< the most waited for first
  double exchanges = 0;           ///< waits when all had come
  double messages = 0;
  double unassigned = 0;
  double total() const;
};

/// The waits of one rank, from the communications that it was told of. `on_device`: their times are
/// a device's, where an exchange that has begun keeps what comes behind it waiting to its end.
RankWaits collect_waits(int64_t rank, const std::vector<CommEvent>& events,
                        CommEvent::Clock::time_point origin, const GroupRanks& groups,
                        bool on_device);

/// Exchanges number i of the ranks of a group are one. Where ranks have different numbers of a
/// group's, as at the ends of what was watched, its waits are unassigned.
WaitReport attribute_waits(const std::vector<RankWaits>& ranks);

/// All ranks call; rank 0 has the report of all.
WaitReport gather_waits(const RankWaits& own, Communicator& world);

/// "waits of 8 ranks in 2 steps: 0.512 s, of which for rank 3 0.401 s (ep 0.390 s, tp 0.011 s),
/// ..".
std::string describe(const WaitReport& report, int64_t num_ranks, int64_t num_steps);

}  // namespace tessera
