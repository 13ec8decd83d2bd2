#include "ops/sparse_mixer/sparse_mixer.h"

#include <cmath>

namespace tessera {
namespace {

void check_choices(const Operator& op, const ValueType& logits, const ValueType& idx) {
  check_shape(op, logits.dtype == DType::kF32 && logits.shape.rank() == 2 && !logits.ragged(),
              "logits must be f32 [T, E], got {}", logits.to_string());
  check_shape(op,
              idx.dtype == DType::kI32 && idx.shape.rank() == 2 && !idx.ragged() &&
                  idx.shape[0] == logits.shape[0] && idx.shape[1] <= logits.shape[1],
              "expert_idx must be i32 [{}, K] with K at most {}, got {}", logits.shape[0],
              logits.shape[1], idx.to_string());
}

}  // namespace

SparseMixer::SparseMixer(const SparseMixerSpec& spec) : spec_(spec) {
  require(spec.jitter > 0 && std::isfinite(spec.jitter),
          "sparse_mixer: the jitter is {}, expected more than 0", spec.jitter);
}

std::string SparseMixer::attributes() const {
  return fmt::format("eps={}{}", spec_.jitter, spec_.samples ? " samples" : "");
}

std::vector<ValueType> SparseMixer::infer(std::span<const ValueType> inputs) const {
  const size_t num_inputs = spec_.samples ? 4 : 2;
  check_shape(*this, inputs.size() == num_inputs, "takes {} inputs, got {}", num_inputs,
              inputs.size());
  const ValueType& logits = inputs[kLogits];
  check_choices(*this, logits, inputs[kExpertIdx]);
  const ValueType probs = with_dtype(inputs[kExpertIdx], DType::kF32);
  if (!spec_.samples) return {probs};
  const ValueType numbers{.dtype = DType::kI64, .shape = {logits.shape[0]}};
  check_shape(*this, inputs[kTokenNumbers] == numbers, "token numbers must be {}, got {}",
              numbers.to_string(), inputs[kTokenNumbers].to_string());
  const ValueType noise{.dtype = DType::kI32, .shape = {kNumNoiseWords}};
  check_shape(*this, inputs[kNoise] == noise, "the noise must be {}, got {}", noise.to_string(),
              inputs[kNoise].to_string());
  return {probs, inputs[kExpertIdx], {DType::kF32, {logits.shape[1]}}};
}

void SparseMixer::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kProbs);
  if (!grad || !builder.needs_grad(kLogits)) return;
  const ValueId experts = spec_.samples ? builder.output(kDrawnIdx) : builder.input(kExpertIdx);
  builder.set_grad_input(kLogits, builder.emit(std::make_shared<SparseMixerBackward>(spec_),
                                               {builder.input(kLogits), experts, *grad})[0]);
}

std::vector<ValueType> SparseMixerBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes logits, expert_idx and a gradient, got {} inputs",
              inputs.size());
  check_choices(*this, inputs[kLogits], inputs[kExpertIdx]);
  const ValueType probs = with_dtype(inputs[kExpertIdx], DType::kF32);
  check_shape(*this, inputs[kGrad] == probs, "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), probs.to_string());
  return {inputs[kLogits]};
}

OperatorPtr make_sparse_mixer(const SparseMixerSpec& spec) {
  return std::make_shared<SparseMixer>(spec);
}

}  // namespace tessera
