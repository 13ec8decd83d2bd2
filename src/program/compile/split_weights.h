#pragma once

#include <vector>

#include "program/differentiate.h"

namespace tessera {

/// A value that the input part makes or is given, and the input of the weight part that it becomes.
struct KeptValue {
  ValueId input_part = -1;
  ValueId weight_part = -1;
};

/// A backward program in two: what other layers wait for, and what can wait. Both are backward
/// programs of the same forward program, with links of their own. Together they run the same nodes
/// on the same inputs, so that the bits are those of the whole, also where the weight parts of
/// several micro-batches run later, in the order of the micro-batches.
struct SplitBackward {
  /// The gradients of all inputs. It takes all gradients of outputs, also those that only the
  /// weight part reads.
  Backward input;
  /// Nodes that feed accumulators alone. Has no outputs. Its grad_outputs are those that it reads.
  Backward weight;
  /// What must be kept from one to the other, beside the forward values that weight.saved,
  /// weight.bound and weight.grad_outputs name. Where it is an output of the input part, the
  /// caller's memory holds it; the others are `saved` values for planning the input part.
  std::vector<KeptValue> kept;

  /// The kept values that are intermediates of the input part.
  std::vector<ValueId> kept_intermediates() const;
};

/// Splits for zero-bubble pipelines (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section
/// 2). A node stays in the input part where a gradient of an input depends on it, and where it adds
/// to an accumulator that such a node adds to, since the order of the additions counts. Values that
/// both parts read are made in the input part and kept, recomputed ones too.
SplitBackward split_weights(const Backward& backward);

}  // namespace tessera
