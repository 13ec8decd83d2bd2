#include "step/check_plan.h"

#include <algorithm>
#include <map>
#include <optional>

#include "step/simulate_plan.h"

namespace tessera {
namespace {

/// Walks through a plan with what its buffers hold.
class PlanChecker {
 public:
  explicit PlanChecker(const StepPlan& plan)
      : plan_(plan),
        waits_(find_waits(plan)),
        lives_(find_lives(plan)),
        written_(plan.buffers.size(), 0),
        under_way_(plan.buffers.size()),
        occupants_(plan.storages.size()) {
    for (const BufferId id : plan.buffers.ids()) {
      const StepBuffer& buffer = plan.buffers[id];
      ensure(buffer.bytes <= plan.storages[buffer.storage].bytes,
             "step plan: '{}' of {} bytes is in '{}', which has {}", buffer.name, buffer.bytes,
             plan.storages[buffer.storage].name, plan.storages[buffer.storage].bytes);
      if (!buffer.outlives) continue;
      written_[id] = 1;
      occupants_[buffer.storage] = id;
    }
    for (const TaskId id : plan.tasks.ids()) {
      if (is_carried(id)) begin_exchange(*plan_.tasks[id].started_by);
    }
  }

  void check() {
    for (const TaskId id : plan_.tasks.ids()) check_task(id);
    check_shared_memory();
  }

 private:
  const Task& at(TaskId id) const { return plan_.tasks[id]; }
  const std::string& name(BufferId id) const { return plan_.buffers[id].name; }
  /// Whether the task waits for what the step before started.
  bool is_carried(TaskId id) const {
    return at(id).phase == TaskPhase::kWait && *at(id).started_by > id;
  }

  void begin_exchange(TaskId start) {
    for (const BufferId id : at(start).reads) under_way_[id].push_back(start);
    for (const BufferId id : at(start).writes) under_way_[id].push_back(start);
  }
  void end_exchange(TaskId start) {
    for (const auto* ids : {&at(start).reads, &at(start).writes}) {
      for (const BufferId id : *ids) std::erase(under_way_[id], start);
    }
  }

  void check_task(TaskId id) {
    const Task& task = at(id);
    for (const TaskId before : task.after) {
      ensure(before < id, "step plan: '{}' comes before '{}', which it depends on", task.name,
             plan_.tasks.holds(before) ? at(before).name : "a task that is not there");
    }
    if (task.phase == TaskPhase::kWait) end_exchange(*task.started_by);
    for (const BufferId buffer : task.reads) check_read(task, buffer);
    for (const BufferId buffer : task.writes) check_write(id, buffer);
    if (task.phase == TaskPhase::kStart) {
      begin_exchange(id);
      return;
    }
    for (const BufferId buffer : task.writes) written_[buffer] = 1;
  }

  void check_read(const Task& task, BufferId buffer) const {
    for (const TaskId start : under_way_[buffer]) {
      ensure(!contains(at(start).writes, buffer),
             "step plan: '{}' reads '{}' while '{}' is under way, which writes it", task.name,
             name(buffer), at(start).name);
    }
    ensure(written_[buffer] != 0, "step plan: '{}' reads '{}', which nothing has written",
           task.name, name(buffer));
    const std::optional<BufferId> occupant = occupants_[plan_.buffers[buffer].storage];
    ensure(occupant == buffer, "step plan: '{}' reads '{}', which '{}' has overwritten", task.name,
           name(buffer), occupant ? name(*occupant) : "nothing");
  }

  void check_write(TaskId id, BufferId buffer) {
    const Task& task = at(id);
    for (const TaskId start : under_way_[buffer]) {
      ensure(task.phase == TaskPhase::kWait && start == *task.started_by,
             "step plan: '{}' writes '{}' while '{}' is under way", task.name, name(buffer),
             at(start).name);
    }
    std::optional<BufferId>& occupant = occupants_[plan_.buffers[buffer].storage];
    if (occupant && *occupant != buffer) {
      ensure(lives_[*occupant].last < id,
             "step plan: '{}' overwrites '{}' with '{}' before its last reader '{}'", task.name,
             name(*occupant), name(buffer), at(lives_[*occupant].last).name);
    }
    occupant = buffer;
  }

  /// Buffers of storages that overlap in memory are never alive at the same time.
  void check_shared_memory() const {
    std::vector<BufferId> placed;
    for (const BufferId id : plan_.buffers.ids()) {
      const StepStorage& storage = plan_.storages[plan_.buffers[id].storage];
      if (storage.offset && storage.bytes > 0) placed.push_back(id);
    }
    std::ranges::sort(placed, {}, [&](BufferId id) { return lives_[id].first; });
    std::vector<BufferId> alive;
    for (const BufferId id : placed) {
      std::erase_if(alive, [&](BufferId other) { return lives_[other].last < lives_[id].first; });
      for (const BufferId other : alive) check_apart(id, other);
      alive.push_back(id);
    }
  }

