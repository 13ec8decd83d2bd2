#pragma once

#include <vector>

#include "program/program.h"

namespace tessera {

/// Moves a Quantize by rows in front of what only moves rows, an exchange or a permutation, where
/// nobody else reads what that gives: fewer bytes move, and fewer rows may have to be quantized.
/// What is quantized alike anyway is so once, and movements that nobody reads are left out. The
/// numbers do not change, since rows have scales of their own. `kept` are values that outlive the
/// program's runs. Values keep their ids; those that are no longer made have no node.
Program quantize_early(const Program& program, const std::vector<ValueId>& kept);

}  // namespace tessera
