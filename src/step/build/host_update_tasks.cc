#include "step/build/host_update_tasks.h"

#include <utility>

#include "optim/host_updates.h"
#include "step/build/state_tasks.h"

namespace tessera {

HostUpdateTasks::HostUpdateTasks(PlanWriter& writer, const ReplicatedExchanges& exchanges)
    : writer_(writer),
      exchanges_(exchanges),
      early_waits_(exchanges.buckets.size()),
      starts_(exchanges.buckets.size()),
      waits_(exchanges.buckets.size()) {}

Task HostUpdateTasks::part(size_t bucket, size_t part, const Buffers& buffers) {
  const BucketExchange& exchange = exchanges_.buckets[bucket];
  const auto make = [&](TaskKind kind, TaskAction action, LaneKind lane, std::string_view what,
                        int64_t bytes) {
    return Task{.kind = kind,
                .action = action,
                .lane = writer_.lane(lane),
                .name = fmt::format("{}, {}", what, bucket_name(exchange)),
                .bytes = bytes,
                .subject = {.unit = static_cast<int64_t>(bucket)}};
  };
  if (part == 0) {
    Task task = make(TaskKind::kCopy, TaskAction::kStoreGradients, LaneKind::kStores,
                     "store gradients", exchange.bytes_to_host);
    read(task, buffers.gradients);
    return task;
  }
  if (part == 1) {
    Task task = make(TaskKind::kOptimizer, TaskAction::kUpdate, LaneKind::kHostUpdates,
                     "update on the host", 2 * exchange.state_bytes);
    update(task, buffers.state);
    return task;
  }
  Task task = make(TaskKind::kCopy, TaskAction::kLoadWeights, LaneKind::kReloads, "load weights",
                   exchange.bytes_from_host);
  update(task, buffers.weights);
  return task;
}

void HostUpdateTasks::wait_for_last_step(size_t bucket, const Buffers& buffers,
                                         bool stored_before) {
  if (early_waits_[bucket].back()) return;
  for (size_t i = stored_before ? 1 : 0; i < kNumParts; ++i) {
    Task wait = part(bucket, i, buffers);
    wait.phase = TaskPhase::kWait;
    wait.name = "wait: " + wait.name;
    wait.bytes = 0;
    early_waits_[bucket][i] = waits_[bucket][i] = writer_.add(std::move(wait));
  }
}

TaskId HostUpdateTasks::start(size_t bucket, const Buffers& buffers, Task store) {
  std::optional<TaskId>& last = last_[HostUpdates::window_of(bucket)];
  if (last) store.after.push_back(*last);
  const bool only_on_update = store.only_on_update;
  for (size_t i = 0; i < kNumParts; ++i) {
    Task task = part(bucket, i, buffers);
    if (i == 0) {
      task.after = std::move(store.after);
      task.reads = std::move(store.reads);
      task.writes = std::move(store.writes);
    } else {
      task.after = {*starts_[bucket][i - 1]};
    }
    task.only_on_update = only_on_update;
    starts_[bucket][i] = writer_.start(std::move(task));
    if (early_waits_[bucket][i]) writer_.set_start(*early_waits_[bucket][i], *starts_[bucket][i]);
  }
  last = starts_[bucket].back();
  return *starts_[bucket][1];
}

void HostUpdateTasks::wait_in_step(size_t bucket, size_t part) {
  if (starts_[bucket][part] && !waits_[bucket][part])
    waits_[bucket][part] = writer_.wait_for(*starts_[bucket][part]);
}

void HostUpdateTasks::wait_stored(size_t bucket) {
  wait_in_step(bucket, 0);
}

void HostUpdateTasks::wait_loaded(size_t bucket) {
  for (size_t i = 0; i < kNumParts; ++i) wait_in_step(bucket, i);
}

}  // namespace tessera
