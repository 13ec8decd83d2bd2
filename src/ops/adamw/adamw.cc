#include "ops/adamw/adamw.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace tessera {
namespace {

void require_rate(const char* name, double value) {
  require(value >= 0.0 && value < 1.0, "adamw: {} must be at least 0 and below 1, got {}", name,
          value);
}

}  // namespace

AdamW::AdamW(const AdamWSpec& spec) : spec_(spec) {
  require_rate("beta1", spec.beta1);
  require_rate("beta2", spec.beta2);
  require(static_cast<float>(spec.eps) > 0.0F && std::isfinite(spec.eps),
          "adamw: eps must be finite and above 0 as a float, got {}; 1e-8 is usual", spec.eps);
  require(spec.weight_decay >= 0.0 && std::isfinite(spec.weight_decay),
          "adamw: weight_decay must be finite and at least 0, got {}", spec.weight_decay);
}

std::string AdamW::attributes() const {
  std::string text = fmt::format("beta1={} beta2={} eps={} weight_decay={}", spec_.beta1,
                                 spec_.beta2, spec_.eps, spec_.weight_decay);
  if (spec_.bf16_grad) text += " grad=bf16";
  if (spec_.formats.are_plain()) return text;
  const std::string_view beside = master_suffix(spec_.master());
  return text + fmt::format(" m={} v={} beside={}", moment_name(spec_.formats.first_moment),
                            moment_name(spec_.formats.second_moment),
                            beside.empty() ? "nothing" : beside);
}

/// The type of what an update starts from.
DType AdamW::master_type() const {
  if (!spec_.bf16_weight) return DType::kF32;
  return spec_.master() == MasterKind::kNone ? DType::kBF16 : master_dtype(spec_.master());
}

std::vector<ValueType> AdamW::outputs_of(const ValueType& grad) const {
  const StateFormats& formats = spec_.formats;
  std::vector<ValueType> outputs = {with_dtype(grad, master_type()),
                                    with_dtype(grad, moment_dtype(formats.first_moment)),
                                    with_dtype(grad, moment_dtype(formats.second_moment))};
  if (has_weight()) outputs.push_back(with_dtype(grad, DType::kBF16));
  for (const MomentKind kind : {formats.first_moment, formats.second_moment}) {
    if (has_scales(kind))
      outputs.push_back({DType::kU8, {grad.shape[0], count_moment_blocks(grad.shape[1])}});
  }
  return outputs;
}

std::vector<ValueType> AdamW::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() > kNumTrailing,
              "takes at least 3 inputs (grad of each slice, factors, grad_scale), got {}",
              inputs.size());
  const auto trailing = inputs.last(kNumTrailing);
  check_shape(*this, trailing[kFactors] == ValueType{.dtype = DType::kF32, .shape = {8}},
              "factors must be f32 [8], got {}", trailing[kFactors].to_string());
  check_shape(*this, trailing[kGradScale] == ValueType{.dtype = DType::kF32, .shape = {2}},
              "grad_scale must be f32 [2], got {}", trailing[kGradScale].to_string());
  const bool rows = spec_.formats.have_scales();
  const DType dtype = spec_.bf16_grad ? DType::kBF16 : DType::kF32;
  std::vector<ValueType> outputs;
  for (const ValueType& grad : inputs.first(inputs.size() - kNumTrailing)) {
    check_shape(*this, grad.dtype == dtype && grad.shape.rank() == (rows ? 2 : 1) && !grad.ragged(),
                "grad must be {} {}, got {}", dtype_name(dtype), rows ? "[rows, columns]" : "[n]",
                grad.to_string());
    std::ranges::copy(outputs_of(grad), std::back_inserter(outputs));
  }
  return outputs;
}

Cost AdamW::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  for (const ValueType& grad : inputs.first(inputs.size() - kNumTrailing)) {
    cost.flops += 15 * static_cast<double>(grad.shape.num_elements());
    // What the update starts from, the moments and their scales are read as well.
    const std::vector<ValueType> kept = outputs_of(grad);
    for (size_t i = 0; i < kept.size(); ++i) {
      if (!has_weight() || i != kWeight) cost.bytes += static_cast<double>(kept[i].num_bytes());
    }
  }
  return cost;
}

OperatorPtr make_adamw(const AdamWSpec& spec) {
  return std::make_shared<AdamW>(spec);
}

AdamWFactors make_adamw_factors(const AdamWSpec& spec, double lr, int64_t update) {
  ensure(update >= 1, "adamw: updates are counted from 1, got {}", update);
  const auto count = static_cast<double>(update);
  const double rate = static_cast<float>(lr);
  const double bias1 = static_cast<float>(1.0 - std::pow(spec.beta1, count));
  const double bias2 = static_cast<float>(1.0 - std::pow(spec.beta2, count));
  return {.decay = static_cast<float>(1.0 - rate * spec.weight_decay),
          .new_m = static_cast<float>(1.0 - spec.beta1),
          .old_v = static_cast<float>(spec.beta2),
          .new_v = static_cast<float>(1.0 - spec.beta2),
          .sqrt_bias2 = static_cast<float>(std::sqrt(bias2)),
          .eps = static_cast<float>(spec.eps),
          .step_size = static_cast<float>(rate / bias1),
          .update = static_cast<uint32_t>(update)};
}

Tensor view_of(AdamWFactors& factors) {
  return {&factors, DType::kF32, {sizeof(factors) / sizeof(float)}};
}

Tensor view_of(AdamWGradScale& grad_scale) {
  return {&grad_scale, DType::kF32, {sizeof(grad_scale) / sizeof(float)}};
}

}  // namespace tessera
