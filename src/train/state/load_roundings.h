#pragma once

#include "checkpoint/checkpoint.h"
#include "model/weights/rounding_history.h"

namespace tessera {

/// Whether a checkpoint has the history of roundings by delayed scales.
bool has_roundings(const CheckpointReader& reader);

/// Fills a history from a checkpoint of the same model: with the newest steps of one of another
/// length. Where the checkpoint has none, nothing is known. Throws UserError where it is of other
/// operands.
void load_roundings(const CheckpointReader& reader, RoundingHistory& roundings);

}  // namespace tessera
