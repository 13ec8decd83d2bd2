#include "step/simulate_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "core/error.h"

namespace tessera {
namespace {

constexpr MachineRates kHostRates = {.flops = 2e11,
                                     .memory_bytes = 2e10,
                                     .link_bytes = 4e9,
                                     .exchange_seconds = 2e-5,
                                     .kernel_seconds = 1e-6};
constexpr MachineRates kGpuRates = {.flops = 5e14,
                                    .memory_bytes = 2.5e12,
                                    .link_bytes = 1.5e11,
                                    .exchange_seconds = 1.5e-5,
                                    .kernel_seconds = 2e-6};

/// The exchanges that some ranks start in one order: each begins when all have come to it.
class Channel {
 public:
  void join(size_t member) { started_.try_emplace(member); }
  /// Returns the number of the member's exchange.
  size_t start(size_t member, double time, double seconds) {
    std::vector<double>& own = started_[member];
    own.push_back(time);
    if (seconds_.size() < own.size()) seconds_.push_back(0);
    seconds_[own.size() - 1] = std::max(seconds_[own.size() - 1], seconds);
    return own.size() - 1;
  }
  /// Nothing while a member has not come to it.
  std::optional<TaskTime> find(size_t number) {
    while (times_.size() <= number) {
      double begin = times_.empty() ? 0 : times_.back().end;
      for (const auto& [member, times] : started_) {
        if (times.size() <= times_.size()) return std::nullopt;
        begin = std::max(begin, times[times_.size()]);
      }
      times_.push_back({begin, begin + seconds_[times_.size()]});
    }
    return times_[number];
  }

 private:
  std::map<size_t, std::vector<double>> started_;  // by member
  std::vector<double> seconds_;
  std::vector<TaskTime> times_;
};

class Simulation {
 public:
  Simulation(std::span<const StepPlan> plans, const MachineRates& rates)
      : plans_(plans), rates_(rates), ranks_(plans.size()) {
    for (size_t i = 0; i < plans.size(); ++i) join_channels(i);
    for (size_t i = 0; i < plans.size(); ++i) ranks_[i].times = PlanTimes(plans[i].tasks.size());
  }

