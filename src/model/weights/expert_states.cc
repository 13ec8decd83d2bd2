#include "model/weights/expert_states.h"

#include <algorithm>
#include <numeric>

#include "model/weights/parameters.h"

namespace tessera {

std::vector<ExpertState> make_expert_states(const ModelConfig& config, Device& device) {
  std::vector<ExpertState> experts;
  for (int64_t layer = 0; layer < config.all_layers(); ++layer) {
    if (!config.is_moe_layer(layer)) continue;
    ExpertState& state = experts.emplace_back();
    state.is_balanced = !config.is_hash_layer(layer);
    const auto make = [&](std::string_view what) {
      return OwnedTensor(DType::kF32, {config.moe.router_outputs()}, what, device,
                         MemoryKind::kShared);
    };
    state.bias = make("expert biases");
    state.step_counts = make("expert counts");
    state.earlier_counts = make("expert counts");
  }
  return experts;
}

std::vector<NamedTensor> name_expert_biases(const ModelConfig& config,
                                            const std::vector<ExpertState>& experts) {
  std::vector<NamedTensor> tensors;
  size_t next = 0;
  for (int64_t layer = 0; layer < config.all_layers(); ++layer) {
    if (!config.is_moe_layer(layer)) continue;
    const ExpertState& state = experts[next++];
    if (!state.is_balanced) continue;
    tensors.push_back({layer_parameter_name(config, layer, "moe.expert_bias"), state.bias});
  }
  return tensors;
}

void update_expert_biases(std::vector<ExpertState>& experts, double speed, int64_t zero_experts) {
  for (ExpertState& state : experts) {
    if (!state.is_balanced) continue;
    const auto counts = state.step_counts.get().span<float>();
    const auto bias = state.bias.get().span<float>();
    const double mean = std::accumulate(counts.begin(), counts.end(), 0.0) /
                        static_cast<double>(std::max<size_t>(counts.size(), 1));
    for (size_t e = 0; e < bias.size() - zero_experts; ++e) {
      const double error = mean - counts[e];
      bias[e] += static_cast<float>(speed * ((error > 0) - (error < 0)));
    }
  }
}

}  // namespace tessera
