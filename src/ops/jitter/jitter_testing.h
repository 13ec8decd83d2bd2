#pragma once

#include <bit>
#include <vector>

#include "ops/jitter/jitter.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// The inputs of Jitter: x, the tokens' numbers, and the noise of this size.
inline std::vector<TestInput> make_jitter_inputs(DType dtype, const std::vector<int64_t>& numbers,
                                                 int64_t width, float eps, uint64_t seed) {
  Random random(seed, 0);
  const auto rows = std::ssize(numbers);
  return list_inputs(
      TestInput{random_tensor(dtype, {rows, width}, random), Role::kValue, "x"},
      TestInput{tensor_of_i64({rows}, numbers), Role::kConstant, "token_numbers"},
      TestInput{tensor_of_i32({kNumNoiseWords}, {0x12345678, -7, std::bit_cast<int32_t>(eps), 1}),
                Role::kConstant, "noise"});
}

/// As many numbers as a rank's tokens may have, beyond 32 bits too.
inline std::vector<int64_t> make_token_numbers(int64_t rows) {
  std::vector<int64_t> numbers(rows);
  for (int64_t i = 0; i < rows; ++i) numbers[i] = (i % 3 == 2 ? int64_t{1} << 33 : 0) + 5 * i;
  return numbers;
}

}  // namespace tessera::testing
