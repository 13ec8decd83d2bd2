#include "ops/gemm/tile_products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/process/cpu_level.h"
#include "core/random.h"
#include "ops/gemm/testing/plain_tile_product.h"
#include "ops/gemm/tile_permission.h"

namespace tessera {
namespace {

struct TileCase {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false, accumulate = false, narrow = false;
  int64_t padding = 0;
};

std::vector<Bf16> random_elements(int64_t count, Random& random) {
  std::vector<Bf16> elements(count);
  for (Bf16& x : elements) x = Bf16(static_cast<float>(random.next_normal()));
  return elements;
}

/// A product's operands, whose rows have padding behind them, and the memory of its result.
struct TileOperands {
  TileCase c;
  std::vector<Bf16> a, b, narrow;
  std::vector<float> wide;
  Gemm product;

  explicit TileOperands(const TileCase& given) : c(given) {
    Random random(7, static_cast<uint64_t>(c.m * 131 + c.n * 17 + c.k));
    const int64_t lda = (c.transpose_a ? c.m : c.k) + c.padding;
    const int64_t ldb = (c.transpose_b ? c.k : c.n) + c.padding;
    const int64_t ldc = c.n + c.padding;
    a = random_elements((c.transpose_a ? c.k : c.m) * lda, random);
    b = random_elements((c.transpose_b ? c.n : c.k) * ldb, random);
    narrow = random_elements(c.m * ldc, random);
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
               .input_type = DType::kBF16,
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

/// Scratch memory full of NaN, as what another product left there could be.
class Scratch {
 public:
  Scratch() : words_(tile_scratch_words() + 16, 0x7fc07fc0U) {}
  uint32_t* aligned() {
    const auto address = reinterpret_cast<uintptr_t>(words_.data());
    return words_.data() + (64 - address % 64) % 64 / sizeof(uint32_t);
  }

 private:
  std::vector<uint32_t> words_;
};

/// Every layout of one shape.
template <typename Run>
void check_layouts(int64_t m, int64_t n, int64_t k, const Run& run) {
  for (int bits = 0; bits < 24; ++bits) {
    const TileCase c{.m = m,
                     .n = n,
                     .k = k,
                     .transpose_a = (bits & 1) != 0,
                     .transpose_b = (bits & 2) != 0,
                     .accumulate = bits / 8 == 1,
                     .narrow = bits / 8 == 2,
                     .padding = (bits & 4) != 0 ? 5 : 0};
    SCOPED_TRACE(fmt::format("m {} n {} k {} ta {} tb {} accumulate {} bf16 {} padding {}", m, n, k,
                             c.transpose_a, c.transpose_b, c.accumulate, c.narrow, c.padding));
    TileOperands(c).check(run);
  }
}

template <typename Run>
void check_shapes(const Run& run) {
  const int64_t fixed[][3] = {{1, 1, 1},    {16, 16, 32}, {32, 32, 64},  {33, 31, 65},
                              {17, 48, 33}, {5, 70, 31},  {64, 40, 512}, {40, 37, 513},
                              {3, 600, 9},  {270, 9, 530}};
  for (const auto& [m, n, k] : fixed) check_layouts(m, n, k, run);
  Random random(3, 9);
  for (int i = 0; i < 6; ++i) {
    const auto extent = [&](uint64_t most) {
      return 1 + static_cast<int64_t>(random.next_below(most));
    };
    check_layouts(extent(100), extent(100), extent(200), run);
  }
}

TEST(TileProducts, PlainRegistersGiveTheProduct) {
  Scratch scratch;
  check_shapes(
      [&](const Gemm& product) { testing::multiply_on_plain_tiles(product, scratch.aligned()); });
}

TEST(TileProducts, TileRegistersGiveTheProduct) {
  if (!may_use_tiles()) GTEST_SKIP() << "no tile registers (AMX) here";
  Scratch scratch;
  check_shapes([&](const Gemm& product) { multiply_on_tiles(product, scratch.aligned()); });
}

TEST(TileProducts, BlocksSuitThreads) {
  const TileBlocks tall = cut_for_tiles(8192, 512, 16);
  EXPECT_EQ(tall.rows, 256);
  EXPECT_EQ(tall.cols, 512);
  const TileBlocks square = cut_for_tiles(512, 512, 16);
  EXPECT_EQ(square.rows, 128);
  EXPECT_EQ(square.cols, 128);
  for (const int64_t m : {1, 31, 100, 5000}) {
    for (const int64_t n : {1, 33, 700}) {
      for (const int threads : {1, 2, 7, 64}) {
        const TileBlocks blocks = cut_for_tiles(m, n, threads);
        EXPECT_GE(blocks.rows, 1);
        EXPECT_GE(blocks.cols, 1);
        EXPECT_LE(blocks.cols, 512);
      }
    }
  }
}

void check_shared(TileMultiply multiply) {
  cpu_level();  // a level that is not there is told here, and not by a thread of the product
  const auto run = [multiply](const Gemm& product) { share_out_tiles(product, multiply); };
  check_layouts(150, 40, 33, run);
  check_layouts(33, 520, 70, run);
  check_layouts(96, 70, 64, run);
  EXPECT_EQ(count_tile_slices({.m = 270, .n = 9, .k = 2100}), 2);
  check_layouts(270, 9, 2100, run);
}

TEST(TileProducts, ThreadsSharePlainRegisters) {
  check_shared(testing::multiply_on_plain_tiles);
}

TEST(TileProducts, ThreadsShareTileRegisters) {
  if (!may_use_tiles()) GTEST_SKIP() << "no tile registers (AMX) here";
  check_shared(multiply_on_tiles);
}

TEST(TileProducts, OnlySmallResultsOfLongSumsAreSliced) {
  EXPECT_EQ(count_tile_slices({.m = 512, .n = 512, .k = 8192}), 8);
  EXPECT_EQ(count_tile_slices({.m = 512, .n = 512, .k = 1 << 20}), 16);
  EXPECT_EQ(count_tile_slices({.m = 512, .n = 512, .k = 1000}), 1);
  EXPECT_EQ(count_tile_slices({.m = 8192, .n = 512, .k = 8192}), 1);
  EXPECT_EQ(count_tile_slices({.m = 512, .n = 512, .k = 8192, .output_type = DType::kBF16}), 1);
}

}  // namespace
}  // namespace tessera
