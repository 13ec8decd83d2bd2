#pragma once

#include <vector>

#include "ops/round_values/round_values.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// What every RoundValues takes: a copy of x, and the offsets of its groups where it has some.
inline std::vector<TestInput> round_inputs(const RoundValuesSpec& spec, const Tensor& x,
                                           const std::vector<int64_t>& offsets) {
  std::vector<TestInput> inputs;
  const std::vector<double> values = to_doubles(x);
  inputs.push_back(
      {tensor_of(x.shape, {values.begin(), values.end()}, x.dtype), Role::kConstant, "x"});
  if (spec.offsets)
    inputs.push_back({tensor_of_i64({std::ssize(offsets)}, offsets), Role::kConstant, "offsets"});
  return inputs;
}

}  // namespace tessera::testing
