#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "core/memory.h"

namespace tessera {

/// Sequences of communications that depend on one another, such as a reduction within nodes and
/// then between them, carried out in the background as far as the communicators allow: the stages
/// of one transfer run one after the other, those of different transfers side by side.
///
/// Stage k of a transfer starts only after stage k of the transfer before it. So if all transfers
/// under way use a communicator in the same stage, its operations start in the order of the
/// transfers, whatever the timing, which is what communicators demand. Nothing waits but `wait`.
///
/// Transfers under way have a slot of staging memory each; those that find none stand in line. A
/// queue without staging runs any number at once. Not thread-safe.
class TransferQueue {
 public:
  /// Starts one communication, or works on the spot and returns a Pending that is complete.
  /// `staging` is the transfer's slot, the same in all stages.
  using Stage = std::function<Pending(std::byte* staging)>;

  /// Staging is the device's memory.
  TransferQueue(int64_t num_slots, int64_t slot_bytes, Device& device = host_device());

  /// Returns the transfer's number, for `wait`. Starts what can start.
  int64_t add(std::vector<Stage> stages);
  /// Starts what can start by now.
  void poll();
  /// Returns when transfer `number` and all before it are complete.
  void wait(int64_t number);
  void wait_all() { wait(first_ + std::ssize(transfers_) - 1); }

  bool empty() const { return transfers_.empty(); }
  int64_t staging_bytes() const { return staging_.num_bytes(); }
  /// What such a queue takes.
  static int64_t count_staging(int64_t num_slots, int64_t slot_bytes) {
    return num_slots * align_up(slot_bytes);
  }

 private:
  struct Transfer {
    std::vector<Stage> stages;
    size_t num_started = 0;
    Pending pending;

    bool complete() { return num_started == stages.size() && pending.done(); }
  };

  /// Starts stages of a transfer below stage `limit`, as far as those before them are complete.
  void advance(size_t idx, size_t limit);

  int64_t num_slots_;
  int64_t slot_bytes_;
  Buffer staging_;
  std::deque<Transfer> transfers_;
  int64_t first_ = 0;  ///< the number of transfers_.front()
};

}  // namespace tessera
