#include "ops/dequantize/dequantize.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/dequantize/dequantize_testing.h"

namespace tessera {
namespace {

using testing::dequantize;
using testing::quantize;
using testing::ScaledTensor;

TEST(Dequantize, GivesWhatTheCodesStandFor) {
  Random random(3, 1);
  for (const QuantizeSpec& spec : testing::dequantized_specs()) {
    for (const Shape& shape : {Shape{0, 16}, {1, 1}, {1, 128}, {5, 300}, {130, 257}, {3, 0}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const OwnedTensor x = testing::random_tensor(dtype, shape, random, 3.0);
        const ScaledTensor coded = quantize(x.get(), spec);
        EXPECT_EQ(testing::to_doubles(dequantize(coded.tensor, dtype).get()),
                  testing::values_of(coded));
      }
    }
  }
}

/// What was quantized once is quantized again, even with other values of a row, without a loss.
TEST(Dequantize, LosesNothing) {
  Random random(4, 1);
  for (const QuantizeSpec& spec : testing::dequantized_specs()) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, {40, 256}, random, 100.0);
    const OwnedTensor once = dequantize(quantize(x.get(), spec).tensor, DType::kBF16);
    const OwnedTensor twice = dequantize(quantize(once.get(), spec).tensor, DType::kBF16);
    EXPECT_EQ(testing::to_doubles(once.get()), testing::to_doubles(twice.get()));
  }
}

TEST(Dequantize, KeepsWhatIsNotFinite) {
  const OwnedTensor x = testing::tensor_of({2, 2}, {1, std::nanf(""), 3, 4}, DType::kBF16);
  const auto found = testing::to_doubles(
      dequantize(quantize(x.get(), {.scale = ScaleLayout::row()}).tensor, DType::kF32).get());
  EXPECT_TRUE(std::isnan(found[1]));
  EXPECT_EQ(found[2], 3);
}

TEST(Dequantize, RefusesWhatItCannotDo) {
  const OperatorPtr op = make_dequantize(DType::kBF16);
  ValueType x{.dtype = DType::kE4M3, .shape = {6, 32}, .scale = ScaleLayout::block(1, 16)};
  EXPECT_EQ(op->infer(std::vector{x})[0].to_string(), "bf16 [6, 32]");
  x.scale = ScaleLayout::block(2, 16);
  EXPECT_EQ(op->infer(std::vector{x})[0].to_string(), "bf16 [6, 32]");
  x.ragged_dim = 0;
  EXPECT_THROW(op->infer(std::vector{x}), UserError);
  x.ragged_dim = -1;
  x.scale = ScaleLayout::mx();
  EXPECT_THROW(op->infer(std::vector{x}), UserError);
  x.scale = {};
  EXPECT_THROW(op->infer(std::vector{x}), UserError);
  EXPECT_THROW(make_dequantize(DType::kI32), InternalError);
}

}  // namespace
}  // namespace tessera
