#include "ops/sinkhorn/sinkhorn.h"

#include "ops/noise.h"
#include "ops/workspace.h"

namespace tessera {

Sinkhorn::Sinkhorn(const SinkhornSpec& spec) : spec_(spec) {
  require(spec.top_k >= 1, "sinkhorn: top_k is {}, expected at least 1", spec.top_k);
}

std::string Sinkhorn::attributes() const {
  return fmt::format("top_k={} tokens={}+{}", spec_.top_k, spec_.tokens.begin, spec_.tokens.count);
}

std::vector<ValueType> Sinkhorn::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes logits and noise, got {} inputs", inputs.size());
  const ValueType& logits = inputs[kLogits];
  check_shape(*this,
              logits.dtype == DType::kF32 && logits.shape.rank() == 2 && !logits.ragged() &&
                  logits.shape[1] >= spec_.top_k,
              "logits must be f32 [T, E] of at least {} experts, got {}", spec_.top_k,
              logits.to_string());
  check_shape(
      *this,
      spec_.tokens.begin >= 0 && spec_.tokens.count >= 0 && spec_.tokens.end() <= logits.shape[0],
      "tokens {} to {} are not among the {}", spec_.tokens.begin, spec_.tokens.end(),
      logits.shape[0]);
  const ValueType noise{.dtype = DType::kI32, .shape = {kNumNoiseWords}};
  check_shape(*this, inputs[kNoise] == noise, "the noise must be {}, got {}", noise.to_string(),
              inputs[kNoise].to_string());
  return {{.dtype = DType::kI32, .shape = {spec_.tokens.count, spec_.top_k}}};
}

/// Of the number of steps that is usual.
Cost Sinkhorn::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  constexpr double kUsualSteps = 10;
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 4 * kUsualSteps * static_cast<double>(inputs[kLogits].shape.num_elements());
  return cost;
}

SinkhornWorkspace::SinkhornWorkspace(const Shape& logits) {
  WorkspaceLayout layout;
  scores = layout.add<float>(logits.num_elements());
  factors = layout.add<double>(logits[1]);
  partials = layout.add<double>(sinkhorn_blocks(logits[0]) * logits[1]);
  done = layout.add<int32_t>(1);
  num_bytes = layout.num_bytes();
}

OperatorPtr make_sinkhorn(const SinkhornSpec& spec) {
  return std::make_shared<Sinkhorn>(spec);
}

}  // namespace tessera
