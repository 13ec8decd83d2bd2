#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include "ops/gemm/gemm.h"
#include "ops/linear_cross_entropy/head_workspace.h"
#include "ops/many_threads.h"

namespace tessera {
namespace {

/// F32 [T], T as of x: ragged where x is.
ValueType per_token(const ValueType& x) {
  ValueType type = x;
  type.dtype = DType::kF32;
  type.shape = {x.shape[0]};
  return type;
}

const ValueType kScalar = {.dtype = DType::kF32, .shape = {1}};

int64_t workspace_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec,
                        const HeadNeeds& needs) {
  return HeadWorkspace(HeadSizes(inputs[0].shape, inputs[1].shape, spec), needs).num_bytes;
}

}  // namespace

int64_t CrossEntropySpec::default_block_vocab() {
  return cpu_has_matrix_tiles() ? 4096 : 512;
}

std::optional<CrossEntropyParts> CrossEntropySpec::default_parts() {
  return has_many_threads() ? std::optional(CrossEntropyParts()) : std::nullopt;
}

CrossEntropyOperator::CrossEntropyOperator(const CrossEntropySpec& spec) : spec_(spec) {
  require(spec.chunk_tokens >= 1, "cross-entropy: chunk_tokens must be at least 1, got {}",
          spec.chunk_tokens);
  require(spec.block_vocab >= 1, "cross-entropy: block_vocab must be at least 1, got {}",
          spec.block_vocab);
  const bool valid = !spec.parts || (spec.parts->chunk_tokens >= 1 &&
                                     spec.parts->block_vocab >= 1 && spec.parts->num_parts >= 1);
  require(valid, "cross-entropy: sizes of parts must be at least 1");
}

std::string CrossEntropyOperator::attributes() const {
  return fmt::format("chunk_tokens={} block_vocab={}", spec_.chunk_tokens, spec_.block_vocab);
}

void CrossEntropyOperator::check_inputs(std::span<const ValueType> inputs,
                                        size_t num_inputs) const {
  check_shape(*this, inputs.size() == num_inputs, "takes {} inputs, got {}", num_inputs,
              inputs.size());
  const ValueType& x = inputs[0];
  const ValueType& weight = inputs[1];
  check_shape(*this, x.dtype == DType::kF32 || x.dtype == DType::kBF16,
              "x must be f32 or bf16, got {}", x.to_string());
  check_shape(*this, x.shape.rank() == 2 && x.ragged_dim <= 0, "x must be [T, H], got {}",
              x.to_string());
  check_shape(*this,
              weight.dtype == x.dtype && weight.shape.rank() == 2 && !weight.ragged() &&
                  weight.shape[1] == x.shape[1] && weight.shape[0] >= 1,
              "weight must be {} [V, {}] with V at least 1, got {}", dtype_name(x.dtype),
              x.shape[1], weight.to_string());
  check_shape(*this, inputs[2] == with_dtype(per_token(x), DType::kI32),
              "labels must be {}, got {}", with_dtype(per_token(x), DType::kI32).to_string(),
              inputs[2].to_string());
  check_shape(*this, inputs[3] == kScalar, "scale must be f32 [1], got {}", inputs[3].to_string());
}

Cost CrossEntropyOperator::product_cost(int num_products, std::span<const ValueType> inputs,
                                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * num_products * static_cast<double>(inputs[0].shape.num_elements()) *
               static_cast<double>(inputs[1].shape[0]);
  return cost;
}

std::vector<ValueType> LinearCrossEntropy::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 4);
  return {kScalar, per_token(inputs[0]), per_token(inputs[0])};
}

Cost LinearCrossEntropy::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  return product_cost(1, inputs, outputs);
}

void LinearCrossEntropy::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(1) && !builder.grad_output(2),
         "linear_cross_entropy: only the loss may have a gradient");
  ensure(!builder.needs_grad(3), "linear_cross_entropy: the scale has no gradient");
  const std::vector<ValueId> grads =
      builder.emit(std::make_shared<LinearCrossEntropyBackward>(spec()),
                   {builder.input(0), builder.input(1), builder.input(2), builder.input(3),
                    builder.output(2), *builder.grad_output(0)},
                   {1});
  if (builder.needs_grad(0)) builder.set_grad_input(0, grads[0]);
}

int64_t LinearCrossEntropy::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return workspace_bytes(inputs, spec(), forward_needs(inputs[0].dtype));
}

std::vector<ValueType> LinearCrossEntropyBackward::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 6);
  check_shape(*this, inputs[4] == per_token(inputs[0]), "lse must be {}, got {}",
              per_token(inputs[0]).to_string(), inputs[4].to_string());
  check_shape(*this, inputs[5] == kScalar, "grad_loss must be f32 [1], got {}",
              inputs[5].to_string());
  return {inputs[0], with_dtype(inputs[1], DType::kF32)};
}

Cost LinearCrossEntropyBackward::cost(std::span<const ValueType> inputs,
                                      std::span<const ValueType> outputs) const {
  return product_cost(2, inputs, outputs);
}

int64_t LinearCrossEntropyBackward::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return workspace_bytes(inputs, spec(), backward_needs(inputs[0].dtype));
}

std::vector<ValueType> LinearCrossEntropyFused::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 4);
  return {kScalar, per_token(inputs[0]), inputs[0], with_dtype(inputs[1], DType::kF32)};
}

Cost LinearCrossEntropyFused::cost(std::span<const ValueType> inputs,
                                   std::span<const ValueType> outputs) const {
  return product_cost(3, inputs, outputs);
}

void LinearCrossEntropyFused::differentiate(GradientBuilder& builder) const {
  if (builder.needs_grad(0)) builder.set_grad_input(0, builder.output(2));
}

int64_t LinearCrossEntropyFused::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  const Shape& x = inputs[0].shape;
  const Shape& weight = inputs[1].shape;
  return HeadWorkspace(fused_sizes(x, weight, spec()), fused_needs(inputs[0].dtype, spec()))
      .num_bytes;
}

OperatorPtr make_linear_cross_entropy(const CrossEntropySpec& spec) {
  return std::make_shared<LinearCrossEntropy>(spec);
}

OperatorPtr make_linear_cross_entropy_fused(const CrossEntropySpec& spec) {
  return std::make_shared<LinearCrossEntropyFused>(spec);
}

}  // namespace tessera
