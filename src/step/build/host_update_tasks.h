#pragma once

#include <array>
#include <optional>
#include <vector>

#include "optim/sharded/step_exchanges.h"
#include "step/plan_writer.h"

namespace tessera {

/// Writes what has the host update buckets, where it is to: gradients go there, the host's threads
/// update, and new weights come back. Each is started behind the one before, none of which the
/// device waits for, and is waited for in this step or in the next one. Windows in the host's
/// memory are the lanes' own: what is started in one comes behind what left it. References must
/// outlive it.
class HostUpdateTasks {
 public:
  HostUpdateTasks(PlanWriter& writer, const ReplicatedExchanges& exchanges);

  bool is_on() const { return exchanges_.updates_on_host; }
  /// What the tasks of a bucket touch.
  struct Buffers {
    BufferId gradients, state, weights;
  };
  /// Waits for what the last step started, but for gradients where `stored_before`: those were
  /// waited for in that step. Once a bucket.
  void wait_for_last_step(size_t bucket, const Buffers& buffers, bool stored_before);
  /// `store` says what comes before, and what is done with gradients. Returns the update.
  TaskId start(size_t bucket, const Buffers& buffers, Task store);
  /// Waits in this step, where it is not waited for yet: until the gradients may be overwritten;
  void wait_stored(size_t bucket);
  /// until the weights are there.
  void wait_loaded(size_t bucket);

 private:
  static constexpr size_t kNumParts = 3;  // gradients, update, weights
  using Parts = std::array<std::optional<TaskId>, kNumParts>;

  Task part(size_t bucket, size_t part, const Buffers& buffers);
  void wait_in_step(size_t bucket, size_t part);

  PlanWriter& writer_;
  const ReplicatedExchanges& exchanges_;
  std::vector<Parts> early_waits_, starts_, waits_;  ///< by bucket
  std::array<std::optional<TaskId>, 2> last_;        ///< to leave each window
};

}  // namespace tessera
