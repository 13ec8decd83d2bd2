#include "ops/gemm/vector_products.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/process/cpu_level.h"
#include "ops/gemm/testing/product_checks.h"

namespace tessera {
namespace {

using testing::NanScratch;

TEST(VectorProducts, GiveTheProduct) {
  NanScratch scratch(vector_scratch_words());
  testing::check_shapes<float>(
      [&](const Gemm& product) { multiply_on_vectors(product, scratch.aligned()); });
}

TEST(VectorProducts, RowsDoNotDependOnThoseBesideThem) {
  NanScratch scratch(vector_scratch_words());
  testing::ProductOperands<float> whole({.m = 61, .n = 45, .k = 300, .transpose_b = true});
  multiply_on_vectors(whole.product, scratch.aligned());
  std::vector<float> alone(45);
  for (int64_t row = 0; row < 61; ++row) {
    Gemm product = whole.product;
    product.m = 1;
    product.a = whole.a.data() + row * product.lda;
    product.c = alone.data();
    multiply_on_vectors(product, scratch.aligned());
    EXPECT_EQ(std::memcmp(alone.data(), whole.wide.data() + row * product.ldc, 45 * sizeof(float)),
              0)
        << "row " << row;
  }
}

TEST(VectorProducts, TakeWhatPaysToPack) {
  const bool wide = cpu_level() >= CpuLevel::kAvx512;
  EXPECT_EQ(suits_vectors({.m = 64, .n = 64, .k = 64}), wide);
  EXPECT_FALSE(suits_vectors({.m = 1, .n = 64, .k = 64}));
  EXPECT_FALSE(suits_vectors({.m = 64, .n = 64, .k = 64, .input_type = DType::kBF16}));
}

}  // namespace
}  // namespace tessera
