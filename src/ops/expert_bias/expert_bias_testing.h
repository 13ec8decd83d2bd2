#pragma once

#include <numeric>
#include <vector>

#include "ops/expert_bias/expert_bias.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// Experts' rows, as a matrix of `width` columns or, with a block size, as block-sparse values.
struct BiasCase {
  ExpertBiasSpec spec;
  std::vector<int64_t> rows_of;
  int64_t width = 0;

  bool is_sparse() const { return spec.block_size > 0; }
  int64_t num_rows() const { return std::accumulate(rows_of.begin(), rows_of.end(), int64_t{0}); }
  int64_t num_biases() const {
    return std::accumulate(spec.sizes.begin(), spec.sizes.end(), int64_t{0});
  }
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result = {0};
    for (const int64_t rows : rows_of) result.push_back(result.back() + rows);
    return result;
  }
  std::vector<int32_t> row_offsets() const {
    std::vector<int32_t> result = {0};
    for (size_t e = 0; e < rows_of.size(); ++e) {
      for (int64_t row = 0; row < rows_of[e]; row += spec.block_size)
        result.push_back(result.back() + static_cast<int32_t>(spec.sizes[e] / spec.block_size));
    }
    return result;
  }
  Shape shape() const {
    if (!is_sparse()) return {num_rows(), width};
    return {row_offsets().back(), spec.block_size, spec.block_size};
  }
  std::vector<TestInput> inputs(DType dtype, Random& random) const {
    std::vector<TestInput> result = list_inputs(
        TestInput{random_tensor(dtype, shape(), random), Role::kValue, "x"},
        TestInput{random_tensor(DType::kF32, {num_biases()}, random), Role::kWeight, "bias"});
    if (spec.apply_prob)
      result.push_back({random_tensor(DType::kF32, {num_rows()}, random), Role::kValue, "probs"});
    result.push_back({tensor_of_i64({std::ssize(rows_of) + 1}, offsets()), Role::kConstant, "o"});
    if (is_sparse()) {
      const auto rows = row_offsets();
      result.push_back({tensor_of_i32({std::ssize(rows)}, rows), Role::kConstant, "row_offsets"});
    }
    return result;
  }
};

}  // namespace tessera::testing
