#include "ops/quantize/turn_blocks.h"

namespace tessera {

TurnBlocks::TurnBlocks(int64_t matrix_rows) : matrix_rows_(matrix_rows) {
  require(matrix_rows > 0 && matrix_rows % kBlock == 0,
          "turn_blocks: matrices of {} rows, which must be a multiple of {}", matrix_rows, kBlock);
}

std::string TurnBlocks::attributes() const {
  return fmt::format("turned {}", matrix_rows_);
}

std::vector<ValueType> TurnBlocks::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  ValueType y = inputs[kX];
  check_shape(*this, takes_block_weights(y.format()) && y.shape.rank() == 2 && !y.ragged(),
              "takes e4m3 [R, C] with scales of 128 x 128, got {}", y.to_string());
  check_shape(*this, y.shape[0] % matrix_rows_ == 0 && y.shape[1] % kBlock == 0,
              "takes matrices of {} rows and multiples of {} columns, got {}", matrix_rows_, kBlock,
              y.shape.to_string());
  y.shape = {y.shape[0] / matrix_rows_ * y.shape[1], matrix_rows_};
  return {y};
}

bool takes_block_weights(const Format& format) {
  constexpr auto kSide = static_cast<int32_t>(TurnBlocks::kBlock);
  return format == Format(DType::kE4M3, ScaleLayout::block(kSide, kSide));
}

OperatorPtr make_turn_blocks(int64_t matrix_rows) {
  return std::make_shared<TurnBlocks>(matrix_rows);
}

}  // namespace tessera
