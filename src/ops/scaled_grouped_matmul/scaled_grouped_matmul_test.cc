#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"

#include <gtest/gtest.h>

#include <numeric>

#include "ops/quantize/quantize_testing.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using Op = ScaledGroupedMatmul;
using testing::ScaledTensor;

struct Case {
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows_of;
  int64_t reduction = 0;
  bool by_block = false;
};

std::vector<int64_t> ends_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> ends(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), ends.begin() + 1);
  return ends;
}

void check_case(const Case& test, DType output) {
  Random random(7, 1);
  const std::vector<int64_t> offsets = ends_of(test.rows_of);
  const std::vector<int64_t> begins = ends_of(test.sizes);
  const int64_t reduction = test.reduction;
  const OwnedTensor a_values =
      testing::random_tensor(DType::kF32, {offsets.back(), reduction}, random);
  const OwnedTensor weight_values =
      testing::random_tensor(DType::kF32, {begins.back(), reduction}, random);
  const auto row = ScaleLayout::row();
  const ScaledTensor a = testing::quantize(
      a_values.get(), {.scale = test.by_block ? ScaleLayout::block(1, 128) : row});
  const ScaledTensor weight = testing::quantize(
      weight_values.get(), {.scale = test.by_block ? ScaleLayout::block(128, 128) : row});
  const OwnedTensor offset_tensor = testing::tensor_of_i64({std::ssize(offsets)}, offsets);
  const Op op({.group_sizes = test.sizes, .output = output});
  const std::vector<Tensor> inputs = {a.tensor, weight.tensor, offset_tensor.get()};
  std::vector<ValueType> types;
  for (const Tensor& input : inputs) types.push_back(testing::type_of(input));
  const ScaledTensor y(op.infer(types)[Op::kY]);
  KernelTable table;
  add_scaled_grouped_matmul_cpu(table);
  const Kernel& kernel = table.find(Op::kName)->second;
  Buffer workspace(kernel.workspace_bytes(op, types), "scratch memory");
  const std::vector<Tensor> outputs = {y.tensor};
  kernel(op, {.inputs = inputs,
              .outputs = outputs,
              .workspace = {workspace.data(), static_cast<size_t>(workspace.num_bytes())}});
  const std::vector<double> left = testing::values_of(a);
  const std::vector<double> right = testing::values_of(weight);
  const std::vector<double> found = testing::to_doubles(y.tensor);
  const double tolerance = output == DType::kF32 ? 1e-5 : 8e-3;
  for (size_t e = 0; e < test.sizes.size(); ++e) {
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (int64_t f = 0; f < test.sizes[e]; ++f) {
        double sum = 0;
        for (int64_t k = 0; k < reduction; ++k)
          sum += left[r * reduction + k] * right[(begins[e] + f) * reduction + k];
        ASSERT_NEAR(found[r * y.tensor.shape[1] + f], sum, tolerance * (std::abs(sum) + 3))
            << "expert " << e << " row " << r << " feature " << f;
      }
    }
  }
}

TEST(ScaledGroupedMatmul, RowsAndBlocks) {
  for (const DType output : {DType::kF32, DType::kBF16}) {
    check_case({.sizes = {3, 5}, .rows_of = {4, 0}, .reduction = 7}, output);
    check_case({.sizes = {16, 16, 16}, .rows_of = {1, 33, 0}, .reduction = 200}, output);
    check_case({.sizes = {128, 256}, .rows_of = {5, 9}, .reduction = 300, .by_block = true},
               output);
    check_case({.sizes = {2}, .rows_of = {0}, .reduction = 16}, output);
  }
}

TEST(ScaledGroupedMatmul, RefusesWhatDoesNotFit) {
  const Op op({.group_sizes = {64, 64}});
  const ValueType a{.dtype = DType::kE4M3, .shape = {8, 32}, .scale = ScaleLayout::row()};
  const ValueType weight{.dtype = DType::kE4M3, .shape = {128, 32}, .scale = ScaleLayout::row()};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  EXPECT_EQ(op.infer(std::vector{a, weight, offsets})[0].to_string(), "bf16 [8, 64]");
  ValueType other = weight;
  other.scale = ScaleLayout::block(128, 128);
  EXPECT_THROW(op.infer(std::vector{a, other, offsets}), UserError);
  ValueType blocks = a;
  blocks.scale = ScaleLayout::block(1, 128);
  EXPECT_THROW(op.infer(std::vector{blocks, other, offsets}), UserError);  // experts of 64 rows
  ValueType wide = a;
  wide.shape = {8, 48};
  EXPECT_THROW(op.infer(std::vector{wide, weight, offsets}), UserError);
  EXPECT_THROW(make_scaled_grouped_matmul({.group_sizes = {4}, .output = DType::kE4M3}), UserError);
}

}  // namespace
}  // namespace tessera
