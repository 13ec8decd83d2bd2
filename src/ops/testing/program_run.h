#pragma once

#include <map>
#include <vector>

#include "core/memory.h"
#include "program/differentiate.h"
#include "runtime/executable.h"

namespace tessera::testing {

/// A forward program, its derived backward program and all their memory, to run several operators
/// together. Inputs and weights are written through `value`, gradients of outputs through `grad`,
/// before the runs that read them; all start as zeros. Ragged values have their bounds' sizes
/// there. Both are the host's: a back end elsewhere has copies, brought there and back by the runs.
class ProgramRun {
 public:
  ProgramRun(Program forward, const DifferentiateRequest& request, const Backend& backend);

  /// The memory of a bound forward value: an input, a weight or an output.
  Tensor value(ValueId id) const;
  /// The gradient of an output (to be written), of an input, or a weight's accumulator.
  Tensor grad(ValueId id) const;

  void run_forward() const { run(forward_run_, forward_bindings_); }
  /// Adds into the accumulators, as training does.
  void run_backward() const { run(backward_run_, backward_bindings_); }

  const Program& forward() const { return forward_; }
  const Backward& backward() const { return backward_; }

 private:
  void bind_forward();
  void bind_backward();
  Tensor bound(const Tensor& host);
  void run(const Executable& program, const Bindings& bindings) const;

  Program forward_;
  Backward backward_;
  Executable forward_run_;
  Executable backward_run_;
  std::map<ValueId, OwnedTensor> values_;
  std::map<ValueId, OwnedTensor> grads_;  ///< by value of the backward program
  std::map<ValueId, ValueId> grad_values_;
  struct Copy {
    Tensor host;
    OwnedTensor there;
  };
  Device& device_;
  std::vector<Copy> copies_;  ///< of all values and gradients, where the device is not the host
  Buffer saved_;
  Buffer transient_;
  Bindings forward_bindings_;
  Bindings backward_bindings_;
};

}  // namespace tessera::testing
