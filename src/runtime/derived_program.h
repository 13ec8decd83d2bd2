#pragma once

#include <optional>
#include <vector>

#include "program/compile/compile.h"
#include "runtime/executable.h"

namespace tessera {

/// The weights' part of a backward program, where it is split off.
struct WeightPass {
  Executable program;
  Backward derived;  ///< its program lives in `program`
  std::vector<KeptValue> kept;
};

/// A forward program and its derived backward program, both ready to run.
struct DerivedProgram {
  Executable forward;
  Backward derived;  ///< its program lives in `backward`
  Executable backward;
  /// Where weight gradients are split off: the program that adds them, run after `backward`, which
  /// then gives the inputs' alone.
  std::optional<WeightPass> weights;
  /// Where the programs read copies of weights (OperandRounding::keeps_copies): makes them, its
  /// outputs, which have the names of the inputs that they are for.
  std::optional<Executable> weight_copies;
  double model_flops = 0;  ///< of both passes, without what recomputation runs again
};

/// Compiles a forward program for training and plans what comes of it.
DerivedProgram derive(Program forward, const CompileOptions& options, const Backend& backend);

/// Bindings of the backward program for a forward program bound as `forward`, of which it shares
/// the saved values and inputs. Parameters, and gradients of outputs and inputs, are left to the
/// caller.
Bindings bind_backward(const DerivedProgram& program, const Bindings& forward);

/// Bindings of the weights' program for the two before it, whose saved slabs are set.
Bindings bind_weight_pass(const DerivedProgram& program, const Bindings& forward,
                          const Bindings& backward);

}  // namespace tessera
