#include "ops/layer_norm/layer_norm.h"

#include "ops/storage.h"

namespace tessera {

LayerNorm::LayerNorm(double eps) : eps_(eps) {
  require(eps >= 0, "layer_norm: eps {} is negative", eps);
}

std::string LayerNorm::attributes() const {
  return fmt::format("eps={}", eps_);
}

std::vector<ValueType> LayerNorm::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes x, weight and bias, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "x must be f32 or bf16 [T, D], got {}", x.to_string());
  const ValueType vector{DType::kF32, {x.shape.last()}};
  check_shape(*this, inputs[kWeight] == vector && inputs[kBias] == vector,
              "weight and bias must be {}, got {} and {}", vector.to_string(),
              inputs[kWeight].to_string(), inputs[kBias].to_string());
  return {x};
}

OperatorPtr make_layer_norm(double eps) {
  return std::make_shared<LayerNorm>(eps);
}

}  // namespace tessera
