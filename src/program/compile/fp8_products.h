#pragma once

#include <optional>

#include "ops/quantize/quantize.h"
#include "ops/round_values/round_values.h"
#include "program/program.h"

namespace tessera {

/// A product of rounded operands as tensor cores make it of FP8 numbers and their scales.
struct Fp8Product {
  QuantizeSpec rows;
  QuantizeSpec weight;
  OperatorPtr product;  ///< ScaledGroupedMatmul
};

/// Whether rounding a row asks for nothing of others.
bool is_of_rows(const CastSpec& cast);

/// Whether tensor cores have products of operands that are rounded so, of sizes that suit them.
bool has_fp8_product(const CastSpec& rows, const CastSpec& weight);

/// The product y = rows · weightᵀ or, where the weight is rounded down columns, rows · weight, of
/// operands that are rounded so; nullopt where tensor cores lack it: for other numbers, scales or
/// sizes. What the operands stand for is the same to the bit, so results differ by the order and
/// the digits of sums alone.
std::optional<Fp8Product> find_fp8_product(const ValueType& rows,
                                           const RoundValuesSpec& rounded_rows,
                                           const ValueType& weight,
                                           const RoundValuesSpec& rounded_weight);

}  // namespace tessera
