#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "program/differentiate.h"
#include "program/fuse_gathers.h"
#include "program/split_weights.h"
#include "runtime/executable.h"

namespace tessera {

/// Which values a training run computes again instead of keeping: names of forward values, or
/// {"all"} for everything that may run twice.
using RecomputePolicy = std::vector<std::string>;

/// The weights' part of a backward program, where it is split off.
struct WeightPass {
  Executable program;
  Backward derived;
  std::vector<KeptValue> kept;
};

/// A forward program and its derived backward program, both ready to run.
struct DerivedProgram {
  Executable forward;
  Backward derived;
  Executable backward;
  /// Where weight gradients are split off: the program that adds them, run after `backward`, which
  /// then gives the inputs' alone.
  std::optional<WeightPass> weights;
  double model_flops = 0;  ///< of both passes, without what recomputation runs again
};

/// What is made of a forward program beside its gradient.
struct DeriveOptions {
  RecomputePolicy recompute = {};
  GatherFusion gathers = GatherFusion::kAuto;
  bool fuse_activations = false;
  bool split_weights = false;
};

/// Fuses sums and gathers, differentiates, fuses the gradient's sums, applies the policy, fuses the
/// gradient's gathers, splits weight gradients off and makes activations part of the products
/// around them where asked, and plans the programs. Names of the policy that are no saved value of
/// this program are ignored here; see check_recompute_names.
DerivedProgram derive(Program forward, const DifferentiateRequest& request,
                      const DeriveOptions& options, const Backend& backend);

/// Throws UserError with the nearest name for a policy name that no intermediate of any of the
/// forward programs has.
void check_recompute_names(const RecomputePolicy& policy, const std::vector<Program>& programs);

/// Gives the tensor of a weight or of its gradient by name.
using TensorByName = std::function<Tensor(const std::string&)>;

/// Binds every weight of a program.
void bind_weights(const Program& program, const TensorByName& weight, Bindings& bindings);

/// Bindings of the backward program for a forward program bound as `forward`: saved values, inputs
/// and weights are shared; accumulators come from `grad`. Gradients of outputs and inputs are left
/// to the caller.
Bindings bind_backward(const DerivedProgram& program, const Bindings& forward,
                       const TensorByName& grad);

/// Bindings of the weights' program for the two before it, whose saved slabs are set.
Bindings bind_weight_pass(const DerivedProgram& program, const Bindings& forward,
                          const Bindings& backward, const TensorByName& grad);

}  // namespace tessera
