#include "ops/newton_schulz/newton_schulz.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/memory.h"
#include "core/random.h"
#include "ops/newton_schulz/newton_schulz_testing.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::Matrix;
using testing::multiply;
using testing::norm_of;
using testing::orthogonalize_plainly;
using testing::TestInput;
using testing::transpose;

/// The eigenvalues of a symmetric matrix, by Jacobi's rotations.
std::vector<double> eigenvalues(Matrix a) {
  const int64_t n = a.rows;
  const auto at = [&](int64_t i, int64_t j) -> double& { return a.at[i * n + j]; };
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        const double angle = 0.5 * std::atan2(2 * at(p, q), at(q, q) - at(p, p));
        const double c = std::cos(angle);
        const double s = std::sin(angle);
        for (int64_t k = 0; k < n; ++k) {
          const double kp = at(k, p);
          const double kq = at(k, q);
          at(k, p) = c * kp - s * kq;
          at(k, q) = s * kp + c * kq;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double pk = at(p, k);
          const double qk = at(q, k);
          at(p, k) = c * pk - s * qk;
          at(q, k) = s * pk + c * qk;
        }
      }
    }
  }
  std::vector<double> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(at(i, i));
  return values;
}

KernelTable kernels() {
  KernelTable table;
  add_newton_schulz_cpu(table);
  return table;
}

OwnedTensor orthogonalize(OwnedTensor batch, int64_t steps = 5) {
  const OperatorPtr op = make_newton_schulz(steps);
  const auto inputs = testing::list_inputs(TestInput{std::move(batch), {}, "m"});
  return std::move(testing::run_operator(*op, kernels(), inputs)[0]);
}

Matrix matrix_of(const Tensor& batch, int64_t idx) {
  const int64_t rows = batch.shape[1];
  const int64_t cols = batch.shape[2];
  const auto values = testing::to_doubles(batch);
  const auto begin = values.begin() + idx * rows * cols;
  return {rows, cols, {begin, begin + rows * cols}};
}

double distance(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.at.size(); ++i) a.at[i] -= b.at[i];
  return norm_of(a);
}

void expect_follows_reference(DType dtype, const Shape& shape, int64_t steps, Random& random) {
  SCOPED_TRACE(fmt::format("{} {}, {} steps", dtype_name(dtype), shape.to_string(), steps));
  OwnedTensor batch = testing::random_tensor(dtype, shape, random, 1e-3);
  std::vector<Matrix> expected;
  for (int64_t i = 0; i < shape[0]; ++i)
    expected.push_back(orthogonalize_plainly(matrix_of(batch, i), steps));
  const OwnedTensor result = orthogonalize(std::move(batch), steps);
  ASSERT_EQ(result.get().shape, shape);
  ASSERT_EQ(result.get().dtype, dtype);
  for (int64_t i = 0; i < shape[0]; ++i) {
    // BF16 has 8 bits, and each step rounds the Gram matrix, the polynomial and X.
    const double tolerance = dtype == DType::kF32 ? 2e-4 : 4e-2;
    EXPECT_LE(distance(matrix_of(result, i), expected[i]), tolerance * norm_of(expected[i]));
  }
}

TEST(NewtonSchulz, FollowsTheReferenceForRandomShapes) {
  Random random(3, 0);
  for (int trial = 0; trial < 60; ++trial) {
    const auto size = [&] { return static_cast<int64_t>(random.next_below(50)); };
    const Shape shape = {static_cast<int64_t>(random.next_below(5)), size(), size()};
    const auto steps = static_cast<int64_t>(1 + random.next_below(6));
    expect_follows_reference(trial % 2 == 0 ? DType::kF32 : DType::kBF16, shape, steps, random);
  }
}

TEST(NewtonSchulz, FollowsTheReferenceForVectorsAndUnevenShapes) {
  Random random(4, 0);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{2, 1, 33}, Shape{2, 33, 1}, Shape{3, 1, 1}, Shape{1, 129, 17},
                               Shape{1, 17, 129}, Shape{1, 65, 65}, Shape{0, 4, 4}, Shape{2, 0, 4}})
      expect_follows_reference(dtype, shape, 5, random);
  }
}

TEST(NewtonSchulz, BringsSingularValuesNearOne) {
  Random random(5, 0);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{1, 24, 96}, Shape{1, 96, 24}, Shape{1, 1, 40}}) {
      const OwnedTensor result = orthogonalize(testing::random_tensor(dtype, shape, random, 1.0));
      const Matrix x = matrix_of(result, 0);
      const Matrix gram = x.rows > x.cols ? multiply(transpose(x), x) : multiply(x, transpose(x));
      for (const double value : eigenvalues(gram)) {
        EXPECT_GT(std::sqrt(value), 0.64) << shape.to_string();
        EXPECT_LT(std::sqrt(value), 1.24) << shape.to_string();
      }
    }
  }
}

TEST(NewtonSchulz, LeavesZerosAndDoesNotDependOnTheScale) {
  OwnedTensor zeros(DType::kBF16, {1, 8, 8});
  std::memset(zeros.get().data, 0, zeros.get().num_bytes());
  const OwnedTensor result = orthogonalize(std::move(zeros));
  for (const double value : testing::to_doubles(result)) EXPECT_EQ(value, 0);

  Random random(6, 0);
  const OwnedTensor small = testing::random_tensor(DType::kF32, {1, 9, 30}, random, 1.0);
  OwnedTensor large(DType::kF32, {1, 9, 30});
  std::ranges::transform(small.get().span<float>(), large.get().as<float>(),
                         [](float x) { return x * 1e15F; });
  const Matrix expected = orthogonalize_plainly(matrix_of(small, 0), 5);
  EXPECT_LE(distance(matrix_of(orthogonalize(std::move(large)), 0), expected), 1e-3);
}

TEST(NewtonSchulz, MatricesHaveTheSameBitsInAnyBatch) {
  Random random(7, 0);
  // One that all threads share, and one that is left to one of them.
  for (const Shape& shape : {Shape{3, 300, 280}, Shape{5, 40, 70}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      OwnedTensor batch = testing::random_tensor(dtype, shape, random, 1.0);
      OwnedTensor alone(dtype, {1, shape[1], shape[2]});
      const int64_t bytes = alone.get().num_bytes();
      std::memcpy(alone.get().data, static_cast<std::byte*>(batch.get().data) + bytes, bytes);
      const OwnedTensor together = orthogonalize(std::move(batch));
      const OwnedTensor one = orthogonalize(std::move(alone));
      EXPECT_EQ(
          std::memcmp(one.get().data, static_cast<std::byte*>(together.get().data) + bytes, bytes),
          0);
    }
  }
}

TEST(NewtonSchulz, RefusesWhatItCannotTake) {
  EXPECT_THROW(make_newton_schulz(0), UserError);
  const OperatorPtr op = make_newton_schulz(5);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {4, 4}}}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kI64, {1, 4, 4}}}), UserError);
}

TEST(NewtonSchulz, CountsItsProducts) {
  const OperatorPtr op = make_newton_schulz(5);
  const ValueType batch{DType::kBF16, {2, 6, 3}};
  // X·Xᵀ and the last product have 2 · 18 · 3 each, G² has 2 · 27.
  EXPECT_EQ(op->cost(std::vector{batch}, std::vector{batch}).flops, 5 * 2 * (4 * 18 * 3 + 2 * 27));
}

}  // namespace
}  // namespace tessera
