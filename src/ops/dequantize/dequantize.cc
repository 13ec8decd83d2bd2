#include "ops/dequantize/dequantize.h"

#include "ops/scaled_rows.h"

namespace tessera {

Dequantize::Dequantize(DType dtype) : dtype_(dtype) {
  ensure(dtype == DType::kF32 || dtype == DType::kBF16, "dequantize: gives f32 or bf16, not {}",
         dtype_name(dtype));
}

std::string Dequantize::attributes() const {
  return std::string(dtype_name(dtype_));
}

std::vector<ValueType> Dequantize::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  const bool has_scales = x.scale.is_scaled() && takes_dequantized(x.format());
  check_shape(*this, has_scales && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "takes fp8 [R, C] with scales of its rows or blocks, got {}", x.to_string());
  check_shape(*this, !x.ragged() || has_scaled_rows(x.format()),
              "rows that share scales with others cannot be ragged, got {}", x.to_string());
  ValueType y = with_dtype(x, dtype_);
  y.scale = {};
  return {y};
}

bool takes_dequantized(const Format& format) {
  const bool is_fp8 = format.element == DType::kE4M3 || format.element == DType::kE5M2;
  return takes_scaled_rows(format) || (is_fp8 && format.scale.kind == ScaleLayout::Kind::kBlock);
}

OperatorPtr make_dequantize(DType dtype) {
  return std::make_shared<Dequantize>(dtype);
}

}  // namespace tessera
