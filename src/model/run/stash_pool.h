#pragma once

#include "core/pages/elastic_memory.h"
#include "model/run/layer_binder.h"
#include "model/run/saved_placement.h"

namespace tessera {

/// The pages that a rank's layers stash rows in (ops/page_stash), with addresses for the worst
/// routing and memory for what was planned, or came. Between steps all pages are free. Where a step
/// finds too few, what it leaves is not to be used: missing() says so, and grow() is for the same
/// step to be done again. Not thread-safe.
class StashPool {
 public:
  /// Takes the memory. `programs` must stash something.
  StashPool(const StagePrograms& programs, const StashNeed& need);
  /// Of the device's memory where the pool has so many pages; 0 where nothing is stashed.
  static int64_t count_bytes(const StagePrograms& programs, const StashNeed& need, int64_t pages);

  /// What programs are bound to, by its names in them. Addresses never change.
  CopyTensors tensors() const;
  int64_t num_pages() const { return num_pages_; }
  int64_t page_bytes() const { return page_bytes_; }
  /// Before a step: where the last one was not brought to its end, all pages become free.
  void begin_step();
  /// How many pages more the step would have needed, which is over. Waits for the device.
  int64_t missing();
  /// All pages are free, whatever was stashed: behind passes that reload nothing.
  void reset();
  /// So many pages more, and an eighth of the pool besides where there is memory for it, up to
  /// those of the worst routing. Throws OutOfMemory. REQUIRES that no step is under way.
  void grow(int64_t more_pages);

 private:
  bool commit(int64_t pages);
  [[noreturn]] void refuse(int64_t pages) const;

  Device& device_;
  int64_t page_bytes_ = 0;
  int64_t most_pages_ = 0;
  int64_t num_pages_ = 0;
  ElasticMemory pages_;
  Buffer free_;
  Buffer state_;
  bool is_open_ = false;  // a step has begun, and nobody has asked what it left
};

}  // namespace tessera
