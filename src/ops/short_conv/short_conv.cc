#include "ops/short_conv/short_conv.h"

#include "ops/storage.h"

namespace tessera {
namespace {

/// `plain`: inputs without the bias, which is the last one.
void check_conv(const Operator& op, std::span<const ValueType> inputs, size_t plain,
                const ShortConvSpec& spec) {
  const size_t count = plain + (spec.biased ? 1 : 0);
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[ShortConv::kX];
  const ValueType& weight = inputs[ShortConv::kWeight];
  const ValueType& bounds = inputs[ShortConv::kCuSeqlens];
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim < 0,
              "x is {}, expected f32 or bf16 [T,C]", x.to_string());
  const int64_t channels = spec.all_channels > 0 ? spec.all_channels : x.shape[1];
  check_shape(op, spec.first_channel >= 0 && spec.first_channel + x.shape[1] <= channels,
              "{} channels from {} on are not among {}", x.shape[1], spec.first_channel, channels);
  check_shape(op,
              weight.dtype == DType::kF32 && weight.shape.rank() == 2 &&
                  weight.shape[0] == channels && weight.shape[1] > 0 &&
                  weight.shape[1] <= ShortConv::kMaxTaps,
              "the weight is {}, expected f32 [{}, 1 to {}]", weight.to_string(), channels,
              ShortConv::kMaxTaps);
  check_shape(op, bounds.dtype == DType::kI32 && bounds.shape.rank() == 1 && bounds.shape[0] > 0,
              "the bounds or the start are {}, expected i32 [1 or more]", bounds.to_string());
  if (!spec.biased) return;
  const ValueType bias{DType::kF32, {channels}};
  check_shape(op, inputs.back() == bias, "the bias is {}, expected {}", inputs.back().to_string(),
              bias.to_string());
}

std::string spec_attributes(const ShortConvSpec& spec) {
  std::string text = spec.biased ? "bias" : "";
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (!spec.silu) add("no silu");
  if (spec.all_channels > 0)
    add(fmt::format("from channel {} of {}", spec.first_channel, spec.all_channels));
  return text;
}

double product_flops(std::span<const ValueType> inputs) {
  return 2.0 * static_cast<double>(inputs[ShortConv::kX].shape.num_elements()) *
         static_cast<double>(inputs[ShortConv::kWeight].shape[1]);
}

}  // namespace

std::string ShortConv::attributes() const {
  return spec_attributes(spec_);
}

std::string ShortConvBackward::attributes() const {
  return spec_attributes(spec_);
}

std::string ShortConvCached::attributes() const {
  return spec_attributes(spec_);
}

std::vector<ValueType> ShortConv::infer(std::span<const ValueType> inputs) const {
  check_conv(*this, inputs, 3, spec_);
  return {inputs[kX]};
}

Cost ShortConv::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(inputs);
  return cost;
}

void ShortConv::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  std::vector<ValueId> inputs = {builder.input(kX), builder.input(kWeight),
                                 builder.input(kCuSeqlens), *grad};
  std::vector<int> accumulated = {kWeight};
  if (spec_.biased) {
    inputs.push_back(builder.input(kBias));
    accumulated.push_back(kBias);
  }
  const auto grads = builder.emit(std::make_shared<ShortConvBackward>(spec_), inputs, accumulated);
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[ShortConvBackward::kGradX]);
}

std::vector<ValueType> ShortConvBackward::infer(std::span<const ValueType> inputs) const {
  check_conv(*this, inputs, 4, spec_);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kX].to_string());
  std::vector<ValueType> grads = {inputs[kX], inputs[kWeight]};
  if (spec_.biased) grads.push_back(inputs[kBias]);
  return grads;
}

Cost ShortConvBackward::cost(std::span<const ValueType> inputs,
                             std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * product_flops(inputs);
  return cost;
}

std::vector<ValueType> ShortConvCached::infer(std::span<const ValueType> inputs) const {
  check_conv(*this, inputs, 3, spec_);
  return {inputs[kX], {inputs[kX].dtype, {inputs[kWeight].shape[1], inputs[kX].shape[1]}}};
}

Cost ShortConvCached::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(inputs);
  return cost;
}

OperatorPtr make_short_conv_cached(ShortConvSpec spec) {
  return std::make_shared<ShortConvCached>(spec);
}

OperatorPtr make_short_conv(ShortConvSpec spec) {
  return std::make_shared<ShortConv>(spec);
}

}  // namespace tessera
