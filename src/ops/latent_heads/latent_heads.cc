#include "ops/latent_heads/latent_heads.h"

#include "ops/storage.h"

namespace tessera {
namespace {

/// Checks that two inputs are A [T, first_width] and A [T, second_width] of one T and one type.
void check_rows(const Operator& op, std::span<const ValueType> inputs, int64_t first_width,
                int64_t second_width) {
  check_shape(op, inputs.size() == 2, "takes 2 inputs, got {}", inputs.size());
  const ValueType& first = inputs.front();
  const ValueType& second = inputs.back();
  check_shape(op, is_storage(first.dtype) && first.shape.rank() == 2 && first.ragged_dim <= 0,
              "the first input must be f32 or bf16 [T, {}], got {}", first_width,
              first.to_string());
  check_shape(op, first.shape[1] == first_width, "the first input must have rows of {}, got {}",
              first_width, first.to_string());
  ValueType expected = first;
  expected.shape = Shape{first.shape[0], second_width};
  check_shape(op, second == expected, "the second input must be {}, got {}", expected.to_string(),
              second.to_string());
}

std::vector<ValueType> with_widths(const ValueType& like, int64_t first, int64_t second) {
  std::vector<ValueType> types(2, like);
  types[0].shape = Shape{like.shape[0], first};
  types[1].shape = Shape{like.shape[0], second};
  return types;
}

}  // namespace

LatentHeads::LatentHeads(const LatentHeadsSpec& spec) : spec_(spec) {
  require(spec.num_heads > 0 && spec.nope_size > 0 && spec.rope_size > 0 && spec.value_size > 0,
          "latent_heads: sizes must be positive, got {} heads of {} + {} elements and values of {}",
          spec.num_heads, spec.nope_size, spec.rope_size, spec.value_size);
}

std::string LatentHeads::attributes() const {
  return fmt::format("heads={} nope={} rope={} value={}", spec_.num_heads, spec_.nope_size,
                     spec_.rope_size, spec_.value_size);
}

std::vector<ValueType> LatentHeads::infer(std::span<const ValueType> inputs) const {
  check_rows(*this, inputs, spec_.num_heads * (spec_.nope_size + spec_.value_size),
             spec_.rope_size);
  return with_widths(inputs[kKv], spec_.num_heads * spec_.key_size(),
                     spec_.num_heads * spec_.value_size);
}

void LatentHeads::differentiate(GradientBuilder& builder) const {
  const auto grad_keys = builder.grad_output(kKeys);
  const auto grad_values = builder.grad_output(kValues);
  if (!grad_keys && !grad_values) return;
  ensure(grad_keys && grad_values, "latent_heads: keys and values take their gradients together");
  const auto grads =
      builder.emit(std::make_shared<LatentHeadsBackward>(spec_), {*grad_keys, *grad_values});
  for (int input = 0; input < 2; ++input) {
    if (builder.needs_grad(input)) {
      builder.set_grad_input(input, grads[input]);
    }
  }
}

std::vector<ValueType> LatentHeadsBackward::infer(std::span<const ValueType> inputs) const {
  check_rows(*this, inputs, spec_.num_heads * spec_.key_size(), spec_.num_heads * spec_.value_size);
  return with_widths(inputs[kGradKeys], spec_.num_heads * (spec_.nope_size + spec_.value_size),
                     spec_.rope_size);
}

OperatorPtr make_latent_heads(const LatentHeadsSpec& spec) {
  return std::make_shared<LatentHeads>(spec);
}

}  // namespace tessera
