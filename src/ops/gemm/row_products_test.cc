#include "ops/gemm/row_products.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <vector>

#include "core/random.h"

namespace tessera {
namespace {

template <typename T>
std::vector<T> random_elements(int64_t count, Random& random) {
  std::vector<T> elements(static_cast<size_t>(count));
  for (T& x : elements) x = T(static_cast<float>(random.next_normal()));
  return elements;
}

struct RowCase {
  int64_t m, n, k;
  bool transpose_b = false, accumulate = false;
  int64_t padding = 0;
};

/// Operands of one case with padding after each row.
template <typename In, typename Out>
struct RowOperands {
  RowCase c;
  int64_t lda, ldb, ldc;
  std::vector<In> a, b;
  std::vector<Out> before;

  explicit RowOperands(const RowCase& given)
      : c(given),
        lda(c.k + c.padding),
        ldb((c.transpose_b ? c.k : c.n) + c.padding),
        ldc(c.n + c.padding) {
    Random random(11, static_cast<uint64_t>(c.m * 131 + c.n * 17 + c.k));
    a = random_elements<In>(c.m * lda, random);
    b = random_elements<In>((c.transpose_b ? c.n : c.k) * ldb, random);
    before = random_elements<Out>(c.m * ldc, random);
  }

  /// All of C after rows first to first + count alone were multiplied.
  std::vector<Out> multiply(int64_t first, int64_t count) const {
    std::vector<Out> result = before;
    gemm_of_rows({.transpose_b = c.transpose_b,
                  .m = count,
                  .n = c.n,
                  .k = c.k,
                  .a = a.data() + first * lda,
                  .lda = lda,
                  .b = b.data(),
                  .ldb = ldb,
                  .c = result.data() + first * ldc,
                  .ldc = ldc,
                  .input_type = DTypeOf<In>::value,
                  .output_type = DTypeOf<Out>::value,
                  .accumulate = c.accumulate});
    return result;
  }

  void expect_close(const std::vector<Out>& result, double tolerance) const {
    for (int64_t i = 0; i < c.m; ++i) {
      for (int64_t j = 0; j < ldc; ++j) {
        const double was = static_cast<float>(before[i * ldc + j]);
        if (j >= c.n) {
          ASSERT_EQ(static_cast<float>(result[i * ldc + j]), was) << "padding";
          continue;
        }
        double sum = c.accumulate ? was : 0;
        double magnitude = std::abs(sum);
        for (int64_t p = 0; p < c.k; ++p) {
          const In other = c.transpose_b ? b[j * ldb + p] : b[p * ldb + j];
          const double term = static_cast<double>(static_cast<float>(a[i * lda + p])) *
                              static_cast<double>(static_cast<float>(other));
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(static_cast<float>(result[i * ldc + j]), sum, tolerance * magnitude)
            << "at " << i << ", " << j;
      }
    }
  }

  /// Every row has the same bits alone, and in pieces of any size.
  void expect_same_rows(const std::vector<Out>& whole) const {
    for (const int64_t step : {1, 3, 5, 64}) {
      for (int64_t first = 0; first < c.m; first += step) {
        const int64_t count = std::min(step, c.m - first);
        const std::vector<Out> piece = multiply(first, count);
        for (int64_t i = first * ldc; i < (first + count) * ldc; ++i)
          ASSERT_EQ(static_cast<float>(piece[i]), static_cast<float>(whole[i]))
              << step << " rows at " << first;
      }
    }
  }
};

template <typename In, typename Out>
void check_rows(const RowCase& c, double tolerance) {
  SCOPED_TRACE(fmt::format("m {} n {} k {} tb {} accumulate {} padding {}", c.m, c.n, c.k,
                           c.transpose_b, c.accumulate, c.padding));
  const RowOperands<In, Out> operands(c);
  const std::vector<Out> whole = operands.multiply(0, c.m);
  operands.expect_close(whole, tolerance);
  operands.expect_same_rows(whole);
}

TEST(GemmOfRows, RowsAreRightAndDoNotDependOnOneAnother) {
  const int64_t sizes[][3] = {{1, 1, 1},    {1, 17, 3},    {5, 1, 33},    {17, 16, 15}, {0, 3, 4},
                              {66, 48, 32}, {37, 65, 129}, {3, 200, 100}, {70, 7, 257}, {4, 5, 0}};
  for (const auto& [m, n, k] : sizes) {
    for (int bits = 0; bits < 8; ++bits) {
      const RowCase c{m, n, k, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0 ? 3 : 0};
      check_rows<float, float>(c, 1e-6);
      check_rows<Bf16, float>(c, 1e-6);
      if (!c.accumulate) check_rows<Bf16, Bf16>(c, 4e-3);
    }
  }
}

TEST(GemmOfRows, SameBitsForAnyNumberOfThreads) {
  const RowOperands<float, float> operands({70, 300, 90, true});
  const std::vector<float> whole = operands.multiply(0, 70);
  const int threads = omp_get_max_threads();
  for (const int count : {1, 3}) {
    omp_set_num_threads(count);
    EXPECT_EQ(operands.multiply(0, 70), whole) << count;
  }
  omp_set_num_threads(threads);
}

TEST(GemmOfRows, RefusesATransposedA) {
  EXPECT_THROW(gemm_of_rows({.transpose_a = true}), InternalError);
}

}  // namespace
}  // namespace tessera
