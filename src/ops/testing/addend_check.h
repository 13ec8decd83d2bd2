#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "ops/addend.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// The same inputs with those of BF16 widened to F32.
inline std::vector<TestInput> widened(const std::vector<TestInput>& inputs) {
  std::vector<TestInput> result;
  for (const TestInput& input : inputs) {
    const Tensor& from = input.tensor.get();
    const DType dtype = from.dtype == DType::kBF16 ? DType::kF32 : from.dtype;
    OwnedTensor to(dtype, from.shape);
    if (dtype == from.dtype) {
      std::copy_n(static_cast<const std::byte*>(from.data), from.num_bytes(),
                  static_cast<std::byte*>(to.get().data));
    } else {
      std::ranges::copy(from.span<Bf16>(), to.get().as<float>());
    }
    result.push_back({std::move(to), input.role, input.name});
  }
  return result;
}

/// Compares an operator that takes an addend, given the inputs of the one that takes none. In F32
/// its first output is the plain operator's plus the addend, in BF16 it is that sum rounded once:
/// all but a few elements, which another order of sums may turn, must be the F32 result's
/// rounding.
inline void check_addend(const Operator& plain, const KernelTable& kernels,
                         std::vector<TestInput> inputs) {
  std::vector<ValueType> types;
  for (const TestInput& input : inputs)
    types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
  const OperatorPtr op = dynamic_cast<const TakesAddend&>(plain).with_addend(types);
  ASSERT_NE(op, nullptr);
  const ValueType type = plain.infer(types)[0];
  const auto own = run_operator(plain, kernels, widened(inputs));
  Random random(77, static_cast<uint64_t>(type.shape.num_elements()));
  inputs.push_back({random_tensor(type.dtype, type.shape, random), Role::kValue, "addend"});
  types.push_back(type);
  EXPECT_EQ(dynamic_cast<const TakesAddend&>(*op).with_addend(types), nullptr);

  const auto wide = widened(inputs);
  const auto sums = run_operator(*op, kernels, wide);
  const auto addend = wide.back().tensor.get().span<float>();
  std::vector<float> expected;
  for (size_t i = 0; i < addend.size(); ++i)
    expected.push_back(own[0].get().as<float>()[i] + addend[i]);
  expect_rows_near(sums[0], tensor_of(type.shape, expected), 1e-6, "the sum");
  for (size_t i = 1; i < own.size(); ++i) expect_bitwise_equal(sums[i], own[i], "other outputs");
  if (type.dtype == DType::kF32) return;

  const auto rounded = run_operator(*op, kernels, inputs);
  size_t turned = 0;
  for (size_t i = 0; i < addend.size(); ++i)
    turned += static_cast<float>(rounded[0].get().as<Bf16>()[i]) !=
              static_cast<float>(Bf16(sums[0].get().as<float>()[i]));
  EXPECT_LE(turned, addend.size() / 100);
}

}  // namespace tessera::testing
