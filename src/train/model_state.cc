#include "train/model_state.h"

namespace tessera {
namespace {

std::vector<Parameter> optimizer_parameters(const ParameterSet& parameters) {
  std::vector<Parameter> result;
  for (const ModelParameter& parameter : parameters.all()) {
    result.push_back(
        {.name = parameter.spec.name, .weight = parameter.weight, .grad = parameter.grad});
  }
  return result;
}

}  // namespace

ModelState::Bytes ModelState::count_bytes(const ModelConfig& config, DType dtype) {
  const auto specs = list_parameters(config, dtype);
  const auto sizes = ParameterSet::count_bytes(specs, true);
  std::vector<Tensor> weights;
  for (const ParameterSpec& spec : specs) weights.push_back({nullptr, spec.dtype, spec.shape});
  return {sizes.weights, sizes.gradients, AdamWOptimizer::state_bytes(weights)};
}

ModelState::ModelState(const ModelConfig& config, DType dtype, const AdamWOptions& options)
    : config_(config),
      parameters_(list_parameters(config, dtype), true),
      experts_(make_expert_states(config)) {
  optimizer_ = std::make_unique<AdamWOptimizer>(optimizer_parameters(parameters_), options);
}

void ModelState::initialize(uint64_t seed) {
  parameters_.initialize(seed);
  optimizer_->reset_masters();
}

std::vector<NamedTensor> ModelState::model_tensors() const {
  std::vector<NamedTensor> tensors;
  for (const ModelParameter& parameter : parameters_.all())
    tensors.push_back({parameter.spec.name, parameter.weight});
  for (NamedTensor& bias : name_expert_biases(config_, experts_))
    tensors.push_back(std::move(bias));
  return tensors;
}

std::vector<NamedTensor> ModelState::optimizer_tensors() const {
  return optimizer_->state();
}

void ModelState::load_weights(const CheckpointReader& reader) {
  reader.load_group(TensorGroup::kModel, model_tensors(), Conversion::kFloats);
  // Masters take the values themselves, which BF16 weights have rounded.
  for (const NamedTensor& master : optimizer_->masters())
    reader.load_into(master.name, master.tensor, Conversion::kFloats);
}

void ModelState::load(const CheckpointReader& reader) {
  reader.load_group(TensorGroup::kModel, model_tensors());
  reader.load_group(TensorGroup::kOptimizer, optimizer_tensors());
}

}  // namespace tessera
