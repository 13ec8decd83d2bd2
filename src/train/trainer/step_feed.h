#pragma once

#include <functional>
#include <span>

#include "model/batch/batch_inputs.h"

namespace tessera {

/// Where a rank's steps get their micro-batches: whoever begins a step takes them from it, and
/// those of the next one may be read while the device is at this one. Not thread-safe.
class StepFeed {
 public:
  StepFeed() = default;
  virtual ~StepFeed() = default;
  StepFeed(const StepFeed&) = delete;
  StepFeed& operator=(const StepFeed&) = delete;

  using Use = std::function<void(std::span<const MicroBatch> batches, const LossScales& scales)>;
  /// On another thread reads the micro-batches of the step behind the one that began last, where
  /// they are known already, and calls `use`. The begin of the next step waits for both.
  virtual void read_ahead(Use use) = 0;
  /// Whether the step that began last has what read_ahead() read, and `use` came to its end.
  virtual bool began_with_read() const = 0;
};

}  // namespace tessera
