#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "train/run/run_record.h"

namespace tessera {

/// What counts as agreement: bounds on `Difference::error`.
struct Tolerances {
  double scalars = 1e-4;    ///< losses and counts
  double gradients = 1e-4;  ///< and their norm
  double weights = 1e-4;
  /// A tensor counts as at least this share of the largest in the model: what is small because
  /// large parts cancel has the rounding of those parts. Times 1e-4 it is about two of F32's
  /// roundings of the largest.
  double floor = 1e-3;
  /// Updates are as large whatever the gradient's size (Muon): of a gradient that is below the
  /// floor the rounding grows with them, and what counts as the update as much.
  bool gradients_made_unit = false;
};

/// How far a run is from the reference, where it is furthest.
///   Scalars: the difference over the reference.
///   Gradients: over the largest element of the tensor in the reference, or Tolerances::floor times
///   the largest of all tensors where that is more.
///   Weights: what differs beyond their own rounding of every step, over the tensor's largest
///   update in the reference (last weights less first ones), or that share of the largest of all.
///   Expert biases: over the tensor's largest.
struct Difference {
  double error = 0;
  double layout = 0;     ///< what the layout has where the error is
  double reference = 0;  ///< and what the reference has
  std::vector<int64_t> index;
};

struct ParameterDifference {
  std::string name;
  Difference gradient;  ///< of the first step, before clipping; none for expert biases
  Difference weight;    ///< after the last step
  double error() const { return std::max(gradient.error, weight.error); }
  bool is_within(const Tolerances& tolerances) const {
    return gradient.error <= tolerances.gradients && weight.error <= tolerances.weights;
  }
};

struct ScalarDifference {
  std::string name;
  int64_t step = 0;
  Difference difference;
  bool of_gradients = false;  ///< held to their tolerance
};

struct Verification {
  std::vector<ScalarDifference> scalars;        ///< loss, balance loss, ... of each step
  std::vector<ParameterDifference> parameters;  ///< in the order of the model, then expert biases
  /// By how much experts' numbers of assignments differ, over all experts and steps. Not 0: a
  /// near-tie of two scores, decided by rounding, moved a token and all that follows, or the
  /// routing is wrong.
  int64_t moved_assignments = 0;
  /// Weights of which some ranks have copies that are not the same to the bit.
  std::vector<std::string> diverged;
  Tolerances tolerances;
  int64_t reference_ranks = 1;
  /// What a reader must know to judge the comparison: sentences.
  std::vector<std::string> notes = {};
  double seconds_layout = 0;
  double seconds_reference = 0;

  /// Whether all errors are within their tolerances, no assignment moved and all copies are alike.
  bool agrees() const;
  double allowed(const ScalarDifference& scalar) const {
    return scalar.of_gradients ? tolerances.gradients : tolerances.scalars;
  }
  /// The largest errors of what is held to each tolerance, and of all.
  double worst_gradient() const;
  double worst_weight() const;
  double worst_scalar() const;
  double worst() const { return std::max({worst_gradient(), worst_weight(), worst_scalar()}); }
  /// In the order in which a forward pass meets them; null where all agree.
  const ParameterDifference* first_disagreement() const;
};

/// Compares the first steps of two records of the same model; `parameter_names` in the order of the
/// result.
Verification compare_runs(const RunRecord& layout, const RunRecord& reference,
                          const std::vector<std::string>& parameter_names,
                          const Tolerances& tolerances);

/// The comparison as text for a person, the worst parameters first; `all` lists all of them.
std::string describe(const Verification& verification, bool all);

}  // namespace tessera