  std::vector<PlanTimes> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t i = 0; i < plans_.size(); ++i) {
        while (!is_done(i) && advance(i)) moved = true;
      }
    }
    check_end();
    std::vector<PlanTimes> times;
    for (Rank& rank : ranks_) times.push_back(std::move(rank.times));
    return times;
  }

 private:
  /// A group's lane, or one direction of its messages; `from` is -1 for the former.
  using Key = std::tuple<std::string, std::vector<int64_t>, int64_t, int64_t>;
  struct Started {
    Channel* channel = nullptr;
    size_t number = 0;
  };
  struct Rank {
    size_t next = 0;  ///< task
    double now = 0;
    bool arrived = false;  ///< at the next task, which waits for others
    std::map<TaskId, std::vector<Started>> started;
    std::map<LaneId, double> copied;  ///< when what a lane of copies was given is done
    PlanTimes times;
  };

  bool is_done(size_t i) const { return ranks_[i].next == plans_[i].tasks.size(); }

  Key key_of(const StepPlan& plan, LaneId id, const Task& task) const {
    const Lane& lane = plan.lanes[id];
    if (lane.kind != LaneKind::kMessages) return {lane.name, lane.ranks, -1, -1};
    const int64_t peer = lane.ranks.at(task.subject.peer);
    const bool sends = task.kind == TaskKind::kSend;
    return {lane.name, lane.ranks, sends ? plan.rank : peer, sends ? peer : plan.rank};
  }

  static bool communicates(const StepPlan& plan, LaneId lane) {
    return plan.lanes[lane].kind == LaneKind::kGroup ||
           plan.lanes[lane].kind == LaneKind::kMessages;
  }

  /// Who has a plan and is of a group is waited for, whatever it does.
  void join_channels(size_t i) {
    for (const Task& task : plans_[i].tasks) {
      if (communicates(plans_[i], task.lane)) channels_[key_of(plans_[i], task.lane, task)].join(i);
      for (const InnerExchanges& inner : task.inside)
        channels_[key_of(plans_[i], inner.lane, task)].join(i);
    }
  }

  double exchange_seconds(double bytes) const {
    return rates_.exchange_seconds + bytes / rates_.link_bytes;
  }

  std::vector<Started> start(size_t i, const Task& task) {
    std::vector<Started> started;
    const auto add = [&](LaneId lane, double seconds) {
      Channel& channel = channels_[key_of(plans_[i], lane, task)];
      started.push_back({&channel, channel.start(i, ranks_[i].now, seconds)});
    };
    if (communicates(plans_[i], task.lane))
      add(task.lane, exchange_seconds(static_cast<double>(task.bytes)));
    for (const InnerExchanges& inner : task.inside) {
      add(inner.lane, static_cast<double>(inner.count) * rates_.exchange_seconds +
                          static_cast<double>(inner.bytes) / rates_.link_bytes);
    }
    return started;
  }

  /// From the first to the last of exchanges; nothing while one is not known.
  static std::optional<TaskTime> find(const std::vector<Started>& started) {
    std::optional<TaskTime> all;
    for (const Started& one : started) {
      const std::optional<TaskTime> time = one.channel->find(one.number);
      if (!time) return std::nullopt;
      if (!all) all = time;
      all->begin = std::min(all->begin, time->begin);
      all->end = std::max(all->end, time->end);
    }
    return all;
  }

  double work_seconds(const StepPlan& plan, const Task& task) const {
    if (communicates(plan, task.lane)) return 0;
    return std::max(task.flops / rates_.flops,
                    static_cast<double>(task.bytes) / rates_.memory_bytes);
  }

  /// Does the rank's next task; false where it has to wait.
  bool advance(size_t i) {
    Rank& rank = ranks_[i];
    const auto id = static_cast<TaskId>(rank.next);
    const Task& task = plans_[i].tasks[id];
    TaskTime& time = rank.times[id];
    if (task.phase == TaskPhase::kStart && communicates(plans_[i], task.lane)) {
      rank.started[id] = start(i, task);
      time = {rank.now, rank.now};
    } else if (copies_beside(plans_[i], task.lane)) {
      copy(i, task, time);
    } else if (task.phase == TaskPhase::kWait) {
      if (!wait(rank, *task.started_by, time)) return false;
    } else if (!work(i, task, time)) {
      return false;
    }
    ++rank.next;
    return true;
  }

  static bool copies_beside(const StepPlan& plan, LaneId lane) {
    return plan.lanes[lane].kind == LaneKind::kStores ||
           plan.lanes[lane].kind == LaneKind::kReloads;
  }

  /// Copies follow those of their lane, beside all else.
  void copy(size_t i, const Task& task, TaskTime& time) {
    Rank& rank = ranks_[i];
    if (task.phase == TaskPhase::kWait) {
      time.begin = rank.now;
      time.end = rank.now = std::max(rank.now, rank.times[*task.started_by].end);
      return;
    }
    double& done = rank.copied[task.lane];
    time.begin = std::max(done, rank.now);
    time.end = done = time.begin + static_cast<double>(task.bytes) / rates_.host_bytes;
  }

  static bool wait(Rank& rank, TaskId start, TaskTime& time) {
    time.begin = time.end = rank.now;
    const auto started = rank.started.find(start);
    // Of the step before, or what the rank's own device did in the order of the tasks.
    if (started == rank.started.end() || started->second.empty()) return true;
    const std::optional<TaskTime> exchange = find(started->second);
    if (!exchange) return false;
    rank.times[start] = *exchange;
    time.end = rank.now = std::max(rank.now, exchange->end);
    return true;
  }

  bool work(size_t i, const Task& task, TaskTime& time) {
    Rank& rank = ranks_[i];
    std::vector<Started>& started = rank.started[static_cast<TaskId>(rank.next)];
    if (!rank.arrived) started = start(i, task);
    rank.arrived = true;
    time.begin = rank.now;
    if (!started.empty()) {
      const std::optional<TaskTime> exchange = find(started);
      if (!exchange) return false;
      rank.now = std::max(rank.now, exchange->end);
    }
    rank.arrived = false;
    time.end = rank.now += work_seconds(plans_[i], task);
    return true;
  }

  void check_end() const {
    std::string stuck;
    for (size_t i = 0; i < plans_.size(); ++i) {
      if (is_done(i)) continue;
      stuck += fmt::format("{} rank {} at '{}'", stuck.empty() ? "" : ",", plans_[i].rank,
                           plans_[i].tasks[static_cast<TaskId>(ranks_[i].next)].name);
    }
    ensure(stuck.empty(), "step plan: ranks wait forever:{}", stuck);
  }

  std::span<const StepPlan> plans_;
  const MachineRates& rates_;
  std::vector<Rank> ranks_;
  std::map<Key, Channel> channels_;
};

}  // namespace

MachineRates estimated_rates(bool on_host) {
  return on_host ? kHostRates : kGpuRates;
}

std::vector<PlanTimes> simulate_plans(std::span<const StepPlan> plans, const MachineRates& rates) {
  return Simulation(plans, rates).run();
}

}  // namespace tessera
