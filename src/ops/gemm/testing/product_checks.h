#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "core/random.h"
#include "ops/gemm/gemm.h"

/// Products against sums in F64, for every layout of their operands.
namespace tessera::testing {

struct ProductCase {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false, accumulate = false, narrow = false;
  int64_t padding = 0;
};

template <typename T>
std::vector<T> random_elements(int64_t count, Random& random) {
  std::vector<T> elements(count);
  for (T& x : elements) x = T(static_cast<float>(random.next_normal()));
  return elements;
}

/// A product's operands, whose rows have padding behind them, and the memory of its result.
template <typename T>
struct ProductOperands {
  ProductCase c;
  std::vector<T> a, b;
  std::vector<Bf16> narrow;
  std::vector<float> wide;
  Gemm product;

  explicit ProductOperands(const ProductCase& given) : c(given) {
    Random random(7, static_cast<uint64_t>(c.m * 131 + c.n * 17 + c.k));
    const int64_t lda = (c.transpose_a ? c.m : c.k) + c.padding;
    const int64_t ldb = (c.transpose_b ? c.k : c.n) + c.padding;
    const int64_t ldc = c.n + c.padding;
    a = random_elements<T>((c.transpose_a ? c.k : c.m) * lda, random);
    b = random_elements<T>((c.transpose_b ? c.n : c.k) * ldb, random);
    narrow = random_elements<Bf16>(c.m * ldc, random);
    wide.assign(narrow.begin(), narrow.end());
    product = {.transpose_a = c.transpose_a,
               .transpose_b = c.transpose_b,
               .m = c.m,
               .n = c.n,
               .k = c.k,
               .a = a.data(),
               .lda = lda,
               .b = b.data(),
               .ldb = ldb,
               .c = c.narrow ? static_cast<void*>(narrow.data()) : wide.data(),
               .ldc = ldc,
               .input_type = std::is_same_v<T, Bf16> ? DType::kBF16 : DType::kF32,
               .output_type = c.narrow ? DType::kBF16 : DType::kF32,
               .accumulate = c.accumulate};
  }

  float result(int64_t idx) const { return c.narrow ? static_cast<float>(narrow[idx]) : wide[idx]; }

  /// `run` changes C to the product and nothing else.
  template <typename Run>
  void check(const Run& run) {
    const std::vector<float> before(narrow.begin(), narrow.end());
    run(product);
    for (int64_t i = 0; i < c.m; ++i) {
      for (int64_t j = 0; j < product.ldc; ++j) {
        const int64_t at = i * product.ldc + j;
        if (j >= c.n) {
          ASSERT_EQ(result(at), before[at]) << "behind row " << i;
        } else {
          check_element(i, j, before[at]);
        }
      }
    }
  }

  void check_element(int64_t i, int64_t j, float before) const {
    double sum = c.accumulate ? before : 0;
    double magnitude = std::abs(sum);
    for (int64_t k = 0; k < c.k; ++k) {
      const double term =
          static_cast<double>(
              static_cast<float>(a[c.transpose_a ? k * product.lda + i : i * product.lda + k])) *
          static_cast<float>(b[c.transpose_b ? j * product.ldb + k : k * product.ldb + j]);
      sum += term;
      magnitude += std::abs(term);
    }
    const double tolerance = 1e-6 * magnitude + (c.narrow ? 4e-3 * std::abs(sum) : 0);
    ASSERT_NEAR(result(i * product.ldc + j), sum, tolerance) << "at " << i << ", " << j;
  }
};

/// Every layout of one shape.
template <typename T, typename Run>
void check_layouts(int64_t m, int64_t n, int64_t k, const Run& run) {
  constexpr int kLayouts = std::is_same_v<T, Bf16> ? 24 : 16;
  for (int bits = 0; bits < kLayouts; ++bits) {
    const ProductCase c{.m = m,
                        .n = n,
                        .k = k,
                        .transpose_a = (bits & 1) != 0,
                        .transpose_b = (bits & 2) != 0,
                        .accumulate = bits / 8 == 1,
                        .narrow = bits / 8 == 2,
                        .padding = (bits & 4) != 0 ? 5 : 0};
    SCOPED_TRACE(fmt::format("m {} n {} k {} ta {} tb {} accumulate {} bf16 {} padding {}", m, n, k,
                             c.transpose_a, c.transpose_b, c.accumulate, c.narrow, c.padding));
    ProductOperands<T>(c).check(run);
  }
}

template <typename T, typename Run>
void check_shapes(const Run& run) {
  const int64_t fixed[][3] = {{1, 1, 1},    {16, 16, 32}, {32, 32, 64},  {33, 31, 65},
                              {17, 48, 33}, {5, 70, 31},  {64, 40, 512}, {40, 37, 513},
                              {3, 600, 9},  {270, 9, 530}};
  for (const auto& [m, n, k] : fixed) check_layouts<T>(m, n, k, run);
  Random random(3, 9);
  for (int i = 0; i < 6; ++i) {
    const auto extent = [&](uint64_t most) {
      return 1 + static_cast<int64_t>(random.next_below(most));
    };
    check_layouts<T>(extent(100), extent(100), extent(200), run);
  }
}

/// Scratch memory full of NaN, as what another product left there could be.
class NanScratch {
 public:
  explicit NanScratch(int64_t words) : words_(words + 16, 0x7fc07fc0U) {}
  uint32_t* aligned() {
    const auto address = reinterpret_cast<uintptr_t>(words_.data());
    return words_.data() + (64 - address % 64) % 64 / sizeof(uint32_t);
  }

 private:
  std::vector<uint32_t> words_;
};

}  // namespace tessera::testing
