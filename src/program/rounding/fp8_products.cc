#include "program/rounding/fp8_products.h"

#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = ScaledGroupedMatmul::kBlock;

bool is_e4m3(const CastSpec& cast) {
  return cast.number == NarrowNumber::kE4M3 && !cast.nested && !cast.stochastic && !cast.rotated;
}

/// The layouts of both operands' scales.
struct ProductScales {
  ScaleLayout rows;
  ScaleLayout weight;
  bool by_block = false;
};

std::optional<ProductScales> find_scales(const CastSpec& rows, const CastSpec& weight) {
  if (!is_e4m3(rows) || !is_e4m3(weight) || rows.width != 1) return std::nullopt;
  if (rows.length == 0 && weight.length == 0 && weight.width == 1)
    return ProductScales{ScaleLayout::row(), ScaleLayout::row()};
  if (rows.length == kBlock && weight.length == kBlock && weight.width == kBlock) {
    return ProductScales{ScaleLayout::block(1, kBlock), ScaleLayout::block(kBlock, kBlock),
                         /*by_block=*/true};
  }
  return std::nullopt;
}

/// Those of blocks are emulated: their kernel has waited for ever in steps that are CUDA graphs
/// (docs/log.md, 2026-11-27).
std::optional<TokenScales> find_token_scales(const CastSpec& narrow, const CastSpec& wide) {
  if (!is_e4m3(narrow) || narrow.width != 1 || wide != narrow) return std::nullopt;
  if (narrow.length == 0) return TokenScales::kGroup;
  return std::nullopt;
}

/// Whether these are rows of tokens that a QuantizeTokens takes on a GPU.
bool are_tokens(const TokenOperand& operand) {
  return operand.rounding.sum_dim == 0 && operand.type.dtype == DType::kBF16 &&
         (operand.rounding.offsets || !operand.type.ragged());
}

bool are_multiples(const ExpertSizes& sizes, int64_t unit) {
  return std::ranges::all_of(sizes.values(), [unit](int64_t size) { return size % unit == 0; });
}

}  // namespace

bool is_of_rows(const CastSpec& cast) {
  return cast.width == 1 && !cast.nested && !cast.stochastic;
}

bool has_fp8_product(const CastSpec& rows, const CastSpec& weight) {
  return find_scales(rows, weight).has_value();
}

std::optional<Fp8Product> find_fp8_product(const ValueType& rows,
                                           const RoundValuesSpec& rounded_rows,
                                           const ValueType& weight,
                                           const RoundValuesSpec& rounded_weight) {
  const auto scales = find_scales(rounded_rows.cast, rounded_weight.cast);
  if (!scales || rows.dtype != DType::kBF16 || weight.dtype != DType::kBF16) return std::nullopt;
  if (rows.ragged() && !rounded_rows.offsets) return std::nullopt;
  std::vector<int64_t> matrices = rounded_weight.group_rows;
  if (matrices.empty()) matrices = {weight.shape[0]};
  const int64_t num_columns = weight.shape[1];
  const bool turns = rounded_weight.sum_dim == 0;
  const int64_t turned_rows = turns ? matrices.front() : 0;
  if (turns) {
    if (turned_rows % Quantize::kTurnedUnit != 0 || num_columns % Quantize::kTurnedUnit != 0)
      return std::nullopt;
    matrices.assign(matrices.size(), num_columns);
  }
  const ExpertSizes sizes(matrices, ScaledGroupedMatmul::kName);
  if (!runs_on_tensor_cores(sizes, turns ? turned_rows : num_columns)) return std::nullopt;
  if (scales->by_block && !are_multiples(sizes, kBlock)) return std::nullopt;
  return Fp8Product{
      .rows = {.scale = scales->rows},
      .weight = {.scale = scales->weight, .turned_rows = turned_rows},
      .product = make_scaled_grouped_matmul({.group_sizes = matrices, .output = rows.dtype})};
}

bool has_fp8_wgrad(const CastSpec& narrow, const CastSpec& wide) {
  return find_token_scales(narrow, wide).has_value();
}

std::optional<Fp8Wgrad> find_fp8_wgrad(const TokenOperand& narrow, const TokenOperand& wide,
                                       const ExpertSizes& sizes) {
  const auto scales = find_token_scales(narrow.rounding.cast, wide.rounding.cast);
  if (!scales || !are_tokens(narrow) || !are_tokens(wide)) return std::nullopt;
  if (!has_scaled_wgrad(sizes, wide.type.shape[1])) return std::nullopt;
  return Fp8Wgrad{*scales, std::make_shared<ScaledGroupedWgrad>(
                               sizes, *scales == TokenScales::kBlock, narrow.type.shape[0])};
}

}  // namespace tessera
