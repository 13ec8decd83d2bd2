#include "step/plan_writer.h"

#include <algorithm>
#include <array>

namespace tessera {
namespace {

void insert(std::vector<BufferId>& buffers, BufferId buffer) {
  if (std::ranges::find(buffers, buffer) == buffers.end()) buffers.push_back(buffer);
}

std::string_view lane_name(LaneKind kind) {
  constexpr std::array<std::string_view, 10> kNames = {
      "compute",   "",     "",       "copies in", "copies out",
      "optimizer", "host", "stores", "reloads",   "host updates"};
  return kNames[number_of(kind)];
}

std::string wait_name(const Task& start) {
  return "wait: " + start.name;
}

}  // namespace

void read(Task& task, BufferId buffer) {
  insert(task.reads, buffer);
}

void write(Task& task, BufferId buffer) {
  insert(task.writes, buffer);
}

void update(Task& task, BufferId buffer) {
  read(task, buffer);
  write(task, buffer);
}

LaneId PlanWriter::find_lane(LaneKind kind, std::string_view name,
                             const std::vector<int64_t>& ranks) {
  const auto found = std::ranges::find_if(plan_.lanes, [&](const Lane& other) {
    return other.kind == kind && other.name == name && other.ranks == ranks;
  });
  if (found != plan_.lanes.end()) return static_cast<LaneId>(found - plan_.lanes.begin());
  return plan_.lanes.add({.kind = kind, .name = std::string(name), .ranks = ranks});
}

LaneId PlanWriter::lane(LaneKind kind) {
  return find_lane(kind, lane_name(kind), {});
}

LaneId PlanWriter::group(const Communicator& group, LaneKind kind) {
  return find_lane(kind, group.name(), group.ranks());
}

BufferId PlanWriter::buffer(const std::string& name, int64_t bytes, const StepStorage& storage) {
  const auto known = buffers_.find(name);
  if (known != buffers_.end()) return known->second;
  const auto place = storages_.find(storage.name);
  const StorageId id =
      place != storages_.end()
          ? place->second
          : storages_.emplace(storage.name, plan_.storages.add(storage)).first->second;
  const BufferId made = plan_.buffers.add({.name = name, .bytes = bytes, .storage = id});
  buffers_.emplace(name, made);
  return made;
}

BufferId PlanWriter::state(const std::string& name, int64_t bytes, Home home, Purpose purpose) {
  const BufferId id =
      buffer(name, bytes, {.name = name, .bytes = bytes, .purpose = purpose, .home = home});
  plan_.buffers[id].outlives = true;
  return id;
}

TaskId PlanWriter::start(Task task) {
  task.phase = TaskPhase::kStart;
  return add(std::move(task));
}

TaskId PlanWriter::wait_for(TaskId start) {
  Task wait = plan_.tasks[start];
  wait.phase = TaskPhase::kWait;
  wait.name = wait_name(wait);
  wait.bytes = 0;
  wait.after.clear();
  wait.inside.clear();
  wait.started_by = start;
  return add(std::move(wait));
}

void PlanWriter::set_start(TaskId wait, TaskId start) {
  plan_.tasks[wait].started_by = start;
}

}  // namespace tessera
