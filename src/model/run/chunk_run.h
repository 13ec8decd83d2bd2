#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/run/chunk_binder.h"

namespace tessera {

/// What a pass over one micro-batch gave, of the parts that one rank has: they add up over the
/// ranks that share a micro-batch and over the pipeline's stages.
struct MicroBatchResult {
  double loss = 0;          ///< scaled sum over the valid tokens
  double mtp_loss = 0;      ///< likewise, of multi-token prediction
  double balance_loss = 0;  ///< mean over the MoE layers, or the model's; 1.0 is perfect
  double z_loss = 0;        ///< mean over the MoE layers
  int64_t dropped = 0;      ///< assignments that found no room, all layers

  MicroBatchResult& operator+=(const MicroBatchResult& other);
};

/// Told of parameters, by their places in the rank's ParameterSet.
using ParameterHook = std::function<void(std::span<const size_t> parameters)>;

/// What happens around the programs of a pass; either may be empty.
struct PassHooks {
  ParameterHook before_forward;  ///< their weights are needed now
  ParameterHook after_backward;  ///< this chunk adds no more to their gradients
};

/// One chunk of the model with the activations of one micro-batch: streams between layers, saved
/// values, inputs, and the programs bound to them. A pass forward, then one backward (and one for
/// the weights where they are split). Not thread-safe. All references must outlive it.
class ChunkRun {
 public:
  /// With `store`, it gives the parameters their addresses for each run of a program; without, they
  /// are those of `parameters` for good.
  ChunkRun(const StagePrograms& programs, const PipelineChunk& chunk, const TokenShare& tokens,
           ParameterSet& parameters, std::vector<ExpertState>& experts, const SharedMemory& shared,
           WeightStore* store = nullptr);

  /// Bytes that one takes beside the shared memory.
  struct Bytes {
    int64_t saved = 0;
    int64_t hidden = 0;
    int64_t inputs = 0;
  };
  static Bytes count_bytes(const StagePrograms& programs, const PipelineChunk& chunk);

  void load(const MicroBatch& batch, const LossScales& scales) {
    stage(batch, scales);
    bring();
  }
  /// The host's and the device's part of it: where a device repeats the work of a step, the former
  /// is needed alone.
  void stage(const MicroBatch& batch, const LossScales& scales);
  void bring();
  /// The decoder's hidden states that enter and leave; a chunk without the embedding is given the
  /// former.
  Tensor hidden_in(int64_t idx = 0) const { return memory_.stream(memory_.streams.hidden(idx)); }
  Tensor hidden_out(int64_t depth = 0) const { return memory_.hidden_out(depth); }
  /// What a pass is given by the chunk next to it before it runs, if it is not the pipeline's end,
  /// and leaves for the one on the other side. Along with the hidden states (behind the decoder one
  /// more for each layer of multi-token prediction so far) or their gradients come, where one
  /// balance loss spans the model, its sums or their gradient.
  struct Messages {
    std::vector<Tensor> in, out;
  };
  Messages forward_messages() const;
  Messages backward_messages() const;

  void forward(const NodeObserver& observer, const PassHooks& hooks = {});
  /// Forward without gradients to come and without multi-token prediction, adding the loss of the
  /// labels where the chunk has the loss.
  double evaluate(const NodeObserver& observer);
  void backward(const NodeObserver& observer, const PassHooks& hooks = {});
  /// The weights' gradients of the last backward pass, where they are split off.
  void backward_weights(const NodeObserver& observer, const PassHooks& hooks = {});
  /// To be called after the last pass of a micro-batch: leaves its result for collect(). The device
  /// is not waited for.
  void finish();
  /// The same where the device repeats the work of a step.
  void finish_again();
  /// The loss that finish() left, F32 [1], where the device and the host reach it; null in a chunk
  /// without the loss.
  Tensor finished_loss() const;
  /// Of the first micro-batch that finished and was not collected; adds its counts of assignments
  /// to the experts' step counts. REQUIRES that the device was synchronised since finish().
  MicroBatchResult collect();
  /// Forgets the results that nobody collected.
  void forget_results();

  const PipelineChunk& chunk() const { return chunk_; }
  /// Assignments to each expert by MoE layer of the chunk, in the last micro-batch collected.
  std::vector<std::vector<double>> counts() const;

 private:
  Device& device() const { return programs_.backend.device(); }
  void order_passes();
  void find_completed();
  void bring_expert_biases();
  void run(const std::vector<BoundProgram*>& pass, const NodeObserver& observer,
           const ParameterHook& before, const ParameterHook& after);
  void find_unset(BoundProgram& bound);
  void bring_weights(const std::vector<BoundProgram*>& pass, size_t idx);
  void add_balance_sums();

  const StagePrograms& programs_;
  PipelineChunk chunk_;
  const TokenShare& tokens_;
  ParameterSet& parameters_;
  WeightStore* store_;
  ChunkMemory memory_;
  BoundChunk bound_;
  LossScales scales_;
  // The programs of each pass in their order.
  std::vector<BoundProgram*> forward_pass_, evaluation_pass_, backward_pass_, weight_pass_;
  double model_balance_ = 0;
  std::deque<double> model_balances_;  // of the micro-batches that finished
};

}  // namespace tessera
