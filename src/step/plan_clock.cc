#include "step/plan_clock.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

/// The exchanges that some ranks start in one order: each begins when all have come to it.
class Channel {
 public:
  void join(size_t member) { started_.try_emplace(member); }
  bool has_one_member() const { return started_.size() == 1; }
  /// Its place among what its only member shares links with.
  size_t queue_of(LinkQueues& links) {
    if (!queue_) queue_ = links.add_queue();
    return *queue_;
  }
  /// Returns the number of the member's exchange.
  size_t start(size_t member, double time, double seconds) {
    std::vector<double>& own = started_[member];
    own.push_back(time);
    if (seconds_.size() < own.size()) seconds_.push_back(0);
    seconds_[own.size() - 1] = std::max(seconds_[own.size() - 1], seconds);
    return own.size() - 1;
  }
  /// Nothing while a member has not come to it.
  std::optional<ExchangeTime> find(size_t number) {
    while (times_.size() <= number) {
      double came = 0;
      for (const auto& [member, times] : started_) {
        if (times.size() <= times_.size()) return std::nullopt;
        came = std::max(came, times[times_.size()]);
      }
      const double begin = times_.empty() ? came : std::max(came, times_.back().end);
      times_.push_back({came, begin, begin + seconds_[times_.size()]});
    }
    return times_[number];
  }

 private:
  std::map<size_t, std::vector<double>> started_;  // by member
  std::vector<double> seconds_;
  std::vector<ExchangeTime> times_;
  std::optional<size_t> queue_;
};

/// An exchange that a rank started.
struct Started {
  Channel* channel = nullptr;
  const LinkQueues* links = nullptr;  ///< that know it in place of the channel
  size_t number = 0;
  const std::string* lane = nullptr;
  bool counted = false;  ///< among what was exchanged

  std::optional<ExchangeTime> find() const {
    return links != nullptr ? links->find(number) : channel->find(number);
  }
};

/// Work on shared processors.
struct Computation {
  double begin = 0;
  double left = 0;  ///< seconds on a processor of its own
};

/// A rank on its way through its plan.
struct Rank {
  size_t next = 0;     ///< task
  bool begun = false;  ///< that task
  double now = 0;
  double host = 0;    ///< when the host has given the device all of before
  size_t moment = 0;  ///< of the next task's program
  std::optional<Computation> computing;
  /// Exchanges of the runs under way, by chunk and place; of other tasks by -1.
  std::map<std::pair<int64_t, int64_t>, std::vector<Started>> inside;
  std::map<TaskId, std::vector<Started>> started;  ///< by the tasks that are or start them
  std::map<LaneId, double> copied;                 ///< when what a lane of copies was given is done
  /// When what the step before left under way is waited for, by its start.
  std::map<TaskId, double> carried;
  std::vector<std::pair<double, double>> wires;  ///< exchanges that end after now, as far as known
  LinkQueues links;                              ///< of groups of which no other rank has a plan
  RankClock clock;
};

class Clocks {
 public:
  Clocks(std::span<const StepPlan> plans, std::span<const PlanWork> works,
         const ClockOptions& options)
      : plans_(plans), works_(works), options_(options), ranks_(plans.size()) {
    for (size_t i = 0; i < plans.size(); ++i) {
      join_channels(i);
      ranks_[i].clock.times = PlanTimes(plans[i].tasks.size());
    }
  }

