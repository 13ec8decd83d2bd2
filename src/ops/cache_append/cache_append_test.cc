#include "ops/cache_append/cache_append.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

/// Runs the kernel on a cache in place.
void append(const Tensor& cache, const Tensor& rows, int32_t start) {
  KernelTable kernels;
  add_cache_append_cpu(kernels);
  const OperatorPtr op = make_cache_append(cache.shape[0]);
  const OwnedTensor start_tensor = testing::tensor_of_i32({1}, {start});
  const std::vector<ValueType> types = {{rows.dtype, rows.shape}, {DType::kI32, {1}}};
  ASSERT_EQ(op->infer(types)[0], (ValueType{cache.dtype, cache.shape}));
  const std::vector<Tensor> inputs = {rows, start_tensor.get()};
  const std::vector<Tensor> outputs = {cache};
  kernels.at("cache_append")(*op, {inputs, outputs, {}});
}

TEST(CacheAppendTest, WritesItsRowsAndNoOthers) {
  Random random(1, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [count, start] : {std::pair{0, 0}, {0, 9}, {1, 0}, {1, 8}, {4, 3}, {9, 0}}) {
      OwnedTensor cache = testing::random_tensor(dtype, {9, 5}, random);
      const OwnedTensor rows = testing::random_tensor(dtype, {count, 5}, random);
      std::vector<double> expected = testing::to_doubles(cache);
      std::ranges::copy(testing::to_doubles(rows), expected.begin() + start * 5);
      append(cache, rows, start);
      EXPECT_EQ(testing::to_doubles(cache), expected) << count << " rows at " << start;
    }
  }
}

TEST(CacheAppendTest, RefusesRowsThatDoNotFit) {
  Random random(1, 2);
  const OwnedTensor cache = testing::random_tensor(DType::kF32, {9, 5}, random);
  const OwnedTensor rows = testing::random_tensor(DType::kF32, {4, 5}, random);
  EXPECT_THROW(append(cache, rows, 6), UserError);
  EXPECT_THROW(append(cache, rows, -1), UserError);
  EXPECT_THROW(append(cache, rows, std::numeric_limits<int32_t>::max()), UserError);
  EXPECT_THROW(make_cache_append(-1), UserError);
}

TEST(CacheAppendTest, LeavesOutAnUnboundCache) {
  Random random(1, 3);
  append({nullptr, DType::kF32, {9, 5}}, testing::random_tensor(DType::kF32, {4, 5}, random), 0);
}

TEST(CacheAppendTest, RefusesShapesThatDoNotFit) {
  const OperatorPtr op = make_cache_append(4);
  const ValueType start{DType::kI32, {1}};
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kI32, {2, 3}}, start}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {3}}, start}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {2, 3}}}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {2, 3}}, {DType::kI64, {1}}}),
               UserError);
}

}  // namespace
}  // namespace tessera
