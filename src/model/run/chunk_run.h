#pragma once

#include <deque>
#include <optional>
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
  /// Of the step so far: pages that its stash lacked (StashPool), so that gradients are wrong. Of
  /// several parts the most.
  int64_t missing_pages = 0;
  /// [all layers, heads]: the largest attention logits of the layers and heads that this rank has,
  /// the least float elsewhere; empty where they are not measured. They do not add up: of several
  /// parts the largest counts.
  std::vector<float> max_logits = {};

  MicroBatchResult& operator+=(const MicroBatchResult& other);
};

/// One chunk of the model with the activations of one micro-batch: streams between layers, saved
/// values, inputs, and the programs bound to them. A pass forward, then one backward (and one for
/// the weights where they are split). Not thread-safe. All references must outlive it.
class ChunkRun {
 public:
  ChunkRun(const StagePrograms& programs, const PipelineChunk& chunk, const TokenShare& tokens,
           const ChunkState& state, const SavedOffsets& offsets);

  /// Bytes that one takes beside the shared memory.
  struct Bytes {
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
  /// Memory for what the next step stages as micro-batch `number` of this chunk and place, from the
  /// time on when this step has staged its own. REQUIRES that the device is past the step before.
  std::byte* spare_inputs(int64_t number) const { return memory_.inputs.spare_block(number); }
  /// Writes a micro-batch there; any thread may.
  void fill_inputs(std::byte* inputs, const MicroBatch& batch, const LossScales& scales) const;
  /// Stages what was written there.
  void stage_spare(int64_t number, const LossScales& scales);
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

  /// Runs one program of a pass, whose weights and messages are there. The programs of a
  /// micro-batch run in the order of list_pass: forward, backward, weights.
  void run(const ProgramRef& program, const NodeObserver& observer) {
    run(program, RunPart(), observer);
  }
  /// A part of one, behind the parts before it, with nothing of this micro-batch between them.
  void run(const ProgramRef& program, const RunPart& part, const NodeObserver& observer);
  /// What a program reads and adds to.
  const ProgramParameters& parameters_of(const ProgramRef& program);
  /// All programs of a pass.
  void run_pass(PassDirection direction, const NodeObserver& observer);
  /// Begins to bring the offloaded part of what layer `idx` of the chunk saved to the host's
  /// memory, or back. Until the copy has been waited for, nobody may touch either.
  CopyLane::Ticket store(int64_t idx);
  CopyLane::Ticket reload(int64_t idx);
  void wait_stored(int64_t idx, CopyLane::Ticket copy);
  void wait_reloaded(CopyLane::Ticket copy) const { copies_.reloads->join(copy); }
  /// Where one balance loss spans the model, after the forward pass: adds this chunk's layers to
  /// the sums of those before; the last chunk's ranks that share the micro-batch find the loss. The
  /// device is waited for.
  void sum_balance();
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
  /// The same after list_evaluation: the loss of the labels where the chunk has the loss; nothing
  /// else changes.
  double collect_loss();
  /// Forgets the results that nobody collected.
  void forget_results();

  const PipelineChunk& chunk() const { return chunk_; }
  /// Assignments to each expert by MoE layer of the chunk, in the last micro-batch collected.
  std::vector<std::vector<double>> counts() const;

 private:
  Device& device() const { return programs_.backend.device(); }
  /// Of the micro-batch in hand.
  BoundChunk& bound();
  BatchInputs::Given as_given(const MicroBatch& batch, const LossScales& scales) const;
  void bring_expert_biases();
  void find_unset(BoundProgram& bound);
  void begin_run(const ProgramRef& program, BoundProgram& bound, const NodeObserver& observer);
  void renew_copies(const ProgramRef& program, const NodeObserver& observer);
  void leave_saved(const ProgramRef& program);
  std::vector<float> collect_max_logits() const;

  const StagePrograms& programs_;
  PipelineChunk chunk_;
  const TokenShare& tokens_;
  ParameterSet& parameters_;
  LayerCopies& weight_copies_;
  RoundingTables& roundings_;
  WeightStore* store_;
  const HostCopies& copies_;
  StashPool* stash_;
  ElasticSlabs& slabs_;
  ChunkMemory memory_;
  BoundChunk bound_;
  std::vector<BoundChunk> bound_of_degrees_;       // of StagePrograms::of_degrees
  int64_t degree_ = 0;                             // of the micro-batch in hand; 0: fixed
  std::optional<PartialRun> under_way_;            // where programs run in parts
  std::vector<Executable::OffloadedRows> stored_;  // by layer
  LossScales scales_;
  double model_balance_ = 0;
  std::deque<double> model_balances_;  // of the micro-batches that finished
};

}  // namespace tessera
