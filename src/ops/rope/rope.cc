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

Rope::Rope(RotarySpec spec, bool inverse, int64_t second_heads)
    : spec_(std::move(spec)), inverse_(inverse), second_heads_(second_heads) {
  const int64_t limit = std::min(spec_.head_size, kMaxRotaryDim);
  require(spec_.num_heads > 0, "rope: num_heads must be positive, got {}", spec_.num_heads);
  require(second_heads_ >= 0, "rope: second_heads must not be negative, got {}", second_heads_);
  require(spec_.rotary_dim() > 0 && spec_.rotary_dim() <= limit,
          "rope: {} inverse frequencies rotate {} elements of a head of {}; expected 2 to {}",
          spec_.inverse_frequencies.size(), spec_.rotary_dim(), spec_.head_size, limit);
  require(spec_.offset >= 0 && spec_.offset + spec_.rotary_dim() <= spec_.head_size,
          "rope: {} elements from {} on leave a head of {}", spec_.rotary_dim(), spec_.offset,
          spec_.head_size);
}

std::string Rope::attributes() const {
  return fmt::format(
      "heads={}{} head_size={} rotary_dim={}{}{} slowest={:.3g} amplitude={}", spec_.num_heads,
      second_heads_ > 0 ? fmt::format("+{}", second_heads_) : "", spec_.head_size,
      spec_.rotary_dim(), spec_.offset > 0 ? fmt::format(" offset={}", spec_.offset) : "",
      spec_.interleaved ? " interleaved" : "", spec_.inverse_frequencies.back(), spec_.amplitude);
}

void Rope::check_heads(const ValueType& x, int64_t num_heads) const {
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "x must be f32 or bf16 [T, heads * head size], got {}", x.to_string());
  check_shape(*this, x.shape[1] == num_heads * spec_.head_size,
              "{} heads of {} need rows of {}, but x is {}", num_heads, spec_.head_size,
              num_heads * spec_.head_size, x.to_string());
}

std::vector<ValueType> Rope::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, std::ssize(inputs) == input_set().size(), "takes {} inputs, got {}",
              input_set().size(), inputs.size());
  const ValueType& x = inputs[kX];
  check_heads(x, spec_.num_heads);
  std::vector<ValueType> results = {x};
  if (second_heads_ > 0) {
    const ValueType& second = inputs[input_set().position(kSecondX)];
    check_heads(second, second_heads_);
    check_shape(*this, with_last_dim(second, x.shape[1]) == x,
                "both tensors must have the same type and tokens, got {} and {}", x.to_string(),
                second.to_string());
    results.push_back(second);
  }
  const ValueType& positions = inputs[input_set().position(kPositions)];
  check_shape(*this, positions.dtype == DType::kI32 && positions.shape == Shape{x.shape[0]},
              "positions must be i32 [{}], got {}", x.shape[0], positions.to_string());
  return results;
}

void Rope::differentiate(GradientBuilder& builder) const {
  if (second_heads_ > 0 && builder.grad_output(kY) && builder.grad_output(kSecondY) &&
      builder.needs_grad(kX) && builder.needs_grad(kSecondX)) {
    const auto backward = std::make_shared<Rope>(spec_, !inverse_, second_heads_);
    const auto grads =
        builder.emit(backward, {*builder.grad_output(kY), *builder.grad_output(kSecondY),
                                builder.input(input_set().position(kPositions))});
    builder.set_grad_input(kX, grads[kY]);
    builder.set_grad_input(kSecondX, grads[kSecondY]);
    return;
  }
  differentiate_one(builder, kX, kY, spec_.num_heads);
  if (second_heads_ > 0) differentiate_one(builder, kSecondX, kSecondY, second_heads_);
}

void Rope::differentiate_one(GradientBuilder& builder, Input x, Output y, int64_t num_heads) const {
  const auto grad = builder.grad_output(y);
  if (!grad || !builder.needs_grad(x)) return;
  RotarySpec spec = spec_;
  spec.num_heads = num_heads;
  const auto backward = std::make_shared<Rope>(std::move(spec), !inverse_);
  const ValueId positions = builder.input(input_set().position(kPositions));
  builder.set_grad_input(x, builder.emit(backward, {*grad, positions})[kY]);
}

OperatorPtr make_rope(RotarySpec spec, int64_t second_heads) {
  return std::make_shared<Rope>(std::move(spec), false, second_heads);
}

}  // namespace tessera
