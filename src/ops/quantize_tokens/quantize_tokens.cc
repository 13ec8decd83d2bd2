#include "ops/quantize_tokens/quantize_tokens.h"

#include "ops/permute/row_maps.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_rows.h"

namespace tessera {

std::string QuantizeTokens::attributes() const {
  const std::string of = is_by_block() ? fmt::format("{}", kTokenBlock) : "group";
  return fmt::format("e4m3 {}{}", of, gather_ ? " gather" : "");
}

OperatorPtr QuantizeTokens::with_gather(int input) const {
  if (gather_ || input != kX) return nullptr;
  return std::make_shared<QuantizeTokens>(scales_, true);
}

std::vector<ValueType> QuantizeTokens::infer(std::span<const ValueType> inputs) const {
  const bool has_offsets = gather_ || inputs.size() == 2;
  check_shape(*this, gather_ ? inputs.size() == 4 : has_offsets || inputs.size() == 1,
              "takes x and perhaps offsets, and with gather two maps, got {} inputs",
              inputs.size());
  const ValueType& x = inputs[kX];
  const bool has_values = x.scale.is_scaled() ? has_scaled_rows(x.format()) : is_storage(x.dtype);
  check_shape(*this, has_values && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "takes f32, bf16, or fp8 with scales of its rows, [R, C], got {}", x.to_string());
  if (gather_) {
    check_source(*this, inputs[kSource]);
    check_row_of(*this, inputs[kRowOf]);
    check_same_first_dim(*this, x, inputs[kRowOf], "what is gathered and row_of_TK");
  }
  check_shape(*this, has_offsets || !x.ragged(), "ragged rows need offsets, got {}", x.to_string());
  int64_t num_groups = 1;
  if (has_offsets) {
    const ValueType& offsets = inputs[kOffsets];
    check_shape(*this,
                offsets.dtype == DType::kI64 && offsets.shape.rank() == 1 && offsets.shape[0] > 1,
                "offsets must be i64 [E + 1], got {}", offsets.to_string());
    num_groups = offsets.shape[0] - 1;
  }
  const int64_t rows = gather_ ? inputs[kSource].shape[0] : x.shape[0];
  const int64_t blocks = num_token_blocks(rows, num_groups);
  const int64_t columns = x.shape[1];
  return {{.dtype = DType::kE4M3, .shape = {columns, blocks * kTokenBlock}},
          {.dtype = DType::kF32, .shape = {is_by_block() ? blocks : num_groups, columns}}};
}

bool takes_e4m3_codes(const Format& format) {
  return is_unscaled(format) || format == Format(DType::kE4M3);
}

bool takes_tokens(const Format& format) {
  return takes_e4m3_codes(format) || has_scaled_rows(format);
}

OperatorPtr make_quantize_tokens(TokenScales scales) {
  return std::make_shared<QuantizeTokens>(scales);
}

}  // namespace tessera
