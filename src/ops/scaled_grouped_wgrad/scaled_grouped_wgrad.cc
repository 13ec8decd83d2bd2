#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"

#include "ops/grouped_matmul/grouped_tile_model.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/quantize_tokens/token_blocks.h"

namespace tessera {
namespace {

bool are_codes(const ValueType& type, const Shape& shape) {
  return type.dtype == DType::kE4M3 && type.shape == shape && !type.ragged();
}

bool are_scales(const ValueType& type, const Shape& shape) {
  return type.dtype == DType::kF32 && type.shape == shape;
}

}  // namespace

std::string ScaledGroupedWgrad::attributes() const {
  return fmt::format("experts={}{}", sizes_.to_string(), by_block_ ? " by block" : "");
}

std::vector<ValueType> ScaledGroupedWgrad::infer(std::span<const ValueType> inputs) const {
  const int64_t experts = sizes_.num_experts();
  const bool has_offsets = inputs.size() == 5;
  check_shape(*this, has_offsets || (inputs.size() == 4 && experts == 1),
              "takes narrow, wide, their scales and offsets, which one expert does not need, got "
              "{} inputs",
              inputs.size());
  const int64_t blocks = num_token_blocks(num_tokens_, experts);
  const int64_t num_scales = by_block_ ? blocks : experts;
  const ValueType& wide = inputs[kWide];
  check_shape(*this, wide.shape.rank() == 2, "wide must be e4m3 [H, N], got {}", wide.to_string());
  const int64_t columns = wide.shape[0];
  const auto check_operand = [&](int codes, int scales, int64_t width) {
    check_shape(*this,
                are_codes(inputs[codes], {width, blocks * kTokenBlock}) &&
                    are_scales(inputs[scales], {num_scales, width}),
                "an operand of {} tokens must be e4m3 [{}, {}] with scales [{}, {}], got {} and {}",
                num_tokens_, width, blocks * kTokenBlock, num_scales, width,
                inputs[codes].to_string(), inputs[scales].to_string());
  };
  check_operand(kNarrow, kNarrowScales, sizes_.largest());
  check_operand(kWide, kWideScales, columns);
  check_shape(*this,
              !has_offsets || (inputs[kOffsets].dtype == DType::kI64 &&
                               inputs[kOffsets].shape == Shape{experts + 1}),
              "offsets must be i64 [{}], got {}", experts + 1, inputs.back().to_string());
  return {{.dtype = DType::kF32, .shape = {sizes_.total(), columns}}};
}

Cost ScaledGroupedWgrad::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const auto tokens_of_expert =
      static_cast<double>(num_tokens_) / static_cast<double>(sizes_.num_experts());
  cost.flops = 2.0 * tokens_of_expert * static_cast<double>(sizes_.total()) *
               static_cast<double>(inputs[kWide].shape[0]);
  return cost;
}

bool has_scaled_wgrad(const ExpertSizes& sizes, int64_t wide) {
  return wide > 0 && wide % QuantizeTokens::kUnit == 0 &&
         sizes.largest() % QuantizeTokens::kUnit == 0 &&
         sizes.num_experts() <= cuda::kGroupedMaxExperts;
}

}  // namespace tessera
