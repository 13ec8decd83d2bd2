#include "ops/ssd_scan/ssd_scan.h"

#include "ops/batch_rows.h"
#include "ops/storage.h"

namespace tessera {

SsdOperator::SsdOperator(const SsdSpec& spec) : spec_(spec) {
  require(spec.num_heads > 0 && spec.num_groups > 0 && spec.head_size > 0 && spec.state_size > 0,
          "ssd_scan: {} heads of {} in {} groups with states of {}; all must be above 0",
          spec.num_heads, spec.head_size, spec.num_groups, spec.state_size);
  require(spec.num_heads % spec.num_groups == 0, "ssd_scan: {} heads are no multiple of {} groups",
          spec.num_heads, spec.num_groups);
  require(spec.min_step >= 0 && (spec.max_step == 0 || spec.max_step >= spec.min_step),
          "ssd_scan: steps from {} to {}; expected limits of at least 0 that rise, or a largest "
          "step of 0 for none",
          spec.min_step, spec.max_step);
  require(spec.first_head >= 0 && spec.first_head + spec.num_heads <= spec.num_weights(),
          "ssd_scan: {} heads from {} on are not among {}", spec.num_heads, spec.first_head,
          spec.num_weights());
}

std::string SsdOperator::attributes() const {
  const std::string limits = spec_.min_step == 0 && spec_.max_step == 0
                                 ? ""
                                 : fmt::format(" steps={}..{}", spec_.min_step, spec_.max_step);
  const std::string place =
      spec_.all_heads == 0 ? "" : fmt::format(" from={} of={}", spec_.first_head, spec_.all_heads);
  return fmt::format("heads={}x{} states={}x{}{}{}", spec_.num_heads, spec_.head_size,
                     spec_.num_groups, spec_.state_size, limits, place);
}

void SsdOperator::check_operands(std::span<const ValueType> inputs, size_t count) const {
  using Op = SsdScan;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[Op::kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim < 0,
              "x is {}, expected f32 or bf16 [T, {}]", x.to_string(),
              spec_.num_heads * spec_.head_size);
  const auto check = [&](int idx, const char* name, const ValueType& expected) {
    check_shape(*this, inputs[idx] == expected, "{} is {}, expected {}", name,
                inputs[idx].to_string(), expected.to_string());
  };
  const int64_t tokens = x.shape[0];
  const ValueType states{x.dtype, {tokens, spec_.num_groups * spec_.state_size}};
  const ValueType of_heads{DType::kF32, {spec_.num_weights()}};
  check(Op::kX, "x", {x.dtype, {tokens, spec_.num_heads * spec_.head_size}});
  check(Op::kDt, "dt", {x.dtype, {tokens, spec_.num_heads}});
  check(Op::kB, "B", states);
  check(Op::kC, "C", states);
  check(Op::kALog, "A_log", of_heads);
  check(Op::kD, "D", of_heads);
  check(Op::kDtBias, "dt_bias", of_heads);
  const ValueType& bounds = inputs[Op::kCuSeqlens];
  check_shape(*this, bounds.dtype == DType::kI32 && bounds.shape.rank() == 1 && bounds.shape[0] > 0,
              "the bounds or the start are {}, expected i32 [1 or more]", bounds.to_string());
}

double SsdOperator::recurrence_flops(std::span<const ValueType> inputs) const {
  return 5.0 * static_cast<double>(inputs[SsdScan::kX].shape.num_elements()) *
         static_cast<double>(spec_.state_size);
}

std::vector<ValueType> SsdScan::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 8);
  return {inputs[kX]};
}

Cost SsdScan::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

void SsdScan::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  std::vector<ValueId> inputs;
  for (int idx = kX; idx <= kCuSeqlens; ++idx) inputs.push_back(builder.input(idx));
  inputs.push_back(*grad);
  const auto grads =
      builder.emit(std::make_shared<SsdScanBackward>(spec()), inputs, {kALog, kD, kDtBias});
  for (int idx = kX; idx <= kC; ++idx) {
    if (builder.needs_grad(idx)) builder.set_grad_input(idx, grads[idx]);
  }
}

std::vector<ValueType> SsdScanBackward::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 9);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kX].to_string());
  return {inputs.begin(), inputs.begin() + kCuSeqlens};
}

Cost SsdScanBackward::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * recurrence_flops(inputs);
  return cost;
}

std::vector<ValueType> SsdScanCached::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 8);
  const Shape states = {spec().num_heads * spec().state_size, spec().head_size};
  return {inputs[kX], {DType::kF32, states}};
}

Cost SsdScanCached::cost(std::span<const ValueType> inputs,
                         std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

std::string SsdScanBatch::attributes() const {
  return fmt::format("{} slots={}", SsdOperator::attributes(), num_slots_);
}

std::vector<ValueType> SsdScanBatch::infer(std::span<const ValueType> inputs) const {
  check_operands(inputs, 10);
  check_batch_rows(*this, inputs.subspan(kCuSeqlens, 3));
  const Shape states = {num_slots_ * spec().num_heads * spec().state_size, spec().head_size};
  return {inputs[kX], {DType::kF32, states}};
}

Cost SsdScanBatch::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = recurrence_flops(inputs);
  return cost;
}

OperatorPtr make_ssd_scan(const SsdSpec& spec) {
  return std::make_shared<SsdScan>(spec);
}

OperatorPtr make_ssd_scan_cached(const SsdSpec& spec) {
  return std::make_shared<SsdScanCached>(spec);
}

OperatorPtr make_ssd_scan_batch(const SsdSpec& spec, int64_t num_slots) {
  return std::make_shared<SsdScanBatch>(spec, num_slots);
}

}  // namespace tessera
