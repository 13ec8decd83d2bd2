#include "ops/stream_logits/stream_logits.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_product(const Operator& op, const ValueType& x, const ValueType& weight) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged() && x.shape[1] > 0,
              "x must be f32 or bf16 [T, W], got {}", x.to_string());
  check_shape(op,
              weight.dtype == DType::kF32 && weight.shape.rank() == 2 && !weight.ragged() &&
                  weight.shape[1] == x.shape[1],
              "weight must be f32 [M, {}], got {}", x.shape[1], weight.to_string());
}

ValueType logits_type(const ValueType& x, const ValueType& weight) {
  return {DType::kF32, {x.shape[0], weight.shape[0]}};
}

double stream_product_flops(const ValueType& x, const ValueType& weight) {
  return 2.0 * static_cast<double>(x.shape.num_elements()) * static_cast<double>(weight.shape[0]);
}

}  // namespace

StreamLogits::StreamLogits(double eps) : eps_(eps) {
  require(eps >= 0, "stream_logits: eps must be at least 0, got {}", eps);
}

std::string StreamLogits::attributes() const {
  return fmt::format("eps={}", eps_);
}

std::vector<ValueType> StreamLogits::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and weight, got {} inputs", inputs.size());
  check_product(*this, inputs[kX], inputs[kWeight]);
  return {logits_type(inputs[kX], inputs[kWeight]), {DType::kF32, {inputs[kX].shape[0]}}};
}

Cost StreamLogits::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = stream_product_flops(inputs[kX], inputs[kWeight]);
  return cost;
}

void StreamLogits::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(kRstd), "stream_logits: rstd is a statistic and takes no gradient");
  const auto grad = builder.grad_output(kLogits);
  if (!grad) return;
  const auto grads = builder.emit(std::make_shared<StreamLogitsBackward>(),
                                  {builder.input(kX), builder.input(kWeight),
                                   builder.output(kLogits), builder.output(kRstd), *grad},
                                  {kWeight});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[StreamLogitsBackward::kGradX]);
}

std::vector<ValueType> StreamLogitsBackward::infer(std::span<const ValueType> inputs) const {
  const size_t count = addend_ ? 6 : 5;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  check_product(*this, inputs[kX], inputs[kWeight]);
  const ValueType logits = logits_type(inputs[kX], inputs[kWeight]);
  for (const Input input : {kLogits, kGrad}) {
    check_shape(*this, inputs[input] == logits, "logits and their gradient must be {}, got {}",
                logits.to_string(), inputs[input].to_string());
  }
  const ValueType rstd{DType::kF32, {inputs[kX].shape[0]}};
  check_shape(*this, inputs[kRstd] == rstd, "rstd must be {}, got {}", rstd.to_string(),
              inputs[kRstd].to_string());
  if (addend_) check_addend(*this, inputs[kAddend], inputs[kX]);
  return {inputs[kX], inputs[kWeight]};
}

Cost StreamLogitsBackward::cost(std::span<const ValueType> inputs,
                                std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2 * stream_product_flops(inputs[kX], inputs[kWeight]);
  return cost;
}

OperatorPtr StreamLogitsBackward::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<StreamLogitsBackward>(true);
}

OperatorPtr make_stream_logits(double eps) {
  return std::make_shared<StreamLogits>(eps);
}

}  // namespace tessera