  std::vector<RankClock> run() {
    do {
      for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < plans_.size(); ++i) moved = go_on(i) || moved;
      }
    } while (share_processors());
    check_end();
    std::vector<RankClock> clocks;
    for (Rank& rank : ranks_) {
      add_carried(rank);
      rank.clock.end = rank.now;
      clocks.push_back(std::move(rank.clock));
    }
    return clocks;
  }

 private:
  /// Runs a rank as far as it comes; false where that is not one step further, of a program
  /// neither.
  bool go_on(size_t i) {
    const Rank& rank = ranks_[i];
    const std::pair from(rank.next, rank.moment);
    while (!is_done(i) && advance(i)) {
    }
    return std::pair(rank.next, rank.moment) != from;
  }

  /// A group's lane, or one direction of its messages; both ends are -1 for the former.
  using Key = std::tuple<GroupKey, int64_t, int64_t>;

  bool is_done(size_t i) const { return ranks_[i].next == plans_[i].tasks.size(); }

  static Key key_of(const StepPlan& plan, LaneId id, const Task& task) {
    const Lane& lane = plan.lanes[id];
    if (lane.kind != LaneKind::kMessages) return {{lane.name, lane.ranks}, -1, -1};
    const int64_t peer = lane.ranks.at(task.subject.peer);
    const bool sends = task.kind == TaskKind::kSend;
    return {{lane.name, lane.ranks}, sends ? plan.rank : peer, sends ? peer : plan.rank};
  }

  /// Who has a plan and is of a group is waited for, whatever it does.
  void join_channels(size_t i) {
    const StepPlan& plan = plans_[i];
    for (const TaskId id : plan.tasks.ids()) {
      const Task& task = plan.tasks[id];
      if (communicates(plan.lanes[task.lane])) channels_[key_of(plan, task.lane, task)].join(i);
      if (works_[i][id].program == nullptr) continue;
      for (const GroupKey& group : works_[i][id].program->groups)
        channels_[{group, -1, -1}].join(i);
    }
  }

  Started start(size_t i, const Key& key, double seconds, LinkKind link) {
    const auto found = channels_.find(key);
    Channel& channel = found->second;
    const std::string* const lane = &std::get<0>(found->first).name;
    Rank& rank = ranks_[i];
    if (link != LinkKind::kOwn && channel.has_one_member()) {
      const size_t number = rank.links.start(channel.queue_of(rank.links), link, rank.now, seconds);
      return {.channel = &channel, .links = &rank.links, .number = number, .lane = lane};
    }
    return {.channel = &channel, .number = channel.start(i, rank.now, seconds), .lane = lane};
  }

  /// Whether nothing is computed beside the exchanges of such a lane.
  bool is_exposed(std::string_view lane) const {
    return std::ranges::any_of(options_.exposed, [&](const std::string& name) {
      return lane.starts_with(name) &&
             (lane.size() == name.size() || lane[name.size()] == '_' || lane[name.size()] == '.');
    });
  }

  /// Lets those that compute go on until the first of them is done or another joins them; false
  /// where none computes.
  bool share_processors() {
    constexpr double kNever = std::numeric_limits<double>::infinity();
    double now = kNever;
    for (const Rank& rank : ranks_) {
      if (rank.computing) now = std::min(now, rank.now);
    }
    if (now == kNever) return false;
    std::vector<Rank*> active;
    double joined = kNever;
    double least = kNever;
    for (Rank& rank : ranks_) {
      if (!rank.computing) continue;
      if (rank.now > now) {
        joined = std::min(joined, rank.now);
        continue;
      }
      active.push_back(&rank);
      least = std::min(least, rank.computing->left);
    }
    const auto count = static_cast<double>(active.size());
    const double speed =
        std::min(1.0, options_.processor_share * static_cast<double>(plans_.size()) / count);
    const double until = std::min(joined, now + least / speed);
    for (Rank* rank : active) {
      double& left = rank->computing->left;
      left = until < joined ? left - least : std::max(left - (until - now) * speed, 0.0);
      rank->now = until;
    }
    return true;
  }

  /// Computes, slowed by exchanges that are known to be under way. False until it is done, where
  /// processors are shared.
  bool compute(Rank& rank, double seconds) const {
    if (rank.computing) {
      if (rank.computing->left > 0) return false;
      rank.clock.computed += rank.now - rank.computing->begin;
      rank.computing.reset();
      return true;
    }
    std::erase_if(rank.wires, [&](const auto& wire) { return wire.second <= rank.now; });
    double shared = 0;
    for (const auto& [begin, end] : rank.wires) {
      const double from = std::max(begin, rank.now);
      const double to = std::min(end, rank.now + seconds);
      shared = std::max(shared, to - from);
    }
    const double slowed = seconds + options_.exchange_share * shared;
    if (options_.processor_share < 1 && slowed > 0) {
      rank.computing = {.begin = rank.now, .left = slowed};
      return false;
    }
    rank.clock.computed += slowed;
    rank.now += slowed;
    return true;
  }

  /// The device has nothing to do before.
  static void wait_for_host(Rank& rank, double given) {
    rank.clock.waited_for_host += std::max(given - rank.now, 0.0);
    rank.now = std::max(rank.now, given);
  }

  /// Computes what the host gives the device operator by operator, ahead of it where it can.
  bool compute(Rank& rank, const ProgramMoment& moment) const {
    if (!compute(rank, moment.seconds)) return false;
    if (moment.host_seconds <= 0) return true;
    wait_for_host(rank, rank.host + moment.launched_seconds);
    rank.host += moment.host_seconds;
    return true;
  }

  static void note(Rank& rank, Started& one, const ExchangeTime& time) {
    if (std::exchange(one.counted, true)) return;
    rank.clock.exchanged[*one.lane] += time.end - time.begin;
  }

  /// False where the others have not come.
  static bool wait(Rank& rank, Started& one, TaskTime& time) {
    const std::optional<ExchangeTime> exchange = one.find();
    if (!exchange) return false;
    note(rank, one, *exchange);
    time = {exchange->begin, exchange->end};
    const double late = std::max(exchange->came - rank.now, 0.0);
    if (late > 0) rank.clock.waited_for_ranks[*one.lane] += late;
    const double left = exchange->end - std::max(rank.now, exchange->came);
    if (left > 0) rank.clock.waited_for_wires[*one.lane] += left;
    rank.now = std::max(rank.now, exchange->end);
    return true;
  }

  void launch(Rank& rank, const Started& one) const {
    if (options_.exchange_share <= 0) return;
    const std::optional<ExchangeTime> known = one.find();
    if (known) rank.wires.emplace_back(known->begin, known->end);
  }

  /// False where it is waited for at once, and the others have not come.
  bool start_inside(size_t i, const ProgramTimes& program, const ProgramMoment& moment,
                    std::vector<Started>& inside) {
    Rank& rank = ranks_[i];
    const GroupKey& group = program.groups[moment.group];
    if (inside.size() == static_cast<size_t>(moment.exchange)) {
      rank.host += moment.host_seconds;
      if (moment.host_seconds > 0) wait_for_host(rank, rank.host);
      inside.push_back(start(i, {group, -1, -1}, moment.seconds, moment.link));
      launch(rank, inside.back());
    }
    TaskTime ignored;
    return !is_exposed(group.name) || wait(rank, inside.back(), ignored);
  }

  /// Goes on with the run of a program; false where it has to wait for others.
  bool run_program(size_t i, const Task& task, const ProgramTimes& program) {
    Rank& rank = ranks_[i];
    std::vector<Started>& inside = rank.inside[{task.subject.chunk, task.subject.place}];
    for (; rank.moment < program.moments.size(); ++rank.moment) {
      const ProgramMoment& moment = program.moments[rank.moment];
      TaskTime ignored;
      switch (moment.kind) {
        case ProgramMoment::Kind::kCompute:
          if (!compute(rank, moment)) return false;
          break;
        case ProgramMoment::Kind::kHostWait:
          rank.host = std::max(rank.host, rank.now);
          break;
        case ProgramMoment::Kind::kStart:
          if (!start_inside(i, program, moment, inside)) return false;
          break;
        case ProgramMoment::Kind::kWait:
          if (!wait(rank, inside.at(moment.exchange), ignored)) return false;
      }
    }
    return true;
  }

  /// Does the rank's next task; false where it has to wait.
  bool advance(size_t i) {
    Rank& rank = ranks_[i];
    const StepPlan& plan = plans_[i];
    const auto id = static_cast<TaskId>(rank.next);
    const Task& task = plan.tasks[id];
    const TaskWork& work = works_[i][id];
    TaskTime& time = rank.clock.times[id];
    if (is_beside(plan.lanes[task.lane])) {
      copy(rank, id, task, work.seconds, time);
    } else if (task.phase == TaskPhase::kWait) {
      if (!wait_for_start(rank, task, time)) return false;
    } else if (communicates(plan.lanes[task.lane])) {
      if (!exchange(i, id, time)) return false;
    } else {
      if (!std::exchange(rank.begun, true)) time.begin = rank.now;
      if (work.program != nullptr && !run_program(i, task, *work.program)) return false;
      if (work.seconds > 0 && !compute(rank, work.seconds)) return false;
      if (task.subject.part.is_last()) rank.inside.erase({task.subject.chunk, task.subject.place});
      time.end = rank.now;
    }
    ++rank.next;
    rank.begun = false;
    rank.moment = 0;
    return true;
  }

  bool is_beside(const Lane& lane) const {
    return goes_beside(lane) && (lane.kind != LaneKind::kHostUpdates || options_.updates_beside);
  }

  /// What goes beside all else follows its lane, and what it is to come after.
  static void copy(Rank& rank, TaskId id, const Task& task, double seconds, TaskTime& time) {
    if (task.phase == TaskPhase::kWait) {
      time.begin = rank.now;
      if (*task.started_by > id) rank.carried[*task.started_by] = rank.now;
      time.end = std::max(rank.now, rank.clock.times[*task.started_by].end);
      rank.clock.waited_for_copies += time.end - rank.now;
      rank.now = time.end;
      return;
    }
    double& done = rank.copied[task.lane];
    time.begin = std::max(done, rank.now);
    for (const TaskId before : task.after)
      time.begin = std::max(time.begin, rank.clock.times[before].end);
    time.end = done = time.begin + seconds;
  }

  /// Of steps one after the other each waits where the one before left more under way than it
  /// computes up to there: so much longer they are.
  static void add_carried(Rank& rank) {
    double late = 0;
    for (const auto& [start, waited] : rank.carried)
      late = std::max(late, rank.clock.times[start].end - rank.now - waited);
    rank.clock.waited_for_copies += late;
    rank.now += late;
  }

  /// What a task exchanges: in its lane's group and, where it has others, in those too.
  std::vector<Started> start_all(size_t i, const Task& task, const TaskWork& work) {
    Rank& rank = ranks_[i];
    std::vector<Started> all = {
        start(i, key_of(plans_[i], task.lane, task), work.seconds, work.link)};
    if (work.program != nullptr) {
      for (const ProgramMoment& moment : work.program->moments) {
        if (moment.kind == ProgramMoment::Kind::kStart) {
          all.push_back(
              start(i, {work.program->groups[moment.group], -1, -1}, moment.seconds, moment.link));
        }
      }
    }
    for (const Started& one : all) launch(rank, one);
    return all;
  }

  bool exchange(size_t i, TaskId id, TaskTime& time) {
    Rank& rank = ranks_[i];
    const Task& task = plans_[i].tasks[id];
    if (!rank.started.contains(id)) {
      rank.started[id] = start_all(i, task, works_[i][id]);
      time = {rank.now, rank.now};
    }
    std::vector<Started>& started = rank.started[id];
    const bool goes_on =
        task.phase == TaskPhase::kStart &&
        std::ranges::none_of(started, [&](const Started& one) { return is_exposed(*one.lane); });
    return goes_on || wait_all(rank, started, time);
  }

  /// `time` becomes that from the first to the last; false where the others have not come.
  static bool wait_all(Rank& rank, std::vector<Started>& started, TaskTime& time) {
    std::optional<TaskTime> whole;
    for (Started& one : started) {
      TaskTime exchange;
      if (!wait(rank, one, exchange)) return false;
      if (!whole) whole = exchange;
      whole = {std::min(whole->begin, exchange.begin), std::max(whole->end, exchange.end)};
    }
    time = *whole;
    return true;
  }

  static bool wait_for_start(Rank& rank, const Task& task, TaskTime& time) {
    time.begin = time.end = rank.now;
    const auto started = rank.started.find(*task.started_by);
    // Of the step before, or what the rank's own device did in the order of the tasks.
    if (started == rank.started.end()) return true;
    if (!wait_all(rank, started->second, rank.clock.times[*task.started_by])) return false;
    time.end = rank.now;
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
  std::span<const PlanWork> works_;
  ClockOptions options_;
  std::vector<Rank> ranks_;
  std::map<Key, Channel> channels_;
};

}  // namespace

bool communicates(const Lane& lane) {
  return lane.kind == LaneKind::kGroup || lane.kind == LaneKind::kMessages;
}

bool goes_beside(const Lane& lane) {
  return lane.kind == LaneKind::kStores || lane.kind == LaneKind::kReloads ||
         lane.kind == LaneKind::kHostUpdates;
}

std::vector<RankClock> run_clocks(std::span<const StepPlan> plans, std::span<const PlanWork> works,
                                  const ClockOptions& options) {
  ensure(plans.size() == works.size(), "step plan: {} plans with the work of {}", plans.size(),
         works.size());
  return Clocks(plans, works, options).run();
}

}  // namespace tessera
