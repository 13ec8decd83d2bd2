#include "ops/gemm/tile_products.h"

#include <gtest/gtest.h>

#include "core/process/cpu_level.h"
#include "ops/gemm/testing/plain_tile_product.h"
#include "ops/gemm/testing/product_checks.h"
#include "ops/gemm/tile_permission.h"

namespace tessera {
namespace {

using testing::check_layouts;
using testing::check_shapes;
using testing::NanScratch;

TEST(TileProducts, PlainRegistersGiveTheProduct) {
  NanScratch scratch(tile_scratch_words());
  check_shapes<Bf16>(
      [&](const Gemm& product) { testing::multiply_on_plain_tiles(product, scratch.aligned()); });
}

TEST(TileProducts, TileRegistersGiveTheProduct) {
  if (!may_use_tiles()) GTEST_SKIP() << "no tile registers (AMX) here";
  NanScratch scratch(tile_scratch_words());
  check_shapes<Bf16>([&](const Gemm& product) { multiply_on_tiles(product, scratch.aligned()); });
}

TEST(TileProducts, ThreadsShareTileRegisters) {
  if (!may_use_tiles()) GTEST_SKIP() << "no tile registers (AMX) here";
  cpu_level();  // a level that is not there is told here, and not by a thread of the product
  check_layouts<Bf16>(150, 40, 33, gemm_on_tiles);
  check_layouts<Bf16>(270, 40, 2100, gemm_on_tiles);
}

}  // namespace
}  // namespace tessera
