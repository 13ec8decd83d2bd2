#pragma once

#include <vector>

#include "core/random.h"
#include "ops/add/add.h"
#include "ops/linear/linear.h"
#include "program/program.h"
#include "program/testing/exchange_testing.h"

namespace tessera::testing {

/// Sizes of a random program's values.
inline constexpr int64_t kRandomTokens = 6;
inline constexpr int64_t kRandomWidth = 10;

/// A program of sums, exchanges and products that add to accumulators, in which any earlier value
/// may be read again. Its last values are outputs.
inline Program make_random_program(Random& random, int64_t num_nodes) {
  Program program("random");
  const ValueType type{DType::kF32, {kRandomTokens, kRandomWidth}};
  std::vector<ValueId> values = {program.add_input("a", type), program.add_input("b", type)};
  std::vector<ValueId> accumulators;
  for (const char* name : {"grad.u", "grad.v"})
    accumulators.push_back(
        program.add_accumulator(name, {DType::kF32, {kRandomWidth, kRandomWidth}}));
  const auto pick = [&](const std::vector<ValueId>& from) {
    return from[random.next_below(from.size())];
  };
  for (int64_t i = 0; i < num_nodes; ++i) {
    const uint64_t kind = random.next_below(4);
    if (kind == 0) {
      values.push_back(program.add1(std::make_shared<SlowCopy>(), {pick(values)}, "copy"));
    } else if (kind == 1) {
      program.add(std::make_shared<LinearWgrad>(), {pick(values), pick(values)}, {},
                  {pick(accumulators)});
    } else {
      values.push_back(program.add1(make_add(), {pick(values), pick(values)}, "sum"));
    }
  }
  std::vector<ValueId> outputs = {values.back()};
  if (values.size() > 4) outputs.push_back(values[values.size() - 3]);
  program.set_outputs(std::move(outputs));
  return program;
}

}  // namespace tessera::testing
