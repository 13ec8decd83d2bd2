#include "ops/gemm/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/half.h"
#include "core/process/cpu_level.h"
#include "core/random.h"

namespace tessera {
namespace {

/// A stored matrix with padding after each row; the padding must survive.
template <typename T>
struct Stored {
  int64_t rows, cols, leading_dim;
  std::vector<T> elements;

  Stored(int64_t num_rows, int64_t num_cols, int64_t padding, Random& random)
      : rows(num_rows), cols(num_cols), leading_dim(num_cols + padding) {
    elements.resize(rows * leading_dim);
    for (T& x : elements) x = T(static_cast<float>(random.next_normal()));
  }
  double at(int64_t row, int64_t col) const {
    return static_cast<float>(elements[row * leading_dim + col]);
  }
};

struct Case {
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  int64_t padding = 0;

  std::string to_string() const {
    return fmt::format("m {} n {} k {} ta {} tb {} accumulate {} padding {}", m, n, k, transpose_a,
                       transpose_b, accumulate, padding);
  }
};

/// Runs one case and compares each element with a sum in double, within `tolerance` of the sum of
/// magnitudes; padding must be bitwise as before.
template <typename In, typename Out>
void check_case(const Case& c, double tolerance) {
  SCOPED_TRACE(c.to_string());
  Random random(7, static_cast<uint64_t>(c.m * 131 + c.n * 17 + c.k));
  const Stored<In> a(c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, c.padding, random);
  const Stored<In> b(c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, c.padding, random);
  Stored<Out> result(c.m, c.n, c.padding, random);
  const Stored<Out> before = result;
  gemm({.transpose_a = c.transpose_a,
        .transpose_b = c.transpose_b,
        .m = c.m,
        .n = c.n,
        .k = c.k,
        .a = a.elements.data(),
        .lda = a.leading_dim,
        .b = b.elements.data(),
        .ldb = b.leading_dim,
        .c = result.elements.data(),
        .ldc = result.leading_dim,
        .input_type = DTypeOf<In>::value,
        .output_type = DTypeOf<Out>::value,
        .accumulate = c.accumulate});
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      double sum = c.accumulate ? before.at(i, j) : 0.0;
      double magnitude = std::abs(sum);
      for (int64_t p = 0; p < c.k; ++p) {
        const double term =
            (c.transpose_a ? a.at(p, i) : a.at(i, p)) * (c.transpose_b ? b.at(j, p) : b.at(p, j));
        sum += term;
        magnitude += std::abs(term);
      }
      ASSERT_NEAR(result.at(i, j), sum, tolerance * magnitude) << "at " << i << ", " << j;
    }
    for (int64_t j = c.n; j < result.leading_dim; ++j) {
      ASSERT_EQ(result.at(i, j), before.at(i, j)) << "padding at " << i << ", " << j;
    }
  }
}

void check_all_types(const Case& c) {
  check_case<float, float>(c, 1e-6);
  check_case<Bf16, float>(c, 1e-6);
  check_case<Half, float>(c, 1e-6);
  if (!c.accumulate) check_case<Bf16, Bf16>(c, 4e-3);
}

std::vector<Case> all_kinds(int64_t m, int64_t n, int64_t k, int64_t padding) {
  std::vector<Case> cases;
  for (int bits = 0; bits < 8; ++bits) {
    cases.push_back({m, n, k, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, padding});
  }
  return cases;
}

TEST(Gemm, AllTransposesAndOddSizes) {
  const int64_t sizes[][3] = {{1, 1, 1},    {1, 17, 3},    {5, 1, 33},    {17, 16, 15},
                              {64, 48, 32}, {37, 65, 129}, {3, 200, 100}, {130, 7, 257}};
  for (const auto& [m, n, k] : sizes) {
    for (const int64_t padding : {0, 3}) {
      for (const Case& c : all_kinds(m, n, k, padding)) check_all_types(c);
    }
  }
}

TEST(Gemm, EmptyExtents) {
  const int64_t sizes[][3] = {{0, 5, 4}, {5, 0, 4}, {5, 4, 0}, {0, 0, 0}};
  for (const auto& [m, n, k] : sizes) {
    for (const Case& c : all_kinds(m, n, k, 2)) check_all_types(c);
  }
}

TEST(Gemm, LargerThanOneTileOfABf16Result) {
  check_all_types({.m = 600, .n = 2051, .k = 9, .transpose_b = true, .padding = 1});
}

TEST(Gemm, LargerThanOneWidenedTile) {
  for (const Case& c : all_kinds(40, 30, 1100, 1)) check_all_types(c);
}

TEST(Gemm, RunsInsideAParallelRegion) {
  // Refuses a TESSERA_CPU that the processor lacks here: nothing may throw out of the region.
  cpu_levels();
  // Whether a failing case throws or reports, gtest records it from any thread.
#pragma omp parallel for num_threads(4) schedule(dynamic)
  for (int64_t i = 0; i < 64; ++i) {
    check_all_types({.m = 1 + i % 13, .n = 20 + i, .k = 31, .transpose_b = i % 2 == 0});
  }
}

TEST(Gemm, RepeatsBitwise) {
  Random random(1, 2);
  const Stored<float> a(70, 300, 0, random), b(300, 90, 0, random);
  std::vector<std::vector<float>> results(3, std::vector<float>(70 * 90));
  for (auto& c : results) {
    gemm({.m = 70,
          .n = 90,
          .k = 300,
          .a = a.elements.data(),
          .lda = 300,
          .b = b.elements.data(),
          .ldb = 90,
          .c = c.data(),
          .ldc = 90});
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Gemm, RefusesWhatItCannotDo) {
  float x = 0;
  const Gemm one{.m = 1, .n = 1, .k = 1, .a = &x, .lda = 1, .b = &x, .ldb = 1, .c = &x, .ldc = 1};
  Gemm small = one;
  small.lda = 0;
  EXPECT_THROW(gemm(small), InternalError);
  Gemm narrow = one;
  narrow.output_type = DType::kBF16;
  EXPECT_THROW(gemm(narrow), InternalError);
  Gemm integers = one;
  integers.input_type = DType::kI32;
  EXPECT_THROW(gemm(integers), InternalError);
}

}  // namespace
}  // namespace tessera
