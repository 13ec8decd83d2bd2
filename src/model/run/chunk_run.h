#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/run/batch_inputs.h"
#include "model/run/chunk_streams.h"
#include "model/run/expert_states.h"
#include "model/run/pass_statistics.h"
#include "model/run/stage_programs.h"
#include "model/run/weight_store.h"

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

/// The memory that all runs of a rank share, since it runs one pass at a time.
struct SharedMemory {
  Buffer transient;  ///< working memory of any program
};

/// One chunk of the model with the activations of one micro-batch: streams between layers, saved
/// values, inputs, and the programs bound to them. A pass forward, then one backward (and one for
/// the weights where they are split). Not thread-safe. All references must outlive it.
class ChunkRun {
 public:
  /// With `store`, it gives the parameters their addresses for each run of a program; without, they
  /// are those of `parameters` for good.
  ChunkRun(const StagePrograms& programs, const PipelineChunk& chunk, const TokenShare& tokens,
           ParameterSet& parameters, std::vector<ExpertState>& experts, SharedMemory& memory,
           WeightStore* store = nullptr);

  /// Bytes that one takes beside the shared memory.
  struct Bytes {
    int64_t saved = 0;
    int64_t hidden = 0;
    int64_t inputs = 0;
  };
  static Bytes count_bytes(const StagePrograms& programs, const PipelineChunk& chunk);

  void load(const MicroBatch& batch, const LossScales& scales);
  /// How many hidden states enter and leave: one, and behind the decoder one more for each layer of
  /// multi-token prediction so far, the decoder's first.
  int64_t num_in() const { return streams_.num_in(); }
  int64_t num_out() const { return streams_.num_out(); }
  /// The hidden states that enter and leave; a chunk without the embedding is given the former.
  Tensor hidden_in(int64_t idx = 0) const { return stream(streams_.hidden(idx)); }
  Tensor hidden_out(int64_t depth = 0) const { return stream(streams_.hidden_at_depth(depth)); }
  /// Their gradients; a chunk without the loss is given the latter.
  Tensor grad_in(int64_t idx = 0) const { return stream(streams_.grad(idx)); }
  Tensor grad_out(int64_t depth = 0) const { return stream(streams_.grad_from_outside(depth)); }
  /// Where one balance loss spans the model: F64 [2, E], the assignments to each expert and its
  /// score means, summed over the layers up to this chunk's last. Before forward() a chunk without
  /// the embedding is given what the chunk before it left.
  Tensor balance_sums() const { return balance_sums_; }
  /// The gradient of every layer's score means F32 [E], there after forward() of the chunk with the
  /// loss; the others are given it before backward().
  Tensor grad_score_means() const { return inputs_.grad_score_means; }

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
  /// Of the first micro-batch that finished and was not collected; adds its counts of assignments
  /// to the experts' step counts. REQUIRES that the device was synchronised since finish().
  MicroBatchResult collect();
  /// Forgets the results that nobody collected.
  void forget_results();

  const PipelineChunk& chunk() const { return chunk_; }
  /// Assignments to each expert by MoE layer of the chunk, in the last micro-batch collected.
  std::vector<std::vector<double>> counts() const;

 private:
  /// A program and its memory. Only the addresses of parameters may change.
  struct BoundProgram {
    const Executable* program = nullptr;
    Bindings bindings;
    ProgramParameters parameters;
    std::vector<size_t> reads;      // parameters
    std::vector<size_t> completes;  // those to which no later program of the micro-batch adds
  };
  /// A program forward and backward.
  struct BoundPasses {
    BoundProgram forward, backward;
    Buffer saved;
  };
  /// What the passes over one layer need.
  struct BoundLayer {
    const KindProgram* kind = nullptr;
    ExpertState* experts = nullptr;  // null for a dense layer
    BoundProgram forward, backward, weights;
    BoundPasses embedding;    // of multi-token prediction
    Buffer saved, kept;       // kept: from the backward pass to the weights'
    int64_t moe_idx = -1;     // among the chunk's MoE layers; -1 for a dense layer
    OwnedTensor expert_bias;  // the device's, where that is not the host
  };

  Tensor stream(int64_t idx) const;
  bool is_mtp(int64_t idx) const { return idx >= chunk_.num_layers; }
  /// Which of the hidden states layer `idx` of the chunk reads.
  int64_t layer_input(int64_t idx) const { return streams_.before + idx; }
  void bind_layers(const ParameterSet& parameters, std::vector<ExpertState>& experts);
  BoundProgram join(const Executable& program, const std::string& prefix, Bindings bindings,
                    const ParameterSet& parameters) const;
  void bind_embedding(const Tensor& tokens, const Tensor& hidden, const Tensor& grad,
                      const ParameterSet& parameters, BoundPasses& passes) const;
  Bindings bind_head_inputs(const Executable& program, const HeadProgram& layout, int64_t depth,
                            const ParameterSet& parameters) const;
  void bind_heads(const ParameterSet& parameters);
  void bind_head(int64_t depth, const ParameterSet& parameters);
  void bind_layer(int64_t idx, const ParameterSet& parameters);
  void bind_layer_inputs(int64_t idx, BoundLayer& layer, const ParameterSet& parameters);
  void bring_expert_biases();
  Device& device() const { return programs_.backend.device(); }
  void bind_layer_outputs(int64_t idx, BoundLayer& layer);
  void bind_layer_gradients(int64_t idx, BoundLayer& layer);
  void order_passes();
  void find_completed();
  void run(const std::vector<BoundProgram*>& pass, const NodeObserver& observer,
           const ParameterHook& before, const ParameterHook& after);
  void find_unset(BoundProgram& bound);
  void bring_weights(const std::vector<BoundProgram*>& pass, size_t idx);
  void add_balance_sums();
  void balance_model();

  const StagePrograms& programs_;
  PipelineChunk chunk_;
  ChunkStreams streams_;
  const TokenShare& tokens_;
  SharedMemory& memory_;
  ParameterSet& parameters_;
  WeightStore* store_;
  BatchInputs inputs_;
  PassStatistics statistics_;
  LossScales scales_;
  Buffer hidden_;
  BoundPasses embedding_;
  std::vector<BoundPasses> heads_;  // by depth
  BoundProgram evaluation_;
  std::vector<BoundLayer> layers_;
  OwnedTensor balance_sums_;
  // The programs of each pass in their order.
  std::vector<BoundProgram*> forward_pass_, evaluation_pass_, backward_pass_, weight_pass_;
  double model_balance_ = 0;
  std::deque<double> model_balances_;  // of the micro-batches that finished
};

}  // namespace tessera
