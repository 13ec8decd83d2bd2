#include "ops/rope/rope.h"

#include <cmath>

#include "ops/storage.h"

namespace tessera {

std::vector<float> default_inverse_frequencies(int64_t rotary_dim, double base) {
  require(rotary_dim > 0 && rotary_dim % 2 == 0,
          "rope: the rotary dim must be even and positive, got {}", rotary_dim);
  require(base > 0, "rope: the base must be positive, got {}", base);
  std::vector<float> frequencies;
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    const double exponent = -static_cast<double>(i) / static_cast<double>(rotary_dim);
    frequencies.push_back(static_cast<float>(std::pow(base, exponent)));
  }
  return frequencies;
}

Rope::Rope(RotarySpec spec, bool inverse) : spec_(std::move(spec)), inverse_(inverse) {
  const int64_t limit = std::min(spec_.head_size, kMaxRotaryDim);
  require(spec_.num_heads > 0, "rope: num_heads must be positive, got {}", spec_.num_heads);
  require(spec_.rotary_dim() > 0 && spec_.rotary_dim() <= limit,
          "rope: {} inverse frequencies rotate {} elements of a head of {}; expected 2 to {}",
          spec_.inverse_frequencies.size(), spec_.rotary_dim(), spec_.head_size, limit);
  require(spec_.offset >= 0 && spec_.offset + spec_.rotary_dim() <= spec_.head_size,
          "rope: {} elements from {} on leave a head of {}", spec_.rotary_dim(), spec_.offset,
          spec_.head_size);
}

std::string Rope::attributes() const {
  return fmt::format("heads={} head_size={} rotary_dim={}{}{} slowest={:.3g} amplitude={}",
                     spec_.num_heads, spec_.head_size, spec_.rotary_dim(),
                     spec_.offset > 0 ? fmt::format(" offset={}", spec_.offset) : "",
                     spec_.interleaved ? " interleaved" : "", spec_.inverse_frequencies.back(),
                     spec_.amplitude);
}

std::vector<ValueType> Rope::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and positions, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& positions = inputs[kPositions];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "x must be f32 or bf16 [T, heads * head size], got {}", x.to_string());
  check_shape(*this, x.shape[1] == spec_.num_heads * spec_.head_size,
              "{} heads of {} need rows of {}, but x is {}", spec_.num_heads, spec_.head_size,
              spec_.num_heads * spec_.head_size, x.to_string());
  check_shape(*this, positions.dtype == DType::kI32 && positions.shape == Shape{x.shape[0]},
              "positions must be i32 [{}], got {}", x.shape[0], positions.to_string());
  return {x};
}

void Rope::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad || !builder.needs_grad(kX)) return;
  const auto backward = std::make_shared<Rope>(spec_, !inverse_);
  builder.set_grad_input(kX, builder.emit(backward, {*grad, builder.input(kPositions)})[Rope::kY]);
}

OperatorPtr make_rope(RotarySpec spec) {
  return std::make_shared<Rope>(std::move(spec), false);
}

}  // namespace tessera
