#pragma once

#include <functional>
#include <vector>

#include "program/rounding/delayed_roundings.h"
#include "program/rounding/round_operands.h"
#include "program/rounding/rounded_operand.h"

namespace tessera {

/// What of a node is to be rounded, and what of it is rounded by rows before that.
struct RoundingChoice {
  std::function<std::vector<Operand>(const Node&)> operands;
  std::function<std::vector<ReadBefore>(const Node&)> read_before;
  /// The names of weights that are stored in FP8 (fp8_weight_format).
  std::vector<std::string> fp8_weights = {};
};

/// Puts roundings in front of the nodes of one program, or makes products of FP8 numbers of them
/// (round_operands.h).
Program insert_roundings(const Program& program, const OperandRounding& rounding,
                         const RoundingChoice& choice, WeightCopies& copies,
                         DelayedRoundings delayed);

}  // namespace tessera
