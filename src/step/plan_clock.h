#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/statistics.h"
#include "step/link_queues.h"
#include "step/step_plan.h"

namespace tessera {

/// When a task does its work, in seconds; of a start, from there to the end of the exchange.
struct TaskTime {
  double begin = 0;
  double end = 0;
};
using PlanTimes = IdVector<TaskId, TaskTime>;

/// A group's exchanges, which all its ranks start in the same order.
struct GroupKey {
  std::string name;
  std::vector<int64_t> ranks;                         ///< in the world
  auto operator<=>(const GroupKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// What a program's run does next: computes, starts an exchange, waits for one that it started, or
/// has the host wait for all that the device was given.
struct ProgramMoment {
  enum class Kind : uint8_t { kCompute, kStart, kWait, kHostWait };
  Kind kind = Kind::kCompute;
  double seconds = 0;  ///< of the work, or of the exchange once all have come to it
  /// kCompute, kStart: of the host, which gives the device its work before that is done.
  double host_seconds = 0;
  /// kCompute: from where the host begins to give it to where a device that waits for nothing else
  /// is done; of several operators more than either's seconds.
  double launched_seconds = 0;
  int32_t exchange = 0;  ///< kStart, kWait: its number in the run, all parts, counted from 0
  int32_t group = 0;     ///< kStart: of ProgramTimes::groups
  CommKind comm = CommKind::kAllReduce;  ///< kStart
  double bytes = 0;                      ///< kStart: of what this rank brings
  LinkKind link = LinkKind::kOwn;        ///< kStart: that it passes
};

/// A program's run on the clock, or a part of it, the same for all its runs.
struct ProgramTimes {
  std::vector<ProgramMoment> moments;
  std::vector<GroupKey> groups;
  std::map<std::string, double> by_operator = {};  ///< seconds of computation
};

/// What a task takes by itself: seconds of its lane; of a run the moments of its program.
struct TaskWork {
  double seconds = 0;
  std::shared_ptr<const ProgramTimes> program = nullptr;
  CommKind comm = CommKind::kAllReduce;  ///< of an exchange in the lane's group
  double bytes = 0;                      ///< of an exchange or message: of what this rank brings
  LinkKind link = LinkKind::kOwn;        ///< that an exchange passes
};
using PlanWork = IdVector<TaskId, TaskWork>;

/// Where a rank's time went, in seconds of the compute lane.
struct RankClock {
  PlanTimes times;
  double end = 0;
  double computed = 0;
  /// Waits, by the name of the lane whose exchange or message it was, for ranks that came later...
  std::map<std::string, double> waited_for_ranks;
  /// ... and for what is on the way when all have come.
  std::map<std::string, double> waited_for_wires;
  double waited_for_copies = 0;  ///< to or from the host's memory, and for updates there
  double waited_for_host = 0;    ///< until it gave the device what comes next
  /// Seconds in which exchanges of a lane were under way, exposed or not.
  std::map<std::string, double> exchanged;
};

struct ClockOptions {
  /// The share of a device that an exchange under way takes from computation.
  double exchange_share = 0;
  /// Processors for each rank, where ranks share those of their node: of n plans, a compute at the
  /// same time at min(1, processor_share · n / a) of their speed. From 1 on each has its own.
  double processor_share = 1;
  /// Groups by name whose exchanges are waited for where they start: "ep" stands for "ep_inner" and
  /// "ep.inner" too. Messages are sent beside all else in any case.
  std::vector<std::string> exposed = {};
  /// Whether the host updates beside the device's work, and is not itself the device.
  bool updates_beside = true;
};

/// Runs the plans of ranks side by side, each from its first task to its last, `works[i]` saying
/// what the tasks of plans[i] take. An exchange begins when all its ranks that have a plan here
/// started it, and those of one group follow one another; a message when both its ends did. Groups
/// of which one rank alone has a plan share links (LinkQueues). Ranks that are equal need one plan
/// among them. Throws InternalError where ranks wait forever, with the
/// tasks at which they stand.
std::vector<RankClock> run_clocks(std::span<const StepPlan> plans, std::span<const PlanWork> works,
                                  const ClockOptions& options = {});

/// Whether tasks of the lane are exchanges or messages between ranks.
bool communicates(const Lane& lane);
/// Whether they go on beside the device's work, without it: copies to and from the host's memory,
/// and what its threads do with these.
bool goes_beside(const Lane& lane);

}  // namespace tessera
