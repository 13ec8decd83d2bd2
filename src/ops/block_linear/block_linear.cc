#include "ops/block_linear/block_linear.h"

#include <memory>

#include "ops/storage.h"

namespace tessera {
namespace {

std::string blocks_attribute(int64_t num_blocks, bool shared) {
  return fmt::format("blocks={}{}", num_blocks, shared ? " shared" : "");
}

/// Rows of `num_blocks` equal parts.
void check_block_rows(const Operator& op, const ValueType& rows, int64_t num_blocks,
                      std::string_view what) {
  check_shape(op, is_storage(rows.dtype) && rows.shape.rank() == 2 && !rows.ragged(),
              "{} must be f32 or bf16 [T, features], got {}", what, rows.to_string());
  check_shape(op, rows.shape[1] % num_blocks == 0, "{} {} is not of {} equal blocks", what,
              rows.to_string(), num_blocks);
}

void check_block_weight(const Operator& op, const ValueType& weight, const ValueType& rows,
                        int64_t num_weights) {
  check_shape(op, weight.dtype == rows.dtype && weight.shape.rank() == 2 && !weight.ragged(),
              "the weight must be {} [out, in of a block] as the rows are, got {}",
              dtype_name(rows.dtype), weight.to_string());
  check_shape(op, weight.shape[0] % num_weights == 0, "the weight {} is not of {} equal blocks",
              weight.to_string(), num_weights);
}

/// 2 · T · (rows of the weight) · (columns of the weight), so many times.
Cost block_cost(const Cost& operands, int64_t num_tokens, const Shape& weight, int64_t times) {
  return {.flops = 2.0 * static_cast<double>(num_tokens * times) *
                   static_cast<double>(weight.num_elements()),
          .bytes = operands.bytes};
}

}  // namespace

BlockLinear::BlockLinear(int64_t num_blocks, bool shared)
    : num_blocks_(num_blocks), shared_(shared) {
  require(num_blocks >= 1, "block_linear: num_blocks must be positive, got {}", num_blocks);
}

std::string BlockLinear::attributes() const {
  return blocks_attribute(num_blocks_, shared_);
}

std::vector<ValueType> BlockLinear::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and weight, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& weight = inputs[kWeight];
  check_block_rows(*this, x, num_blocks_, "x");
  check_block_weight(*this, weight, x, shared_ ? 1 : num_blocks_);
  check_shape(*this, weight.shape[1] == x.shape[1] / num_blocks_,
              "a block of x {} has {} features, the weight {} takes {}", x.to_string(),
              x.shape[1] / num_blocks_, weight.to_string(), weight.shape[1]);
  return {with_last_dim(x, weight.shape[0] * (shared_ ? num_blocks_ : 1))};
}

Cost BlockLinear::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  return block_cost(Operator::cost(inputs, outputs), inputs[kX].shape[0], inputs[kWeight].shape,
                    shared_ ? num_blocks_ : 1);
}

void BlockLinear::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  if (builder.needs_grad(kX)) {
    const auto dgrad = std::make_shared<BlockLinearDgrad>(num_blocks_, shared_);
    builder.set_grad_input(
        kX, builder.emit(dgrad, {*grad, builder.input(kWeight)})[BlockLinearDgrad::kGradX]);
  }
  if (builder.needs_grad(kWeight)) {
    builder.emit(std::make_shared<BlockLinearWgrad>(num_blocks_, shared_),
                 {builder.input(kX), *grad}, {kWeight});
  }
}

std::string BlockLinearDgrad::attributes() const {
  return blocks_attribute(num_blocks_, shared_);
}

std::vector<ValueType> BlockLinearDgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes gradient and weight, got {} inputs", inputs.size());
  const ValueType& grad = inputs[kGrad];
  const ValueType& weight = inputs[kWeight];
  check_block_rows(*this, grad, num_blocks_, "the gradient");
  check_block_weight(*this, weight, grad, shared_ ? 1 : num_blocks_);
  const int64_t given = weight.shape[0] * (shared_ ? num_blocks_ : 1);
  check_shape(*this, given == grad.shape[1],
              "the gradient {} has {} features, the weight {} gives {}", grad.to_string(),
              grad.shape[1], weight.to_string(), given);
  return {with_last_dim(grad, weight.shape[1] * num_blocks_)};
}

Cost BlockLinearDgrad::cost(std::span<const ValueType> inputs,
                            std::span<const ValueType> outputs) const {
  return block_cost(Operator::cost(inputs, outputs), inputs[kGrad].shape[0], inputs[kWeight].shape,
                    shared_ ? num_blocks_ : 1);
}

std::string BlockLinearWgrad::attributes() const {
  return blocks_attribute(num_blocks_, shared_);
}

std::vector<ValueType> BlockLinearWgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& grad = inputs[kGrad];
  check_block_rows(*this, x, num_blocks_, "x");
  check_block_rows(*this, grad, num_blocks_, "the gradient");
  check_shape(*this, x.dtype == grad.dtype && x.shape[0] == grad.shape[0],
              "x {} and the gradient {} differ in type or rows", x.to_string(), grad.to_string());
  const int64_t rows = grad.shape[1] / (shared_ ? num_blocks_ : 1);
  return {{.dtype = DType::kF32, .shape = {rows, x.shape[1] / num_blocks_}}};
}

Cost BlockLinearWgrad::cost(std::span<const ValueType> inputs,
                            std::span<const ValueType> outputs) const {
  return block_cost(Operator::cost(inputs, outputs), inputs[kX].shape[0],
                    outputs[kGradWeight].shape, shared_ ? num_blocks_ : 1);
}

OperatorPtr make_block_linear(int64_t num_blocks, bool shared) {
  return std::make_shared<BlockLinear>(num_blocks, shared);
}

}  // namespace tessera
