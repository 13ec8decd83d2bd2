#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <cmath>

#include "ops/gemm/tile_permission.h"
#include "ops/many_threads.h"
#include "ops/storage.h"

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

}  // namespace

int64_t CrossEntropySpec::default_block_vocab() {
  return may_use_tiles() ? 4096 : 512;
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
  require(spec.softcap >= 0 && std::isfinite(spec.softcap),
          "cross-entropy: softcap must be at least 0, got {}", spec.softcap);
}

std::string CrossEntropyOperator::attributes() const {
  return fmt::format("chunk_tokens={} block_vocab={}{}{}", spec_.chunk_tokens, spec_.block_vocab,
                     spec_.softcap > 0 ? fmt::format(" softcap={}", spec_.softcap) : "",
                     spec_.weighted ? " weighted" : "") +
         (spec_.biased ? " biased" : "");
}

void CrossEntropyOperator::check_inputs(std::span<const ValueType> inputs,
                                        size_t num_inputs) const {
  const size_t all_inputs = num_inputs + (spec_.weighted ? 1 : 0) + (spec_.biased ? 1 : 0);
  check_shape(*this, inputs.size() == all_inputs, "takes {} inputs, got {}", all_inputs,
              inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& weight = inputs[kWeight];
  check_shape(*this, is_storage(x.dtype), "x must be f32 or bf16, got {}", x.to_string());
  check_shape(*this, x.shape.rank() == 2 && x.ragged_dim <= 0, "x must be [T, H], got {}",
              x.to_string());
  check_shape(*this,
              weight.dtype == x.dtype && weight.shape.rank() == 2 && !weight.ragged() &&
                  weight.shape[1] == x.shape[1] && weight.shape[0] >= 1,
              "weight must be {} [V, {}] with V at least 1, got {}", dtype_name(x.dtype),
              x.shape[1], weight.to_string());
  check_shape(*this, inputs[kLabels] == with_dtype(per_token(x), DType::kI32),
              "labels must be {}, got {}", with_dtype(per_token(x), DType::kI32).to_string(),
              inputs[kLabels].to_string());
  check_shape(*this, inputs[kScale] == kScalar, "scale must be f32 [1], got {}",
              inputs[kScale].to_string());
  if (spec_.biased) {
    check_shape(*this, inputs.back() == head_bias_type(weight), "the bias must be {}, got {}",
                head_bias_type(weight).to_string(), inputs.back().to_string());
  }
  if (!spec_.weighted) return;
  check_shape(*this, inputs[num_inputs] == per_token(x), "token_weights must be {}, got {}",
              per_token(x).to_string(), inputs[num_inputs].to_string());
}

Cost CrossEntropyOperator::product_cost(int num_products, std::span<const ValueType> inputs,
                                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * num_products * static_cast<double>(inputs[kX].shape.num_elements()) *
               static_cast<double>(inputs[kWeight].shape[0]);
  return cost;
}

std::vector<ValueType> LinearCrossEntropy::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 4);
  return {kScalar, per_token(inputs[kX]), per_token(inputs[kX])};
}

Cost LinearCrossEntropy::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  return product_cost(1, inputs, outputs);
}

void LinearCrossEntropy::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(kTokenLoss) && !builder.grad_output(kLse),
         "linear_cross_entropy: only the loss may have a gradient");
  ensure(!builder.needs_grad(kScale), "linear_cross_entropy: the scale has no gradient");
  std::vector<ValueId> inputs = {builder.input(kX),      builder.input(kWeight),
                                 builder.input(kLabels), builder.input(kScale),
                                 builder.output(kLse),   *builder.grad_output(kLoss)};
  if (spec().weighted) {
    ensure(!builder.needs_grad(kTokenWeights), "linear_cross_entropy: weights have no gradient");
    inputs.push_back(builder.input(kTokenWeights));
  }
  std::vector<int> accumulators = {kWeight};
  if (spec().biased) {
    const auto bias = static_cast<int>(input_set().position(kBias));
    inputs.push_back(builder.input(bias));
    accumulators.push_back(bias);
  }
  const std::vector<ValueId> grads =
      builder.emit(std::make_shared<LinearCrossEntropyBackward>(spec()), inputs, accumulators);
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[LinearCrossEntropyBackward::kGradX]);
}

std::vector<ValueType> LinearCrossEntropyBackward::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 6);
  check_shape(*this, inputs[kForwardLse] == per_token(inputs[kX]), "lse must be {}, got {}",
              per_token(inputs[kX]).to_string(), inputs[kForwardLse].to_string());
  check_shape(*this, inputs[kGradLoss] == kScalar, "grad_loss must be f32 [1], got {}",
              inputs[kGradLoss].to_string());
  std::vector<ValueType> outputs = {inputs[kX], with_dtype(inputs[kWeight], DType::kF32)};
  if (spec().biased) outputs.push_back(head_bias_type(inputs[kWeight]));
  return outputs;
}

Cost LinearCrossEntropyBackward::cost(std::span<const ValueType> inputs,
                                      std::span<const ValueType> outputs) const {
  return product_cost(2, inputs, outputs);
}

std::vector<ValueType> LinearCrossEntropyFused::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 4);
  std::vector<ValueType> outputs = {kScalar, per_token(inputs[kX]), inputs[kX],
                                    with_dtype(inputs[kWeight], DType::kF32)};
  if (spec().biased) outputs.push_back(head_bias_type(inputs[kWeight]));
  return outputs;
}

Cost LinearCrossEntropyFused::cost(std::span<const ValueType> inputs,
                                   std::span<const ValueType> outputs) const {
  Cost cost = product_cost(spec().frozen ? 2 : 3, inputs, outputs);
  if (spec().frozen) cost.bytes -= static_cast<double>(outputs[kGradWeight].num_bytes());
  return cost;
}

void LinearCrossEntropyFused::differentiate(GradientBuilder& builder) const {
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, builder.output(kGradX));
}

OperatorPtr make_linear_cross_entropy(const CrossEntropySpec& spec) {
  return std::make_shared<LinearCrossEntropy>(spec);
}

OperatorPtr make_linear_cross_entropy_fused(const CrossEntropySpec& spec) {
  return std::make_shared<LinearCrossEntropyFused>(spec);
}

}  // namespace tessera
