#pragma once

#include <vector>

#include "program/program.h"

namespace tessera {

/// A value of the forward program and the value of the backward program that stands for it (or for
/// its gradient).
struct Link {
  ValueId forward = -1;
  ValueId backward = -1;
};

/// The backward program of a forward program, and how the two are joined.
struct Backward {
  Program program;
  /// Intermediates of the forward program that the backward program reads: these must be kept.
  std::vector<Link> saved;
  /// Inputs and weights of the forward program that the backward program reads.
  std::vector<Link> bound;
  /// Forward output → input of the backward program that holds its gradient.
  std::vector<Link> grad_outputs;
  /// Forward input → output of the backward program that is its gradient.
  std::vector<Link> grad_inputs;
  /// Forward weight → FP32 accumulator of the backward program.
  std::vector<Link> accumulators;

  /// Bytes of the saved values at their bounds.
  int64_t saved_bytes() const;
};

/// Which gradients flow in and which are wanted.
struct DifferentiateRequest {
  /// Outputs of the forward program whose gradients are given. Each becomes an input "grad.<name>".
  std::vector<ValueId> outputs;
  /// Inputs of the forward program whose gradients are wanted, beside those of all weights.
  std::vector<ValueId> inputs;
  /// Weights whose gradients are not wanted. Operators that can leave them out do; accumulators of
  /// others are there, and may be bound to nothing.
  std::vector<ValueId> frozen = {};
};

/// Derives the backward program by each operator's gradient rule, from the last node to the first;
/// gradients of a value that is read several times are added in that order. Of what reads a value
/// as a weight, the gradient is a value too (ops/gradient_value.h). Nodes that no gradient reaches
/// are left out. Throws InternalError where a needed operator has no rule, or where no
/// gradient reaches a wanted input.
Backward differentiate(const Program& forward, const DifferentiateRequest& request);

}  // namespace tessera
