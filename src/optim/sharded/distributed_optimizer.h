#pragma once

#include <vector>

#include "core/slice.h"
#include "optim/optimizer.h"
#include "optim/sharded/held_state.h"

namespace tessera {

/// The end of a step over many ranks, whatever each of them holds of the model. All ranks call the
/// same functions in the same order.
class DistributedOptimizer {
 public:
  virtual ~DistributedOptimizer() = default;
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Returns when the sums of the gradients over all ranks are in this rank's rows.
  virtual void finish_gradients() = 0;
  /// Finishes the gradients, then updates. A norm that is not finite stops all ranks alike: then
  /// nothing has changed but the gradients.
  virtual StepResult step(const StepInput& input) = 0;
  /// Ends a step without an update: finishes the sums, which other ranks count on, and forgets
  /// them.
  virtual void discard_gradients() = 0;

  /// As HeldState's.
  virtual std::vector<NamedSlice> weight_slices(HeldPart part) const = 0;
  virtual std::vector<NamedSlice> state_slices(HeldPart part) const = 0;
  virtual void change_masters(
      const std::function<void(const NamedSlice& master)>& change) const = 0;
  virtual void set_row_factors(const FillRowFactors& fill) = 0;
  /// The summed gradients of the owned rows, F32; to be read between finish_gradients and the next
  /// step's first gradient.
  virtual std::vector<NamedSlice> gradient_slices() const = 0;
  /// Sets masters to the BF16 weights.
  virtual void reset_masters() const = 0;

 protected:
  DistributedOptimizer() = default;
};

}  // namespace tessera
