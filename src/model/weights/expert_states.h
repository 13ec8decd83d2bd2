#pragma once

#include <vector>

#include "core/memory.h"
#include "core/tensor.h"
#include "model/config/config.h"

namespace tessera {

/// What one MoE layer keeps from step to step and within one, where the host reaches it.
struct ExpertState {
  bool is_balanced = true;  ///< a bias may even its loads out: no table of token ids chooses
  OwnedTensor bias;         ///< F32 [E], added to the scores for the choice; saved with the model
  OwnedTensor step_counts;  ///< F32 [E], assignments of this step so far
  /// F32 [E], assignments of all ranks in this step's micro-batches of which a forward pass ran.
  OwnedTensor earlier_counts;
};

/// The experts' state of every MoE layer, zeroed; a device reaches it too.
std::vector<ExpertState> make_expert_states(const ModelConfig& config,
                                            Device& device = host_device());

/// Names of the expert biases in checkpoints, with their tensors.
std::vector<NamedTensor> name_expert_biases(const ModelConfig& config,
                                            const std::vector<ExpertState>& experts);

/// Auxiliary-loss-free balancing (Wang et al. 2024; DeepSeek-V3, section 2.1.2): after a step each
/// expert's bias moves by `speed`, up where it got fewer assignments than the mean of its layer,
/// down where it got more. Those of the last `zero_experts`, which compute nothing, stay where they
/// are (LongCat-Flash, 2025, section 2.1.1).
void update_expert_biases(std::vector<ExpertState>& experts, double speed,
                          int64_t zero_experts = 0);

}  // namespace tessera
