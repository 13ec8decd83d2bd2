#include "ops/newton_schulz/newton_schulz.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

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
  const auto flops = [&](const Shape& shape) {
    const ValueType batch{DType::kBF16, shape};
    return op->cost(std::vector{batch}, std::vector{batch}).flops;
  };
  // X·Xᵀ and the last product have 2 · 12 · 3 each, G² has 2 · 27.
  EXPECT_EQ(flops({2, 4, 3}), 5 * 2 * (4 * 12 * 3 + 2 * 27));
  // Two pairs have five products of the smaller size each, and one step is left.
  EXPECT_EQ(flops({2, 6, 3}), 2 * (3 * 4 * 18 * 3 + (2 * 5 + 1) * 2 * 27));
  EXPECT_EQ(flops({2, 3, 6}), flops({2, 6, 3}));
}

/// A matrix with these singular values and random singular vectors.
Matrix matrix_with(const std::vector<double>& values, int64_t cols, Random& random) {
  const auto rows = static_cast<int64_t>(values.size());
  const auto orthonormal = [&](int64_t width) {
    Matrix m{rows, width, std::vector<double>(rows * width)};
    for (double& x : m.at) x = random.next_normal();
    for (int64_t i = 0; i < rows; ++i) {
      double* const row = m.at.data() + i * width;
      for (int64_t j = 0; j < i; ++j) {
        const double* const other = m.at.data() + j * width;
        const double along = std::inner_product(row, row + width, other, 0.0);
        for (int64_t k = 0; k < width; ++k) row[k] -= along * other[k];
      }
      const double norm = std::sqrt(std::inner_product(row, row + width, row, 0.0));
      for (int64_t k = 0; k < width; ++k) row[k] /= norm;
    }
    return m;
  };
  Matrix right = orthonormal(cols);
  for (int64_t i = 0; i < rows * cols; ++i) right.at[i] *= values[i / cols];
  return multiply(orthonormal(rows), right);
}

void round_to_bf16(Matrix& m) {
  for (double& x : m.at) x = static_cast<float>(Bf16(static_cast<float>(x)));
}

/// The iteration step by step, with matrices of BF16 between products.
Matrix orthogonalize_in_bf16(Matrix x, int64_t steps) {
  const double norm = norm_of(x);
  for (double& value : x.at) value /= norm;
  round_to_bf16(x);
  for (int64_t step = 0; step < steps; ++step) {
    Matrix gram = multiply(x, transpose(x));
    round_to_bf16(gram);
    const Matrix square = multiply(gram, gram);
    for (int64_t i = 0; i < std::ssize(gram.at); ++i) {
      const double diagonal = i % (gram.cols + 1) == 0 ? 3.4445 : 0;
      gram.at[i] = diagonal - 4.7750 * gram.at[i] + 2.0315 * square.at[i];
    }
    round_to_bf16(gram);
    x = multiply(gram, x);
    round_to_bf16(x);
  }
  return x;
}

/// Whatever the singular values, pairs of steps err at most twice what steps one by one do. Three
/// at a time would err several times as much where singular values fall as 1 / i.
TEST(NewtonSchulz, PairsInBf16AreAsExactAsSingleSteps) {
  constexpr int64_t kRows = 64;
  constexpr int64_t kCols = 160;
  ASSERT_TRUE(NewtonSchulz::pairs_steps(kRows, kCols));
  const std::vector<std::function<double(int64_t)>> spectra = {
      [](int64_t) { return 1.0; },
      [](int64_t i) { return 1 / std::sqrt(1.0 + static_cast<double>(i)); },
      [](int64_t i) { return 1 / (1.0 + static_cast<double>(i)); },
      [](int64_t i) { return std::pow(1.0 + static_cast<double>(i), -2); },
      [](int64_t i) { return std::pow(1e-6, static_cast<double>(i) / kRows); },
      [](int64_t i) { return i < 8 ? 1.0 : 1e-3; },
      [](int64_t i) { return i < 1 ? 1.0 : 0.0; }};
  Random random(9, 0);
  for (size_t which = 0; which < spectra.size(); ++which) {
    std::vector<double> values;
    for (int64_t i = 0; i < kRows; ++i) values.push_back(spectra[which](i));
    Matrix m = matrix_with(values, kCols, random);
    round_to_bf16(m);
    OwnedTensor batch(DType::kBF16, {1, kRows, kCols});
    std::ranges::transform(m.at, batch.get().as<Bf16>(),
                           [](double x) { return Bf16(static_cast<float>(x)); });
    for (const int64_t steps : {2, 5, 6}) {
      const Matrix exact = orthogonalize_plainly(m, steps);
      OwnedTensor copy(DType::kBF16, {1, kRows, kCols});
      std::memcpy(copy.get().data, batch.get().data, batch.get().num_bytes());
      const double error = distance(matrix_of(orthogonalize(std::move(copy), steps), 0), exact);
      const double one_by_one = distance(orthogonalize_in_bf16(m, steps), exact);
      EXPECT_LE(error, 2 * one_by_one + 0x1p-7 * norm_of(exact))
          << "spectrum " << which << ", " << steps << " steps";
    }
  }
}

}  // namespace
}  // namespace tessera
