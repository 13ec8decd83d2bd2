#pragma once

#include <span>

#include "core/memory.h"
#include "core/mirrored_tensor.h"
#include "model/build/model_program.h"

namespace tessera {

/// Whether one balance loss spans all layers: its gradients are known after the last one only.
bool balances_whole_model(const ModelConfig& config);

/// The balance loss of a micro-batch over all layers together (BalanceTokens::kModel), which no
/// program computes since it spans them: E/D · Σ_e f_e·P_e with f_e and P_e their means over the
/// layers, f_e that of the expert's group of D over all ranks that share the tokens and P_e this
/// rank's part. Along a pipeline each chunk adds its layers to the sums of the chunk before and the
/// last one takes the loss, whose gradient goes back to the others. The host does all of it.
class ModelBalance {
 public:
  ModelBalance(const ModelConfig& config, const StageGroups& groups, Device& device);

  /// F64 [2, E], the assignments to each expert and its score means, summed over the layers so far.
  Tensor sums() const { return sums_; }
  /// The gradient of every layer's score means, F32 [E], where programs read it.
  const MirroredTensor& grad_score_means() const { return grad_score_means_; }

  void clear();
  void add_layer(std::span<const float> counts, std::span<const float> score_means);
  /// The loss over the layers added; leaves `scale` times its gradient in grad_score_means(). To be
  /// called by all ranks that share the micro-batch.
  double finish(float scale);

 private:
  int64_t num_experts_;
  int64_t group_size_;
  double per_layer_;  ///< the number of groups over that of the layers and of the ranks
  CommunicatorPtr ranks_;
  OwnedTensor sums_;
  MirroredTensor grad_score_means_;
};

}  // namespace tessera
