#pragma once

#include <optional>

#include "ops/expert_sizes.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize_tokens/quantize_tokens.h"
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

/// The gradient of a weight, a product of operands that are rounded along tokens, likewise.
struct Fp8Wgrad {
  TokenScales scales = TokenScales::kGroup;  ///< of both operands
  OperatorPtr product;                       ///< ScaledGroupedWgrad
};

/// Whether tensor cores have gradients of weights of operands that are rounded so.
bool has_fp8_wgrad(const CastSpec& narrow, const CastSpec& wide);

/// An operand of the gradient: rows of tokens, and how they are rounded.
struct TokenOperand {
  const ValueType& type;
  const RoundValuesSpec& rounding;
};

/// The gradient narrowᵀ · wide, of experts' tokens where they are rounded by offsets; nullopt where
/// tensor cores lack it.
std::optional<Fp8Wgrad> find_fp8_wgrad(const TokenOperand& narrow, const TokenOperand& wide,
                                       const ExpertSizes& sizes);

}  // namespace tessera
