#include "optim/exchange/transfer_queue.h"

#include <algorithm>
#include <limits>

namespace tessera {

TransferQueue::TransferQueue(int64_t num_slots, int64_t slot_bytes, Device& device)
    : num_slots_(slot_bytes > 0 ? num_slots : std::numeric_limits<int64_t>::max()),
      slot_bytes_(align_up(slot_bytes)),
      staging_(count_staging(num_slots, slot_bytes), "the staging of gradients and weights",
               device) {
  ensure(num_slots > 0, "a queue of transfers with {} slots", num_slots);
}

int64_t TransferQueue::add(std::vector<Stage> stages) {
  transfers_.push_back({.stages = std::move(stages), .num_started = 0, .pending = {}});
  const int64_t number = first_ + std::ssize(transfers_) - 1;
  poll();
  return number;
}

void TransferQueue::advance(size_t idx, size_t limit) {
  Transfer& transfer = transfers_[idx];
  const int64_t slot = slot_bytes_ > 0 ? (first_ + static_cast<int64_t>(idx)) % num_slots_ : 0;
  while (transfer.num_started < std::min(transfer.stages.size(), limit) &&
         transfer.pending.done()) {
    transfer.pending.wait();
    const Stage& stage = transfer.stages[transfer.num_started];
    transfer.pending = stage(staging_.data() + slot * slot_bytes_);
    ++transfer.num_started;
  }
}

void TransferQueue::poll() {
  bool removed = true;
  while (removed) {
    const size_t under_way = std::min(std::ssize(transfers_), num_slots_);
    size_t limit = std::numeric_limits<size_t>::max();
    for (size_t i = 0; i < under_way; ++i) {
      advance(i, limit);
      const Transfer& transfer = transfers_[i];
      // One that has started all its stages holds nobody back.
      if (transfer.num_started < transfer.stages.size()) limit = transfer.num_started;
    }
    removed = false;
    while (!transfers_.empty() && transfers_.front().complete()) {
      transfers_.front().pending.wait();
      transfers_.pop_front();
      ++first_;
      removed = true;
    }
  }
}

void TransferQueue::wait(int64_t number) {
  poll();
  while (first_ <= number && !transfers_.empty()) {
    transfers_.front().pending.wait();
    poll();
  }
}

}  // namespace tessera
