#include "train/model_state.h"

#include <numeric>

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
  std::vector<NamedTensor> tensors;
  for (const auto& state : optimizer_->state()) tensors.push_back({state.name, state.tensor});
  return tensors;
}

void ModelState::load(const CheckpointReader& reader) {
  reader.load_group(TensorGroup::kModel, model_tensors());
  reader.load_group(TensorGroup::kOptimizer, optimizer_tensors());
}

std::vector<ExpertState> make_expert_states(const ModelConfig& config) {
  std::vector<ExpertState> experts(static_cast<size_t>(config.num_moe_layers()));
  for (ExpertState& state : experts) {
    state.bias = OwnedTensor(DType::kF32, {config.moe.num_experts}, "expert biases");
    state.step_counts = OwnedTensor(DType::kF32, {config.moe.num_experts}, "expert counts");
  }
  return experts;
}

std::vector<NamedTensor> name_expert_biases(const ModelConfig& config,
                                            const std::vector<ExpertState>& experts) {
  std::vector<NamedTensor> tensors;
  size_t next = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe_layer(layer)) continue;
    tensors.push_back({layer_parameter_name(layer, "moe.expert_bias"), experts[next++].bias});
  }
  return tensors;
}

void update_expert_biases(std::vector<ExpertState>& experts, double speed) {
  for (ExpertState& state : experts) {
    const auto counts = state.step_counts.get().span<float>();
    const auto bias = state.bias.get().span<float>();
    const double mean = std::accumulate(counts.begin(), counts.end(), 0.0) /
                        static_cast<double>(std::max<size_t>(counts.size(), 1));
    for (size_t e = 0; e < bias.size(); ++e) {
      const double error = mean - counts[e];
      bias[e] += static_cast<float>(speed * ((error > 0) - (error < 0)));
    }
  }
}

}  // namespace tessera
