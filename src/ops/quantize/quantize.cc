#include "ops/quantize/quantize.h"

#include "core/fp8.h"

namespace tessera {

float largest_of(DType element) {
  ensure(element == DType::kE4M3 || element == DType::kE5M2, "{} is no type of FP8",
         dtype_name(element));
  return element == DType::kE4M3 ? kLargestE4m3 : kLargestE5m2;
}

Quantize::Quantize(const QuantizeSpec& spec) : spec_(spec) {
  require(spec.element == DType::kE4M3 || spec.element == DType::kE5M2,
          "quantize: elements are e4m3 or e5m2, found {}", dtype_name(spec.element));
  require(
      spec.scale.kind == ScaleLayout::Kind::kRow || spec.scale.kind == ScaleLayout::Kind::kBlock,
      "quantize: scales are of rows or blocks, found '{}'", spec.scale.to_string());
}

std::string Quantize::attributes() const {
  return Format(spec_.element, spec_.scale).name();
}

std::vector<ValueType> Quantize::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "takes f32 or bf16 [R, C], got {}", x.to_string());
  check_shape(*this, !x.ragged() || block_rows() == 1,
              "rows that share scales with others cannot be ragged, got {}", x.to_string());
  ValueType y = with_dtype(x, spec_.element);
  y.scale = spec_.scale;
  return {y};
}

bool takes_fp8(const Format& format) {
  return is_unscaled(format) || format.element == DType::kE4M3 || format.element == DType::kE5M2;
}

OperatorPtr make_quantize(const QuantizeSpec& spec) {
  return std::make_shared<Quantize>(spec);
}

}  // namespace tessera
