#pragma once

#include <cstdint>
#include <vector>

#include "core/error.h"
#include "model/weights/rounding_history.h"
#include "optim/optimizer.h"

namespace tessera {

/// Training cannot go on from numbers as they are: thrown on all ranks, at the same step.
class TrainingStopped : public UserError {
 public:
  using UserError::UserError;
};

/// What one optimizer step did, of all ranks together and the same on each.
struct StepOutcome {
  double loss = 0;      ///< mean over the valid tokens of the global batch
  double mtp_loss = 0;  ///< of multi-token prediction: mean over its own valid labels
  double balance_loss = 0;
  double z_loss = 0;
  int64_t num_tokens = 0;
  int64_t mtp_labels = 0;  ///< valid ones of multi-token prediction
  int64_t dropped = 0;
  /// Times that it was done again since the stash had no room (train.stash), on any rank.
  int64_t repeats = 0;
  double max_logit = 0;       ///< with QK clip: as StepRecord's
  int64_t clipped_heads = 0;  ///< likewise
  double loss_scale = 1;      ///< that gradients were made with
  /// By layer, where scales are delayed.
  std::vector<RoundingCounts> roundings;
  StepResult update;
  bool skipped() const { return !update.updated; }
};

}  // namespace tessera
