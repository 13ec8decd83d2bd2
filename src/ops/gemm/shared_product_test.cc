#include "ops/gemm/shared_product.h"

#include <gtest/gtest.h>

#include "core/process/cpu_level.h"
#include "ops/gemm/aligned_words.h"
#include "ops/gemm/testing/plain_tile_product.h"
#include "ops/gemm/testing/product_checks.h"
#include "ops/gemm/tile_products.h"
#include "ops/gemm/vector_products.h"

namespace tessera {
namespace {

TEST(SharedProduct, BlocksSuitThreads) {
  const ProductBlocks tall = cut_product(8192, 512, 16);
  EXPECT_EQ(tall.rows, 256);
  EXPECT_EQ(tall.cols, 512);
  const ProductBlocks square = cut_product(512, 512, 16);
  EXPECT_EQ(square.rows, 128);
  EXPECT_EQ(square.cols, 128);
  for (const int64_t m : {1, 31, 100, 5000}) {
    for (const int64_t n : {1, 33, 700}) {
      for (const int threads : {1, 2, 7, 64}) {
        const ProductBlocks blocks = cut_product(m, n, threads);
        EXPECT_GE(blocks.rows, 1);
        EXPECT_GE(blocks.cols, 1);
        EXPECT_LE(blocks.cols, 512);
      }
    }
  }
}

template <typename T>
void check_shared(ThreadProduct multiply) {
  cpu_level();  // a level that is not there is told here, and not by a thread of the product
  const auto run = [multiply](const Gemm& product) { share_out_product(product, multiply); };
  testing::check_layouts<T>(150, 40, 33, run);
  testing::check_layouts<T>(33, 520, 70, run);
  testing::check_layouts<T>(96, 70, 64, run);
  EXPECT_EQ(count_slices({.m = 270, .n = 9, .k = 2100}), 2);
  testing::check_layouts<T>(270, 9, 2100, run);
}

TEST(SharedProduct, ThreadsShareTiles) {
  check_shared<Bf16>([](const Gemm& product) {
    thread_local AlignedWords scratch;
    testing::multiply_on_plain_tiles(product, scratch.at_least(tile_scratch_words()));
  });
}

TEST(SharedProduct, ThreadsShareVectors) {
  check_shared<float>([](const Gemm& product) {
    thread_local AlignedWords scratch;
    multiply_on_vectors(product, scratch.at_least(vector_scratch_words()));
  });
}

TEST(SharedProduct, OnlySmallResultsOfLongSumsAreSliced) {
  EXPECT_EQ(count_slices({.m = 512, .n = 512, .k = 8192}), 8);
  EXPECT_EQ(count_slices({.m = 512, .n = 512, .k = 1 << 20}), 16);
  EXPECT_EQ(count_slices({.m = 512, .n = 512, .k = 1000}), 1);
  EXPECT_EQ(count_slices({.m = 8192, .n = 512, .k = 8192}), 1);
  EXPECT_EQ(count_slices({.m = 512, .n = 512, .k = 8192, .output_type = DType::kBF16}), 1);
}

}  // namespace
}  // namespace tessera
