#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optim/sharded/step_exchanges.h"
#include "step/plan_writer.h"

namespace tessera {

/// "dense_replicas_1, bucket 3".
std::string bucket_name(const BucketExchange& bucket);

/// Writes what brings buckets' optimizer state to their updates and takes it back, where it is in
/// the host's memory: a bucket's comes while the one before is updated, and goes while the next
/// one is. Elsewhere it writes nothing. References must outlive it.
class StateTasks {
 public:
  StateTasks(PlanWriter& writer, const ReplicatedExchanges& exchanges);

  /// All buckets, in the order in which they will be updated.
  void set_order(std::vector<size_t> order) { order_ = std::move(order); }
  const std::vector<size_t>& order() const { return order_; }

  /// Loads what the first updates need, as early as here; otherwise before the first.
  void begin();
  void before_update(size_t bucket);
  /// Where the state is at work, for the update.
  BufferId at_work(size_t bucket);
  void after_update(size_t bucket);
  /// Waits for all that goes back.
  void finish();

 private:
  /// A window of the device's memory.
  struct Window {
    std::optional<size_t> loaded;  ///< the bucket that is not updated yet
    std::optional<TaskId> store;   ///< that is not waited for yet
  };

  bool streams() const { return !exchanges_.windows.empty(); }
  const BucketExchange& at(size_t bucket) const { return exchanges_.buckets[bucket]; }
  size_t window_of(size_t bucket) const { return bucket % exchanges_.windows.size(); }
  BufferId home(size_t bucket);
  Task copy(size_t bucket, bool stores);
  void load_up_to(size_t end);
  void empty(Window& window);

  PlanWriter& writer_;
  const ReplicatedExchanges& exchanges_;
  std::vector<size_t> order_;
  size_t next_load_ = 0;  ///< in the order
  size_t next_update_ = 0;
  std::vector<Window> windows_;
  std::vector<std::optional<TaskId>> loads_;
};

}  // namespace tessera
