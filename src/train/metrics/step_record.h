#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Rows that each expert of one MoE layer received in a step.
struct ExpertLoad {
  int64_t layer = 0;                       ///< index of the layer in the model
  std::vector<int64_t> tokens_per_expert;  ///< [E] token-to-expert assignments
};

/// What of a layer's values was beyond the delayed scales by which FP8 rounds them, or not finite:
/// of each kind of operand the largest share of an operand's values.
struct LayerRoundings {
  int64_t layer = 0;
  double activations = 0.0;  ///< that saturated
  double weights = 0.0;
  double gradients = 0.0;
  double nonfinite = 0.0;  ///< of any kind

  double saturated() const { return std::max({activations, weights, gradients}); }
  bool operator==(const LayerRoundings&) const = default;
};

/// For whom ranks waited in the steps that a trace was taken of.
struct TracedWaits {
  struct ForRank {
    int64_t rank = 0;
    double seconds = 0.0;
    bool operator==(const ForRank&) const = default;
  };
  int64_t num_ranks = 1;
  int64_t num_steps = 1;
  double seconds = 0.0;            ///< of all ranks together
  std::vector<ForRank> for_ranks;  ///< the part that a late rank caused, the largest first
  std::string why = {};            ///< the first of them came late, where that is known
  bool operator==(const TracedWaits&) const = default;
};

/// A number that an objective beyond the next token tells of a step.
struct NamedNumber {
  std::string name;
  double value = 0.0;
  bool operator==(const NamedNumber&) const = default;
};

/// What one training step did. A value that is not measured stays empty.
struct StepRecord {
  int64_t step = 0;         ///< steps done including this one: the first is 1
  int64_t total_steps = 0;  ///< steps of the whole run
  int64_t tokens_seen = 0;  ///< since the beginning of the run
  double loss = 0.0;        ///< cross-entropy in nats per token
  std::optional<double> validation_loss;
  std::optional<double> mtp_loss;  ///< of multi-token prediction, nats per label; empty: none
  std::optional<double>
      balance_loss;  ///< mean of the MoE layers; 1.0 is perfect balance; empty: dense model
  std::optional<double> z_loss;  ///< mean of the MoE layers
  /// With QK clip, of all heads: an upper bound of the largest attention logit, exact above the
  /// limit.
  std::optional<double> max_logit;
  std::optional<int64_t> clipped_heads;  ///< with QK clip: heads that were scaled down
  double grad_norm = 0.0;                ///< global, before clipping
  double learning_rate = 0.0;
  double clip_factor = 1.0;          ///< what the gradients were multiplied by; 1 means not clipped
  std::optional<double> loss_scale;  ///< that the step's losses were multiplied by; empty: none
  double step_seconds = 0.0;
  std::optional<double> host_seconds;  ///< of them without waits for the GPU; empty: no GPU
  double tokens_per_second = 0.0;
  double model_flops = 0.0;           ///< of the step, forward and backward, without recomputation
  std::optional<double> utilisation;  ///< 0..1 of the measured peak of large matrix products
  /// Bytes, the highest so far: what the process held (PeakMemory), or a GPU after a step used.
  int64_t memory_used = 0;
  int64_t memory_predicted = 0;  ///< bytes; 0: no prediction
  int64_t dropped_tokens = 0;    ///< assignments that capacity cut off in this step
  int64_t skipped_steps = 0;  ///< updates left out so far because loss or gradient was not finite
  /// Where rows are stashed: steps that were done again so far, since some rank had no room.
  std::optional<int64_t> repeated_steps;
  double eta_seconds = 0.0;
  std::vector<ExpertLoad>
      expert_load;                  ///< one entry a MoE layer; empty: dense model or not recorded
  std::optional<double> saturated;  ///< the largest of all layers; empty: no delayed scales
  std::vector<LayerRoundings> roundings;  ///< of layers with any such values
  std::optional<TracedWaits> waits;       ///< of the last step of a trace, for all of them
  std::vector<NamedNumber> objective;     ///< empty: the next token alone

  /// Gradients that a smaller loss scale may mend.
  bool overflowed() const { return loss_scale && std::isfinite(loss) && !std::isfinite(grad_norm); }
  bool is_finite() const { return std::isfinite(loss) && std::isfinite(grad_norm); }
  double tflops() const { return step_seconds > 0.0 ? model_flops / step_seconds / 1e12 : 0.0; }
};

/// The loss on the validation set after `step` steps.
struct ValidationRecord {
  int64_t step = 0;
  int64_t tokens_seen = 0;
  double loss = 0.0;  ///< nats per token
  double seconds = 0.0;
};

}  // namespace tessera
