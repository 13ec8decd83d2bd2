#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "train/settings.h"

namespace tessera {

/// Starts `num_ranks` ranks, runs the body on each, and returns when all have ended.
using RankLauncher =
    std::function<void(int64_t num_ranks, const std::function<void(World&)>& body)>;

struct VerifyRequest {
  Settings settings;
  int64_t num_ranks = 1;
  int64_t steps = 3;
  double tolerance = 1e-4;
  /// How the layout's ranks run; empty: as threads of this process.
  RankLauncher launch;
};

/// How far a layout's run is from that of one rank. Errors are relative: of a tensor, the largest
/// difference over the largest magnitude in the reference (or a ten-thousandth of the largest of
/// all tensors, where that is more).
struct Difference {
  double error = 0;
  double layout = 0;     ///< what the layout has where the error is
  double reference = 0;  ///< and what one rank has
  std::vector<int64_t> index;
};

struct ParameterDifference {
  std::string name;
  Difference gradient;  ///< of the first step, before clipping
  Difference weight;    ///< after the last step
  double error() const { return std::max(gradient.error, weight.error); }
};

struct ScalarDifference {
  std::string name;
  int64_t step = 0;
  Difference difference;
};

struct Verification {
  std::vector<ScalarDifference> scalars;        ///< loss, balance loss, ... of each step
  std::vector<ParameterDifference> parameters;  ///< in the order of the model
  /// Assignments that some expert got in one run and not in the other, over all steps: a near-tie
  /// of two scores, decided by rounding, moves a token and all that follows.
  int64_t moved_assignments = 0;
  double tolerance = 0;
  double seconds_layout = 0;
  double seconds_reference = 0;

  bool agrees() const;
  double worst() const;
  /// In the order in which a forward pass meets them; null where all agree.
  const ParameterDifference* first_disagreement() const;
};

/// The same settings for random tokens in place of the data, without warm-up.
Settings without_data(Settings settings);

/// The settings of a small model with the same structure: the same kinds of layers, heads, experts
/// and layout, but short heads, narrow layers, a small vocabulary and short sequences; in F32, on
/// random tokens. Epsilon of AdamW is raised so that gradients that are rounding noise alone do not
/// become updates of full size.
Settings shrink_for_verification(Settings settings, int64_t num_ranks);

/// Runs the layout and one rank on the same few batches of random tokens, and compares. Reads
/// nothing but the settings; writes only to a temporary folder. Throws UserError for a layout that
/// cannot run.
Verification verify_layout(const VerifyRequest& request);

/// The comparison as text for a person, the worst parameters first; `all` lists all of them.
std::string describe(const Verification& verification, bool all);

}  // namespace tessera
