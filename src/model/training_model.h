#pragma once

#include <map>
#include <memory>
#include <vector>

#include "model/derived_program.h"
#include "model/expert_states.h"
#include "model/layer_program.h"
#include "model/parameters.h"

namespace tessera {

/// The host arrays of one micro-batch.
struct MicroBatch {
  Tensor tokens;      ///< I32 [T]
  Tensor labels;      ///< I32 [T], -100: no loss
  Tensor positions;   ///< I32 [T]
  Tensor cu_seqlens;  ///< I32 [max_sequences+1]
};

/// Factors of a micro-batch's part in the step's loss, so that gradients of micro-batches only add
/// up: `loss` is one over the valid tokens of the *global* batch, the others are the coefficient
/// times the micro-batch's share of its tokens: of each MoE layer's loss, or once of the whole
/// model's for BalanceTokens::kModel.
struct LossScales {
  float loss = 1;
  float balance = 0;
  float z_loss = 0;
};

struct MicroBatchResult {
  double loss = 0;          ///< scaled sum over the valid tokens
  double balance_loss = 0;  ///< mean over the MoE layers, or the model's; 1.0 is perfect
  double z_loss = 0;        ///< mean over the MoE layers
  int64_t dropped = 0;      ///< assignments that found no room, all layers
};

/// Bytes that training needs for activations, known before they are taken.
struct ActivationBytes {
  int64_t saved = 0;      ///< values kept from forward to backward, all layers
  int64_t hidden = 0;     ///< the residual stream between layers and its gradients
  int64_t transient = 0;  ///< the largest working set of any program
  int64_t inputs = 0;     ///< token ids, labels, positions and the like
  int64_t total() const { return saved + hidden + transient + inputs; }
};

/// Runs forward and backward passes of a whole model for micro-batches of one shape: the embedding,
/// a program a layer, the head. All memory is taken at construction; gradients are added into the
/// parameters' accumulators. Not thread-safe: one object runs one micro-batch at a time. The
/// parameters and expert states must outlive it.
class TrainingModel {
 public:
  TrainingModel(const ModelConfig& config, const BatchShape& shape, const RecomputePolicy& policy,
                const KernelTable& kernels);
  ~TrainingModel();

  const BatchShape& batch_shape() const;
  /// What `bind` will take.
  ActivationBytes activation_bytes() const;
  /// Model FLOPs of one micro-batch, forward and backward, recomputation not counted.
  double model_flops() const;
  /// Takes the memory and joins the programs with the parameters.
  void bind(ParameterSet& parameters, std::vector<ExpertState>& experts);

  /// Starts a step: the experts' step counts become zero.
  void begin_step();
  /// Forward and backward of one micro-batch. REQUIRES bind().
  MicroBatchResult run(const MicroBatch& batch, const LossScales& scales,
                       const NodeObserver& observer = {});
  /// The sum of the losses of the valid tokens, nothing else changed. REQUIRES bind().
  double evaluate(const MicroBatch& batch, const NodeObserver& observer = {});

  /// Assignments of the last micro-batch to each expert, by MoE layer.
  std::vector<std::vector<double>> last_counts() const;
  /// The different programs of its layers.
  std::vector<LayerKind> layer_kinds() const;
  const DerivedProgram& layer_program(LayerKind kind) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