  void check_apart(BufferId one, BufferId other) const {
    const StepStorage& a = plan_.storages[plan_.buffers[one].storage];
    const StepStorage& b = plan_.storages[plan_.buffers[other].storage];
    const bool apart = a.purpose != b.purpose || *a.offset + a.bytes <= *b.offset ||
                       *b.offset + b.bytes <= *a.offset;
    ensure(apart, "step plan: '{}' and '{}' are alive together and share memory", name(one),
           name(other));
  }

  static bool contains(const std::vector<BufferId>& buffers, BufferId buffer) {
    return std::ranges::find(buffers, buffer) != buffers.end();
  }

  const StepPlan& plan_;
  IdVector<TaskId, std::optional<TaskId>> waits_;
  IdVector<BufferId, BufferLife> lives_;
  IdVector<BufferId, uint8_t> written_;
  IdVector<BufferId, std::vector<TaskId>> under_way_;  // exchanges that use the buffer
  IdVector<StorageId, std::optional<BufferId>> occupants_;
};

using NamedGroup = std::pair<std::string, std::vector<int64_t>>;

NamedGroup key_of(const StepPlan& plan, LaneId lane) {
  return {plan.lanes[lane].name, plan.lanes[lane].ranks};
}

/// What a rank starts in each of its groups, in order.
std::map<NamedGroup, std::vector<std::string>> list_exchanges(const StepPlan& plan) {
  std::map<NamedGroup, std::vector<std::string>> exchanges;
  for (const Task& task : plan.tasks) {
    if (task.phase == TaskPhase::kWait) continue;
    if (plan.lanes[task.lane].kind == LaneKind::kGroup)
      exchanges[key_of(plan, task.lane)].push_back(task.name);
    for (const InnerExchanges& inner : task.inside) {
      exchanges[key_of(plan, inner.lane)].push_back(
          fmt::format("{} ({} exchanges)", task.name, inner.count));
    }
  }
  return exchanges;
}

void check_orders(std::span<const StepPlan> plans) {
  std::vector<std::map<NamedGroup, std::vector<std::string>>> of_plans;
  std::map<NamedGroup, size_t> first;  // plan that has exchanges in the group
  for (size_t p = 0; p < plans.size(); ++p) {
    of_plans.push_back(list_exchanges(plans[p]));
    for (const auto& [group, own] : of_plans.back()) first.try_emplace(group, p);
  }
  for (const auto& [group, p] : first) {
    const std::vector<std::string>& there = of_plans[p][group];
    for (size_t q = 0; q < plans.size(); ++q) {
      if (std::ranges::find(group.second, plans[q].rank) == group.second.end()) continue;
      const std::vector<std::string>& here = of_plans[q][group];
      const auto [a, b] = std::ranges::mismatch(here, there);
      ensure(a == here.end() && b == there.end(),
             "step plan: exchange {} of group '{}' is '{}' on rank {} and '{}' on rank {}",
             a - here.begin(), group.first, a == here.end() ? "nothing" : *a, plans[q].rank,
             b == there.end() ? "nothing" : *b, plans[p].rank);
    }
  }
}

/// One direction between two ranks of a group.
struct Direction {
  std::string group;
  int64_t from = 0;
  int64_t to = 0;
  auto operator<=>(const Direction&) const = default;
};

using Messages = std::map<Direction, std::vector<std::string>>;

void list_messages(const StepPlan& plan, Messages& sends, Messages& receives) {
  for (const Task& task : plan.tasks) {
    const bool sent = task.kind == TaskKind::kSend;
    if (task.phase != TaskPhase::kStart || (!sent && task.kind != TaskKind::kReceive)) continue;
    const Lane& lane = plan.lanes[task.lane];
    const int64_t peer = lane.ranks.at(task.subject.peer);
    const BufferId buffer = sent ? task.reads.at(0) : task.writes.at(0);
    (sent ? sends[{lane.name, plan.rank, peer}] : receives[{lane.name, peer, plan.rank}])
        .push_back(fmt::format("stream {} of micro-batch {} with {} bytes", task.subject.stream,
                               task.subject.micro_batch, plan.buffers[buffer].bytes));
  }
}

void check_messages(std::span<const StepPlan> plans) {
  Messages sends, receives;
  for (const StepPlan& plan : plans) list_messages(plan, sends, receives);
  for (const auto& [direction, sent] : sends) {
    const std::vector<std::string>& received = receives[direction];
    for (size_t i = 0; i < std::max(sent.size(), received.size()); ++i) {
      const std::string none = "nothing";
      ensure(i < sent.size() && i < received.size() && sent[i] == received[i],
             "step plan: message {} of group '{}' from rank {} to rank {} is sent as {} and "
             "received as {}",
             i, direction.group, direction.from, direction.to, i < sent.size() ? sent[i] : none,
             i < received.size() ? received[i] : none);
    }
  }
  for (const auto& [direction, received] : receives) {
    ensure(received.empty() || sends.contains(direction),
           "step plan: rank {} receives from rank {} what that does not send", direction.to,
           direction.from);
  }
}

}  // namespace

void check_plan(const StepPlan& plan) {
  PlanChecker(plan).check();
}

void check_ranks(std::span<const StepPlan> plans) {
  for (const StepPlan& plan : plans) check_plan(plan);
  check_orders(plans);
  check_messages(plans);
  simulate_plans(plans, {});
}

}  // namespace tessera
