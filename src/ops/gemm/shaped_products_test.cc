#include "ops/gemm/shaped_products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/random.h"

namespace tessera {
namespace {

std::vector<Bf16> random_values(int64_t count, uint64_t seed) {
  Random random(11, seed);
  std::vector<Bf16> values(count);
  for (Bf16& value : values) value = Bf16(static_cast<float>(random.next_normal()));
  return values;
}

/// A product of BF16 matrices whose rows have `padding` elements behind them, and its memory.
struct Operands {
  std::vector<Bf16> a, b, narrow;
  std::vector<float> wide;
  Gemm gemm;

  Operands(int64_t m, int64_t n, int64_t k, bool transpose_b, int64_t padding)
      : a(random_values(m * (k + padding), 1)),
        b(random_values((transpose_b ? n : k) * ((transpose_b ? k : n) + padding), 2)),
        narrow(random_values(m * (n + padding), 3)),
        wide(narrow.begin(), narrow.end()),
        gemm{.transpose_b = transpose_b,
             .m = m,
             .n = n,
             .k = k,
             .a = a.data(),
             .lda = k + padding,
             .b = b.data(),
             .ldb = (transpose_b ? k : n) + padding,
             .c = wide.data(),
             .ldc = n + padding,
             .input_type = DType::kBF16} {}

  double exact(int64_t row, int64_t col) const {
    double sum = 0;
    for (int64_t i = 0; i < gemm.k; ++i) {
      const int64_t idx = gemm.transpose_b ? col * gemm.ldb + i : i * gemm.ldb + col;
      sum += static_cast<double>(static_cast<float>(a[row * gemm.lda + i])) *
             static_cast<double>(static_cast<float>(b[idx]));
    }
    return sum;
  }
};

class ShapedProductsTest : public testing::Test {
 protected:
  /// False where the CPU has no products of BF16, as with AVX2 alone.
  bool run(const Gemm& gemm) { return products_.run(gemm, stream_); }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  ShapedProducts products_{engine_};
};

TEST_F(ShapedProductsTest, AgreeWithSumsInDoubleAndLeavePadding) {
  for (const bool transpose_b : {false, true}) {
    for (const bool accumulate : {false, true}) {
      Operands x(128, 40, 72, transpose_b, 3);
      const std::vector<float> before = x.wide;
      x.gemm.accumulate = accumulate;
      if (!run(x.gemm)) GTEST_SKIP() << "this CPU has no products of BF16";
      for (int64_t row = 0; row < x.gemm.m; ++row) {
        for (int64_t col = 0; col < x.gemm.ldc; ++col) {
          const size_t idx = row * x.gemm.ldc + col;
          const bool padding = col >= x.gemm.n;
          const double expected =
              padding ? before[idx] : x.exact(row, col) + (accumulate ? before[idx] : 0.0F);
          ASSERT_NEAR(x.wide[idx], expected, padding ? 0.0 : 1e-4) << row << ", " << col;
        }
      }
    }
  }
}

TEST_F(ShapedProductsTest, RoundABf16ResultOnce) {
  Operands x(128, 24, 512, true, 0);
  if (!run(x.gemm)) GTEST_SKIP() << "this CPU has no products of BF16";
  Gemm narrow = x.gemm;
  narrow.c = x.narrow.data();
  narrow.output_type = DType::kBF16;
  ASSERT_TRUE(run(narrow));
  for (size_t i = 0; i < x.narrow.size(); ++i) {
    // Half a unit in the last place of BF16, and the F32 sums may differ in order.
    EXPECT_NEAR(static_cast<float>(x.narrow[i]), x.wide[i], std::abs(x.wide[i]) / 256 + 1e-4);
  }
}

TEST_F(ShapedProductsTest, ForgetShapesAndGoOn) {
  for (int64_t n = 1; n <= 140; ++n) {
    Operands x(1, n, 2, false, 0);
    if (!run(x.gemm)) GTEST_SKIP() << "this CPU has no products of BF16";
    ASSERT_NEAR(x.wide.back(), x.exact(0, n - 1), 1e-5);
  }
}

TEST(ShapedProducts, FixedRowsArePowersOfTwo) {
  for (const int64_t few : {0, 1, 127}) EXPECT_EQ(fixed_rows(few), 0);
  EXPECT_EQ(fixed_rows(128), 128);
  EXPECT_EQ(fixed_rows(255), 128);
  EXPECT_EQ(fixed_rows(8192 + 5000), 8192);
}

TEST(ShapedProducts, AreForInputsOfBf16AndNotForGradientsOfWeights) {
  EXPECT_FALSE(prefers_fixed_shape({.input_type = DType::kF32}));
  EXPECT_FALSE(prefers_fixed_shape({.transpose_a = true, .input_type = DType::kBF16}));
  EXPECT_EQ(prefers_fixed_shape({.input_type = DType::kBF16}), cpu_has_matrix_tiles());
}

}  // namespace
}  // namespace tessera
