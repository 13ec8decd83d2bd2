#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/statistics.h"
#include "train/metrics/step_record.h"
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
  std::string machine = {};
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
  /// The same by what they went over: a group's name, with "between machines" where it has several.
  std::map<std::string, double> by_link;
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

/// What came to the experts of one of the ranks that share them.
struct RankLoad {
  double share = 1;      ///< its rows in those of the mean rank, all layers together
  int64_t layer = 0;     ///< of the expert that is the farthest above the mean of its layer...
  int64_t expert = 0;    ///< ... its number...
  double of_expert = 0;  ///< ... and its rows in those of a mean one
};
/// Of the rank at `place` of so many that hold equally many experts each, in their order.
RankLoad find_load(const std::vector<ExpertLoad>& layers, int64_t place, int64_t num_ranks);

/// Why the rank that was waited for most came late, as far as its experts tell: "rank 3 had 1.62
/// times the mean's rows for its experts; expert 12 of layer 5 alone had 4.1 times a mean one's".
/// Nothing where they had hardly more than others, or others wait elsewhere.
std::string explain(const WaitReport& report, const std::vector<ExpertLoad>& layers,
                    const Layout& layout);

}  // namespace tessera
