#include "ops/bf16_sum/bf16_sum.h"

namespace tessera {
namespace {

bool is_flat_f32(const ValueType& type) {
  return type.dtype == DType::kF32 && type.shape.rank() == 1 && !type.ragged();
}

}  // namespace

std::vector<ValueType> RoundToBf16::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes 1 input, got {}", inputs.size());
  check_shape(*this, is_flat_f32(inputs[kX]), "x must be f32 [n], got {}", inputs[kX].to_string());
  return {with_dtype(inputs[kX], DType::kBF16)};
}

std::vector<ValueType> SumBf16Parts::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes 2 inputs, got {}", inputs.size());
  const ValueType& parts = inputs[kParts];
  const ValueType& own = inputs[kOwn];
  check_shape(*this, is_storage(own.dtype) && own.shape.rank() == 1 && !own.ragged(),
              "own must be f32 or bf16 [n], got {}", own.to_string());
  check_shape(*this,
              parts.dtype == DType::kBF16 && parts.shape.rank() == 2 && !parts.ragged() &&
                  parts.shape[1] == own.shape[0] && own_ >= 0 && own_ <= parts.shape[0],
              "parts must be bf16 [P - 1, {}] with P over {}, got {}", own.shape[0], own_,
              parts.to_string());
  return {own};
}

std::vector<ValueType> AddToBf16::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes 1 input, got {}", inputs.size());
  check_shape(*this, is_flat_f32(inputs[kX]), "x must be f32 [n], got {}", inputs[kX].to_string());
  return {with_dtype(inputs[kX], DType::kBF16)};
}

OperatorPtr make_round_to_bf16() {
  return std::make_shared<RoundToBf16>();
}

OperatorPtr make_sum_bf16_parts(int64_t own) {
  return std::make_shared<SumBf16Parts>(own);
}

OperatorPtr make_add_to_bf16() {
  return std::make_shared<AddToBf16>();
}

}  // namespace tessera
