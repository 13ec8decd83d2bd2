#pragma once

#include <ostream>

#include "train/run/train_loop.h"

namespace tessera {

/// Preference training: direct preference optimization of dpo.pairs, to the last step or to a
/// signal, after which the same call continues with the same bits. On one rank. The request's
/// batches are given by this. Throws UserError.
void train_on_preferences(const TrainRequest& request, World& world, std::ostream& out);

/// Reinforcement learning: in each step answers are written, rewarded, and learned from by group
/// relative policy optimization; as above.
void train_on_rewards(const TrainRequest& request, World& world, std::ostream& out);

}  // namespace tessera
