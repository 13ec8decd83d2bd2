#include "ops/scale_rows/scale_rows.h"

#include <gtest/gtest.h>

#include "ops/backend.h"
#include "ops/scale_rows/scale_rows_testing.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_scale_rows_cpu(table);
  return table;
}

void scale(const RowsFormat& format, const RowsCase& rows, int64_t columns) {
  const OperatorPtr op = make_scale_rows(format.weight, format.beside, columns);
  const Tensor factors = rows.factors;
  const auto outputs = rows.outputs();
  const ValueType type{DType::kF32, factors.shape};
  const auto types = op->infer(std::span(&type, 1));
  ASSERT_EQ(types.size(), outputs.size());
  for (size_t i = 0; i < types.size(); ++i) {
    EXPECT_EQ(types[i].dtype, outputs[i].dtype);
    EXPECT_EQ(types[i].shape, outputs[i].shape);
  }
  kernels().at("scale_rows")(*op, {.inputs = std::span(&factors, 1), .outputs = outputs});
}

/// How far a number may be from its product with the factor: what its format cannot tell.
double tolerance(const RowsFormat& format) {
  if (format.weight == DType::kF32 || format.beside == MasterKind::kF32) return 0;
  if (format.beside == MasterKind::kRemainder) return 1.5e-7;
  return format.beside == MasterKind::kRemainder8 ? 4e-5 : 8e-3;
}

void check(const RowsFormat& format, int64_t rows, int64_t columns) {
  const RowsCase given = make_rows(format, rows, columns, 1);
  const RowsCase scaled = make_rows(format, rows, columns, 1);
  scale(format, scaled, columns);
  const auto before = given.masters();
  const auto after = scaled.masters();
  const auto factors = given.factors.get().span<float>();
  double bias = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const float factor = factors[i / columns];
    const float expected = before[i] * factor;
    const double bound = factor == 1.0F ? 0 : tolerance(format) * std::abs(expected);
    ASSERT_NEAR(after[i], expected, bound) << i;
    bias += after[i] == expected ? 0 : (after[i] - expected) / expected;
  }
  if (rows * columns > 1000) {
    EXPECT_LT(std::abs(bias) / static_cast<double>(before.size()), tolerance(format) / 10 + 1e-9);
  }
  if (format.beside == MasterKind::kF32) {
    const auto weights = scaled.kept[ScaleRows::kWeight].get().span<Bf16>();
    for (size_t i = 0; i < after.size(); ++i) ASSERT_EQ(weights[i].bits, Bf16(after[i]).bits);
  }
}

TEST(ScaleRows, MultipliesEachRow) {
  for (const RowsFormat& format : kRowsFormats) {
    for (const auto& [rows, columns] :
         {std::pair(0, 3), std::pair(1, 1), std::pair(7, 1), std::pair(5, 33), std::pair(64, 100)})
      check(format, rows, columns);
  }
}

/// A factor near 1 moves BF16 weights without a master on average, though each by less than a
/// digit.
TEST(ScaleRows, SmallFactorsAreNotLost) {
  constexpr RowsFormat kAlone{DType::kBF16, MasterKind::kNone};
  const RowsCase rows = make_rows(kAlone, 1, 20000, 2);
  rows.factors.get().as<float>()[0] = 0.999F;
  const auto before = rows.masters();
  scale(kAlone, rows, 20000);
  const auto after = rows.masters();
  double sum_before = 0;
  double sum_after = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    sum_before += std::abs(before[i]);
    sum_after += std::abs(after[i]);
  }
  EXPECT_NEAR(sum_after / sum_before, 0.999, 2e-4);
}

TEST(ScaleRows, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_scale_rows(DType::kF32, MasterKind::kF32, 3), UserError);
  EXPECT_THROW(make_scale_rows(DType::kI32, MasterKind::kNone, 3), UserError);
  const ValueType matrix{DType::kF32, {3, 3}};
  EXPECT_THROW(make_scale_rows(DType::kF32, MasterKind::kNone, 3)->infer(std::span(&matrix, 1)),
               UserError);
}

}  // namespace
}  // namespace tessera::testing
