#include "ops/mix_streams/mix_streams.h"

#include "ops/mix_streams/mix_rule.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void check_mix(const Operator& op, std::span<const ValueType> inputs) {
  const ValueType& x = inputs[MixStreams::kX];
  const ValueType& post = inputs[MixStreams::kPost];
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, n * H], got {}", x.to_string());
  check_shape(op,
              post.dtype == DType::kF32 && post.shape.rank() == 2 && !post.ragged() &&
                  post.shape[0] == x.shape[0] && post.shape[1] > 0 &&
                  post.shape[1] <= kMaxMixedStreams && x.shape[1] % post.shape[1] == 0,
              "post must be f32 [{}, a divisor of {}, at most {}], got {}", x.shape[0], x.shape[1],
              kMaxMixedStreams, post.to_string());
  const int64_t streams = post.shape[1];
  const auto check = [&](int idx, const ValueType& expected) {
    check_shape(op, inputs[idx] == expected, "input {} is {}, expected {}", idx,
                inputs[idx].to_string(), expected.to_string());
  };
  check(MixStreams::kGiven, with_last_dim(x, x.shape[1] / streams));
  check(MixStreams::kComb, with_last_dim(post, streams * streams));
}

/// Of a pass: each element of x in each stream, and of what is given likewise.
double mix_flops(std::span<const ValueType> inputs) {
  return 2.0 * static_cast<double>(inputs[MixStreams::kX].shape.num_elements()) *
         static_cast<double>(inputs[MixStreams::kPost].shape[1] + 1);
}

}  // namespace

std::vector<ValueType> MixStreams::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes x, given, post and comb, got {} inputs",
              inputs.size());
  check_mix(*this, inputs);
  return {inputs[kX]};
}

Cost MixStreams::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = mix_flops(inputs);
  return cost;
}

void MixStreams::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(std::make_shared<MixStreamsBackward>(),
                                  {builder.input(kX), builder.input(kGiven), builder.input(kPost),
                                   builder.input(kComb), *grad});
  for (const int input : {kX, kGiven, kPost, kComb}) {
    if (builder.needs_grad(input)) builder.set_grad_input(input, grads[input]);
  }
}

std::vector<ValueType> MixStreamsBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 5, "takes x, given, post, comb and a gradient, got {} inputs",
              inputs.size());
  check_mix(*this, inputs);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient must be {} as x is, got {}",
              inputs[kX].to_string(), inputs[kGrad].to_string());
  return {inputs[kX], inputs[kGiven], inputs[kPost], inputs[kComb]};
}

Cost MixStreamsBackward::cost(std::span<const ValueType> inputs,
                              std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2 * mix_flops(inputs);
  return cost;
}

OperatorPtr make_mix_streams() {
  return std::make_shared<MixStreams>();
}

}  // namespace tessera
