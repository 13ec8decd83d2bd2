#include "ops/stream_weights/stream_weights.h"

namespace tessera {
namespace {

void check_stream_spec(const StreamWeightsSpec& spec) {
  require(spec.streams >= 1 && spec.streams <= kMaxStreams,
          "stream_weights: {} streams, expected from 1 to {}", spec.streams, kMaxStreams);
  require(spec.iterations >= 1 && spec.iterations <= kMaxSinkhornIterations,
          "stream_weights: {} iterations, expected from 1 to {}", spec.iterations,
          kMaxSinkhornIterations);
  require(spec.eps >= 0, "stream_weights: eps must be at least 0, got {}", spec.eps);
}

void check_stream_inputs(const Operator& op, const StreamWeightsSpec& spec,
                         std::span<const ValueType> inputs) {
  const ValueType& logits = inputs[StreamWeights::kLogits];
  check_shape(op,
              logits.dtype == DType::kF32 && logits.shape.rank() == 2 && !logits.ragged() &&
                  logits.shape[1] == spec.logits(),
              "logits must be f32 [T, {}], got {}", spec.logits(), logits.to_string());
  const auto check = [&](int idx, int64_t size) {
    const ValueType expected{DType::kF32, {size}};
    check_shape(op, inputs[idx] == expected, "input {} is {}, expected {}", idx,
                inputs[idx].to_string(), expected.to_string());
  };
  check(StreamWeights::kScale, spec.scales());
  check(StreamWeights::kBase, spec.logits());
}

std::vector<ValueType> stream_weight_types(const StreamWeightsSpec& spec, const ValueType& logits) {
  const int64_t tokens = logits.shape[0];
  const int64_t n = spec.streams;
  std::vector<ValueType> types = {{DType::kF32, {tokens, n}}};
  if (!spec.collapses)
    types.insert(types.end(), {{DType::kF32, {tokens, n}}, {DType::kF32, {tokens, n * n}}});
  return types;
}

std::string describe_streams(const StreamWeightsSpec& spec) {
  if (spec.collapses) return fmt::format("streams={} eps={} collapses", spec.streams, spec.eps);
  return fmt::format("streams={} iterations={} eps={}", spec.streams, spec.iterations, spec.eps);
}

}  // namespace

StreamWeights::StreamWeights(const StreamWeightsSpec& spec) : spec_(spec) {
  check_stream_spec(spec);
}

std::string StreamWeights::attributes() const {
  return describe_streams(spec_);
}

std::vector<ValueType> StreamWeights::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes logits, scale and base, got {} inputs",
              inputs.size());
  check_stream_inputs(*this, spec_, inputs);
  return stream_weight_types(spec_, inputs[kLogits]);
}

void StreamWeights::differentiate(GradientBuilder& builder) const {
  std::vector<ValueId> inputs = {builder.input(kLogits), builder.input(kScale),
                                 builder.input(kBase)};
  const int outputs = spec_.collapses ? 1 : 3;
  int given = 0;
  for (int output = 0; output < outputs; ++output) {
    const auto grad = builder.grad_output(output);
    if (!grad) continue;
    inputs.push_back(*grad);
    ++given;
  }
  if (given == 0) return;
  ensure(given == outputs, "stream_weights: all outputs are read by one part of a layer");
  const auto grads =
      builder.emit(std::make_shared<StreamWeightsBackward>(spec_), inputs, {kScale, kBase});
  if (builder.needs_grad(kLogits))
    builder.set_grad_input(kLogits, grads[StreamWeightsBackward::kGradLogits]);
}

std::string StreamWeightsBackward::attributes() const {
  return describe_streams(spec_);
}

std::vector<ValueType> StreamWeightsBackward::infer(std::span<const ValueType> inputs) const {
  const size_t count = spec_.collapses ? 4 : 6;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  check_stream_inputs(*this, spec_, inputs);
  const std::vector<ValueType> types = stream_weight_types(spec_, inputs[kLogits]);
  for (size_t i = 0; i < types.size(); ++i) {
    check_shape(*this, inputs[kGradPre + i] == types[i], "a gradient is {}, expected {}",
                inputs[kGradPre + i].to_string(), types[i].to_string());
  }
  return {inputs[kLogits], inputs[kScale], inputs[kBase]};
}

OperatorPtr make_stream_weights(const StreamWeightsSpec& spec) {
  return std::make_shared<StreamWeights>(spec);
}

}  // namespace tessera
