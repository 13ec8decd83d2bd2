#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "ops/operator.h"

namespace tessera::testing {

/// How an input of the operator under test takes part in the gradient check.
enum class Role {
  kConstant,  ///< no gradient is asked for
  kValue,     ///< an intermediate value: its gradient comes back as a value
  kWeight,    ///< a weight: its gradient is accumulated in FP32
};

struct TestInput {
  OwnedTensor tensor;
  Role role = Role::kValue;
  std::string name;
};

/// A list of inputs, which can only be moved: an initializer list would copy.
template <typename... Inputs>
std::vector<TestInput> list_inputs(Inputs... inputs) {
  std::vector<TestInput> list;
  (list.push_back(std::move(inputs)), ...);
  return list;
}

/// A tensor filled with normal numbers of the given deviation; BF16 values are rounded.
OwnedTensor random_tensor(DType dtype, const Shape& shape, Random& random, double deviation = 1.0);
OwnedTensor tensor_of(const Shape& shape, const std::vector<float>& values,
                      DType dtype = DType::kF32);
OwnedTensor tensor_of_i32(const Shape& shape, const std::vector<int32_t>& values);
OwnedTensor tensor_of_i64(const Shape& shape, const std::vector<int64_t>& values);
/// The elements as double, whatever the type.
std::vector<double> to_doubles(const Tensor& tensor);

/// Runs one operator alone: infers the outputs, allocates them between guard bands (which it checks
/// after the run), poisons them with NaN bytes (accumulators are zeroed), runs the kernel. Ragged
/// outputs come back at actual extent.
std::vector<OwnedTensor> run_operator(const Operator& op, const KernelTable& kernels,
                                      const std::vector<TestInput>& inputs);

/// Differentiates a program made of `op` alone, and compares the gradient of
///   f = sum over outputs j in `outputs`, elements i, of c_ji · output_ji      (c random but fixed)
/// with central finite differences for every kValue and kWeight input (at most `max_probes` random
/// elements each). Inputs must be F32. Adds a gtest failure for each element whose error exceeds
/// `tolerance` · max(1, |gradient|max of that input). A kWeight accumulator starts at a random
/// value, to see that the kernel adds. Empty `outputs` means all F32 outputs.
struct GradientCheck {
  std::vector<int> outputs;
  double step = 1e-2;
  double tolerance = 2e-3;
  int max_probes = 64;
  uint64_t seed = 1;
};
void check_gradients(OperatorPtr op, const KernelTable& kernels,
                     const std::vector<TestInput>& inputs, const GradientCheck& check = {});

/// The gradients themselves, by the derived backward program, for comparison with a reference: one
/// tensor per input (empty for kConstant), given the gradient of each output (empty tensor: none).
std::vector<OwnedTensor> run_gradients(OperatorPtr op, const KernelTable& kernels,
                                       const std::vector<TestInput>& inputs,
                                       const std::vector<OwnedTensor>& grad_outputs);

/// Expects ‖a−b‖/‖b‖ ≤ tolerance for every row (last dim) that is not zero, and near-zero rows to
/// match absolutely: one lost row fails.
void expect_rows_near(const Tensor& actual, const Tensor& expected, double tolerance,
                      const std::string& what);
void expect_bitwise_equal(const Tensor& actual, const Tensor& expected, const std::string& what);

}  // namespace tessera::testing
