#include "ops/collapse_streams/collapse_streams.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_streams(const Operator& op, const ValueType& x, const ValueType& pre) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, n * H], got {}", x.to_string());
  check_shape(op,
              pre.dtype == DType::kF32 && pre.shape.rank() == 2 && !pre.ragged() &&
                  pre.shape[0] == x.shape[0] && pre.shape[1] > 0 && x.shape[1] % pre.shape[1] == 0,
              "pre must be f32 [{}, a divisor of {}], got {}", x.shape[0], x.shape[1],
              pre.to_string());
}

ValueType collapsed_type(const ValueType& x, const ValueType& pre) {
  return with_last_dim(x, x.shape[1] / pre.shape[1]);
}

}  // namespace

std::vector<ValueType> CollapseStreams::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and pre, got {} inputs", inputs.size());
  check_streams(*this, inputs[kX], inputs[kPre]);
  return {collapsed_type(inputs[kX], inputs[kPre])};
}

Cost CollapseStreams::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * static_cast<double>(inputs[kX].shape.num_elements());
  return cost;
}

void CollapseStreams::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  using Backward = CollapseStreamsBackward;
  const auto grads =
      builder.emit(std::make_shared<Backward>(), {builder.input(kX), builder.input(kPre), *grad});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[Backward::kGradX]);
  if (builder.needs_grad(kPre)) builder.set_grad_input(kPre, grads[Backward::kGradPre]);
}

std::vector<ValueType> CollapseStreamsBackward::infer(std::span<const ValueType> inputs) const {
  const size_t count = addend_ ? 4 : 3;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  check_streams(*this, inputs[kX], inputs[kPre]);
  const ValueType y = collapsed_type(inputs[kX], inputs[kPre]);
  check_shape(*this, inputs[kGrad] == y, "the gradient must be {}, got {}", y.to_string(),
              inputs[kGrad].to_string());
  if (addend_) check_addend(*this, inputs[kAddend], inputs[kX]);
  return {inputs[kX], inputs[kPre]};
}

Cost CollapseStreamsBackward::cost(std::span<const ValueType> inputs,
                                   std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 4.0 * static_cast<double>(inputs[kX].shape.num_elements());
  return cost;
}

OperatorPtr CollapseStreamsBackward::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<CollapseStreamsBackward>(true);
}

OperatorPtr make_collapse_streams() {
  return std::make_shared<CollapseStreams>();
}

}  // namespace tessera
