#include "step/build/state_tasks.h"

#include <algorithm>
#include <utility>

namespace tessera {

std::string bucket_name(const BucketExchange& bucket) {
  return fmt::format("{}, bucket {}", bucket.outer->name(), bucket.idx);
}

StateTasks::StateTasks(PlanWriter& writer, const ReplicatedExchanges& exchanges)
    : writer_(writer),
      exchanges_(exchanges),
      windows_(exchanges.windows.size()),
      loads_(exchanges.buckets.size()) {}

BufferId StateTasks::home(size_t bucket) {
  return writer_.state("moments of " + bucket_name(at(bucket)), at(bucket).state_bytes,
                       streams() || exchanges_.updates_on_host ? Home::kHost : Home::kDevice);
}

BufferId StateTasks::at_work(size_t bucket) {
  if (!streams()) return home(bucket);
  const size_t window = window_of(bucket);
  return writer_.buffer(
      fmt::format("moments of {}, on the device", bucket_name(at(bucket))), at(bucket).state_bytes,
      {.name = fmt::format("window {} of moments", window), .bytes = exchanges_.windows[window]});
}

Task StateTasks::copy(size_t bucket, bool stores) {
  Task task{
      .kind = TaskKind::kCopy,
      .action = stores ? TaskAction::kStoreState : TaskAction::kLoadState,
      .lane = writer_.lane(stores ? LaneKind::kStores : LaneKind::kReloads),
      .name = fmt::format("{} moments, {}", stores ? "store" : "load", bucket_name(at(bucket))),
      .bytes = at(bucket).state_bytes,
      .subject = {.unit = static_cast<int64_t>(bucket)}};
  read(task, stores ? at_work(bucket) : home(bucket));
  write(task, stores ? home(bucket) : at_work(bucket));
  return task;
}

void StateTasks::empty(Window& window) {
  if (window.store) writer_.wait_for(*std::exchange(window.store, std::nullopt));
}

/// Loads as far as windows are free.
void StateTasks::load_up_to(size_t end) {
  for (; next_load_ < std::min(end, order_.size()); ++next_load_) {
    const size_t bucket = order_[next_load_];
    Window& window = windows_[window_of(bucket)];
    if (window.loaded) return;
    empty(window);
    window.loaded = bucket;
    loads_[bucket] = writer_.start(copy(bucket, /*stores=*/false));
  }
}

void StateTasks::begin() {
  if (streams()) load_up_to(windows_.size());
}

void StateTasks::before_update(size_t bucket) {
  if (!streams()) return;
  if (next_update_ == 0) begin();
  ensure(order_[next_update_] == bucket, "a step updates bucket {} where bucket {} is next", bucket,
         order_[next_update_]);
  load_up_to(next_update_ + 1);
  writer_.wait_for(*loads_[bucket]);
}

/// The next bucket but one comes when this one's update is over, behind the one before.
void StateTasks::after_update(size_t bucket) {
  if (!streams()) return;
  Window& window = windows_[window_of(bucket)];
  window.loaded.reset();
  window.store = writer_.start(copy(bucket, /*stores=*/true));
  ++next_update_;
  load_up_to(next_update_ + 1);
}

void StateTasks::finish() {
  for (Window& window : windows_) empty(window);
}

}  // namespace tessera
