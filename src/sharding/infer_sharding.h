#pragma once

#include <map>
#include <string>
#include <vector>

#include "program/program.h"
#include "sharding/rank_axes.h"

namespace tessera {

/// How each value of a program is spread; of those that follow from a fault nothing is known.
using Shardings = IdVector<ValueId, Sharding>;

/// What is wrong with a program, in words: the operator, the axis, and what it reads.
using ShardingFaults = std::vector<std::string>;

struct InferredShardings {
  Shardings values;
  ShardingFaults faults;
};

/// Follows a program from what it is bound to (inputs and weights by `bound`, and for accumulators
/// what is to be in them) through its operators. Faults are those of the first kind that Yang's
/// "Silent numerical-correctness bugs in Megatron Core parallelism composition" (2026) lists: a
/// reduction that is missing, made twice or made of copies; a statistic of a part that is taken for
/// that of the whole; rows or weights of other ranks. Values that a bound is missing for are faults
/// too. Nothing runs: the time is that of a walk through the program.
InferredShardings infer_shardings(const Program& program, const std::map<ValueId, Sharding>& bound,
                                  const RankAxes& axes);

/// Adds a fault where a value is not spread as it must be along the axes of more than one rank.
/// `expected` is compared in the factorings that are known of it.
void require_sharding(const Program& program, ValueId id, const Sharding& found,
                      const Sharding& expected, const RankAxes& axes, ShardingFaults& faults);

}  // namespace tessera
