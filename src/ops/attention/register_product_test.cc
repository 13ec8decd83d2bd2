#include "ops/attention/register_product.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "core/random.h"
#include "ops/gemm/testing/plain_tiles.h"
#include "ops/gemm/tile_permission.h"

namespace tessera::tile {
namespace {

struct StripCase {
  int64_t rows = 0, columns = 0, depth = 0;
  bool transposed = false, accumulate = false;
};

float low(Word word) {
  return std::bit_cast<float>(word << 16);
}
float high(Word word) {
  return std::bit_cast<float>(word & 0xFFFF0000U);
}

/// Words of two BF16, and NaN behind those that a product may read.
std::vector<Word> random_words(int64_t count, int64_t behind, Random& random) {
  std::vector<Word> words(count + behind, 0x7fc07fc0U);
  const auto next = [&] {
    return std::bit_cast<Word>(static_cast<float>(random.next_normal())) >> 16;
  };
  for (int64_t i = 0; i < count; ++i) words[i] = next() | next() << 16;
  return words;
}

template <typename Tiles>
void check_strip(const StripCase& c) {
  SCOPED_TRACE(fmt::format("rows {} columns {} depth {} transposed {} accumulate {}", c.rows,
                           c.columns, c.depth, c.transposed, c.accumulate));
  Random random(5, static_cast<uint64_t>(c.rows * 1009 + c.columns * 31 + c.depth));
  const int64_t lda = (c.transposed ? c.rows : c.depth) + 3;
  const int64_t ldb = c.columns + 16;
  const int64_t ldc = c.columns + 5;
  const std::vector<Word> a = random_words((c.transposed ? c.depth : c.rows) * lda, 999, random);
  const std::vector<Word> b = random_words(c.depth * ldb, 999, random);
  std::vector<float> result(c.rows * ldc);
  for (float& x : result) x = static_cast<float>(random.next_normal());
  const std::vector<float> before = result;
  const RegisterStrip strip{.a = a.data(),
                            .a_row = c.transposed ? 1 : lda,
                            .a_depth = c.transposed ? lda : 1,
                            .b = b.data(),
                            .ldb = ldb,
                            .c = result.data(),
                            .ldc = ldc,
                            .rows = c.rows,
                            .columns = c.columns,
                            .depth = c.depth,
                            .accumulate = c.accumulate};
  RegisterProduct<Tiles>().run(strip);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < ldc; ++j) {
      const int64_t at = i * ldc + j;
      if (j >= c.columns) {
        ASSERT_EQ(result[at], before[at]) << "behind row " << i;
        continue;
      }
      double sum = c.accumulate ? before[at] : 0;
      double magnitude = std::abs(sum);
      for (int64_t k = 0; k < c.depth; ++k) {
        const Word x = a[i * strip.a_row + k * strip.a_depth];
        const Word y = b[k * ldb + j];
        for (const double term : {double{low(x)} * low(y), double{high(x)} * high(y)}) {
          sum += term;
          magnitude += std::abs(term);
        }
      }
      ASSERT_NEAR(result[at], sum, 1e-6 * magnitude) << "at " << i << ", " << j;
    }
  }
}

template <typename Tiles>
void check_strips() {
  Random random(8, 2);
  std::vector<StripCase> cases{{32, 32, 16}, {32, 64, 128}, {1, 16, 1},   {0, 16, 4},    {7, 48, 0},
                               {32, 0, 3},   {16, 32, 17},  {32, 16, 40}, {31, 128, 300}};
  for (int i = 0; i < 20; ++i) {
    cases.push_back({1 + static_cast<int64_t>(random.next_below(32)),
                     16 * static_cast<int64_t>(random.next_below(9)),
                     static_cast<int64_t>(random.next_below(200))});
  }
  for (StripCase c : cases) {
    for (int bits = 0; bits < 4; ++bits) {
      c.transposed = (bits & 1) != 0;
      c.accumulate = (bits & 2) != 0;
      check_strip<Tiles>(c);
    }
  }
}

TEST(RegisterProduct, PlainRegistersGiveTheProduct) {
  check_strips<testing::PlainTiles>();
}

TEST(RegisterProduct, TileRegistersGiveTheProduct) {
  if (!may_use_tiles()) GTEST_SKIP() << "no tile registers (AMX) here";
  check_strips<AmxTiles>();
}

}  // namespace
}  // namespace tessera::tile
