#include "ops/quantize/quantize.h"

namespace tessera {

Quantize::Quantize(const QuantizeSpec& spec) : spec_(spec) {
  if (spec.element == DType::kF16) {
    require(!spec.scale.is_scaled() && spec.turned_rows == 0,
            "quantize: f16 has no scales, and is not turned");
    return;
  }
  require(spec.element == DType::kE4M3 || spec.element == DType::kE5M2,
          "quantize: elements are e4m3, e5m2 or f16, found {}", dtype_name(spec.element));
  require(
      spec.scale.kind == ScaleLayout::Kind::kRow || spec.scale.kind == ScaleLayout::Kind::kBlock,
      "quantize: scales are of rows or blocks, found '{}'", spec.scale.to_string());
  require(spec.turned_rows >= 0, "quantize: matrices of {} rows", spec.turned_rows);
}

std::string Quantize::attributes() const {
  const std::string format = Format(spec_.element, spec_.scale).name();
  return is_turned() ? fmt::format("{} turned {}", format, spec_.turned_rows) : format;
}

std::vector<ValueType> Quantize::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "takes f32 or bf16 [R, C], got {}", x.to_string());
  check_shape(*this, !x.ragged() || block_rows() == 1,
              "rows that share scales with others cannot be ragged, got {}", x.to_string());
  ValueType y = with_dtype(x, spec_.element);
  if (is_turned()) y.shape = turned(x);
  y.scale = spec_.scale;
  return {y};
}

Shape Quantize::turned(const ValueType& x) const {
  const int64_t num_rows = x.shape[0];
  const int64_t num_columns = x.shape[1];
  check_shape(*this, num_rows % spec_.turned_rows == 0 && !x.ragged(),
              "matrices of {} rows are to be turned, got {}", spec_.turned_rows, x.to_string());
  check_shape(*this, num_columns % block_rows() == 0,
              "scales of {} rows would be of several matrices of {} columns", block_rows(),
              num_columns);
  return {num_rows / spec_.turned_rows * num_columns, spec_.turned_rows};
}

QuantizeSpec half_spec() {
  return {.element = DType::kF16, .scale = ScaleLayout::none()};
}

bool takes_fp8(const Format& format) {
  return takes_f16(format) || format.element == DType::kE4M3 || format.element == DType::kE5M2;
}

OperatorPtr make_quantize(const QuantizeSpec& spec) {
  return std::make_shared<Quantize>(spec);
}

}  // namespace tessera
