#include "ops/quantize/quantize_blocks.h"

#include "core/format.h"

namespace tessera {

std::vector<ValueType> QuantizeBlocks::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, x.dtype == DType::kF32 && x.shape.rank() == 2 && !x.ragged(),
              "takes f32 [R, C], got {}", x.to_string());
  return {{.dtype = DType::kE4M3, .shape = x.shape},
          {.dtype = DType::kF32, .shape = shape_of_block_scales(x.shape)}};
}

Shape shape_of_block_scales(const Shape& matrix) {
  constexpr auto kSide = static_cast<int32_t>(QuantizeBlocks::kBlock);
  return Format(DType::kE4M3, ScaleLayout::block(kSide, kSide)).scales(matrix).front().shape;
}

OperatorPtr make_quantize_blocks() {
  return std::make_shared<QuantizeBlocks>();
}

}  // namespace tessera
