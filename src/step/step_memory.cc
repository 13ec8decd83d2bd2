#include "step/step_memory.h"

#include <algorithm>
#include <utility>

#include "core/memory.h"
#include "program/memory_plan.h"

namespace tessera {
namespace {

/// Bytes that become alive, and that were for the last time, by task.
struct Changes {
  explicit Changes(size_t num_tasks) : taken(num_tasks, 0), freed(num_tasks, 0) {}
  std::vector<int64_t> taken, freed;

  void add(const BufferLife& life, int64_t bytes) {
    taken[number_of(life.first)] += bytes;
    freed[number_of(life.last)] += bytes;
  }
  /// The most alive at a time, and when.
  std::pair<int64_t, size_t> find_most() const {
    int64_t now = 0;
    std::pair<int64_t, size_t> most = {0, 0};
    for (size_t i = 0; i < taken.size(); ++i) {
      now += taken[i];
      if (now > most.first) most = {now, i};
      now -= freed[i];
    }
    return most;
  }
};

size_t idx(Purpose purpose) {
  return number_of(purpose);
}

bool is_planned(const StepPlan& plan, const StepBuffer& buffer) {
  const StepStorage& storage = plan.storages[buffer.storage];
  return buffer.bytes > 0 && storage.home == Home::kDevice && storage.purpose != Purpose::kState;
}

}  // namespace

std::vector<int64_t> find_alive_bytes(const StepPlan& plan) {
  Changes changes(plan.tasks.size());
  const auto lives = find_lives(plan);
  for (const BufferId id : plan.buffers.ids()) {
    if (is_planned(plan, plan.buffers[id]))
      changes.add(lives[id], align_up(plan.buffers[id].bytes));
  }
  int64_t now = 0;
  std::vector<int64_t> alive;
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    alive.push_back(now += changes.taken[i]);
    now -= changes.freed[i];
  }
  return alive;
}

StepMemory find_step_memory(const StepPlan& plan) {
  StepMemory memory;
  for (const StepStorage& storage : plan.storages) {
    if (storage.home != Home::kDevice) continue;
    int64_t& slabs = memory.purposes[idx(storage.purpose)].slabs;
    slabs = storage.offset ? std::max(slabs, *storage.offset + align_up(storage.bytes))
                           : slabs + align_up(storage.bytes);
  }
  for (size_t p = 0; p < memory.purposes.size(); ++p)
    memory.slabs += static_cast<Purpose>(p) != Purpose::kState ? memory.purposes[p].slabs : 0;
  const auto lives = find_lives(plan);
  const size_t num_tasks = plan.tasks.size();
  Changes all(num_tasks);
  std::vector<Changes> by_purpose(StepMemory::kNumPurposes, Changes(num_tasks));
  std::vector<MemoryRequest> requests;
  std::vector<int64_t> offsets(plan.buffers.size());
  for (const BufferId id : plan.buffers.ids()) {
    const StepBuffer& buffer = plan.buffers[id];
    if (!is_planned(plan, buffer)) continue;
    const int64_t bytes = align_up(buffer.bytes);
    all.add(lives[id], bytes);
    by_purpose[idx(plan.purpose(id))].add(lives[id], bytes);
    requests.push_back(
        {bytes, {number_of(lives[id].first), number_of(lives[id].last)}, &offsets[number_of(id)]});
  }
  for (size_t p = 0; p < by_purpose.size(); ++p)
    memory.purposes[p].most = by_purpose[p].find_most().first;
  const auto [most, at] = all.find_most();
  memory.most = most;
  memory.fullest = static_cast<TaskId>(at);
  memory.placed = place_requests(requests);
  return memory;
}

}  // namespace tessera
