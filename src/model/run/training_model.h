#pragma once

#include <memory>
#include <vector>

#include "model/run/chunk_run.h"
#include "model/run/slab_bytes.h"

namespace tessera {

/// Bytes that training needs for activations, known before they are taken.
/// What routing makes of them is as large as where it is balanced.
struct ActivationBytes {
  int64_t saved = 0;      ///< values kept from forward to backward, all layers
  int64_t hidden = 0;     ///< the residual streams between layers and their gradients
  int64_t transient = 0;  ///< the largest working set of any program
  int64_t inputs = 0;     ///< token ids, labels, positions and the like
  int64_t copies = 0;     ///< of weights in FP8
  int64_t stash = 0;      ///< pages of rows that came to experts
  int64_t offloaded = 0;  ///< in the host's memory: what of the saved values waits there
  int64_t worst = 0;      ///< what the worst routing adds to `saved`, `transient` and `stash`
  /// Of the device's memory.
  int64_t total() const { return saved + hidden + transient + inputs + copies + stash; }
};

/// A micro-batch's activations in a chunk: which of this rank's chunks, and which of its places.
struct RunSlot {
  int64_t chunk = 0;
  int64_t place = 0;
};

/// Runs forward and backward passes of a model, or of one rank's part of it, for micro-batches of
/// one shape: the embedding, a program a layer, the head. All memory is taken by bind, except what
/// unbalanced routing needs more where the host learns of it (see RowPlan); gradients
/// are added into the parameters' accumulators. Not thread-safe: one object runs one pass at a
/// time. The parameters and expert states must outlive it.
class TrainingModel {
 public:
  TrainingModel(const ModelConfig& config, const BatchShape& shape, const SavedPolicy& policy,
                const Backend& backend, ModelPart part = {});
  explicit TrainingModel(std::unique_ptr<StagePrograms> programs);

  const ModelConfig& config() const { return programs_->config; }
  const BatchShape& batch_shape() const { return programs_->shape; }
  const ModelPart& part() const { return programs_->part; }
  const StagePrograms& programs() const { return *programs_; }
  /// Where its programs run.
  Device& device() const { return programs_->backend.device(); }
  /// Where what passes save lies: one behind the other (place_in_line) unless this was called,
  /// before bind. The passes must then come in the order that the placement was made for.
  void place(SavedPlacement placement) { placement_ = std::move(placement); }
  const SavedPlacement& placement() const { return placement_; }
  /// What `bind` will take.
  ActivationBytes activation_bytes() const;
  /// How many times the rows of balanced routing may come in every layer where `more_bytes` are
  /// free beside activation_bytes(), at least 1 and at most the number of experts.
  double find_skew(int64_t more_bytes) const;
  /// What `skew` times the rows of balanced routing in every layer add to activation_bytes().
  int64_t skewed_bytes(double skew) const;
  /// What has memory now, of what passes save and of the working memory; more than at bind where
  /// routing was not balanced. REQUIRES bind().
  SlabBytes slab_bytes() const;
  /// The same with the pages of stashed rows.
  int64_t elastic_bytes() const;
  /// Null where layers stash nothing. REQUIRES bind().
  StashPool* stash() const { return stash_.get(); }
  /// REQUIRES bind().
  const ElasticSlabs& slabs() const { return *slabs_; }
  /// Model FLOPs of one micro-batch in this rank's part, forward and backward, recomputation not
  /// counted.
  double model_flops() const { return programs_->model_flops(); }
  /// Takes the memory and joins the programs with the parameters; with `store`, which must outlive
  /// the model, it gives these their addresses.
  void bind(ParameterSet& parameters, std::vector<ExpertState>& experts,
            WeightStore* store = nullptr);

  /// What roundings by delayed scales read and count. REQUIRES bind().
  RoundingTables& roundings() { return *roundings_; }

  /// Starts a step: the experts' step counts become zero, and scales those that were set.
  void begin_step();
  /// Weights may have changed since the last step began: copies that are made of them are made
  /// anew.
  void forget_copies() { weight_copies_->forget(); }
  /// Forward and backward of one micro-batch through a model that is one chunk. REQUIRES bind().
  MicroBatchResult run(const MicroBatch& batch, const LossScales& scales,
                       const NodeObserver& observer = {});
  /// The sum of the losses of this rank's valid tokens, nothing else changed. REQUIRES bind() and
  /// one chunk.
  double evaluate(const MicroBatch& batch, const NodeObserver& observer = {});

  /// The run of a chunk, for pipelines. REQUIRES bind().
  ChunkRun& run_at(const RunSlot& at);

  /// Assignments of the last micro-batch to each expert, by MoE layer of a model that is one chunk.
  std::vector<std::vector<double>> last_counts() const;
  /// The kinds of its layers.
  std::vector<LayerKind> layer_kinds() const;
  /// A program of that kind.
  const DerivedProgram& layer_program(LayerKind kind) const;
  /// All of them, also those of one kind that differ in what they compute again or offload.
  const KindPrograms& layer_programs() const { return programs_->kinds; }
  std::vector<CompileReport> compile_reports() const { return programs_->compile_reports(); }

 private:
  ChunkRun& only_run() const;
  int64_t stash_bytes(double skew) const;
  int64_t skewed_total(double skew) const;

  std::unique_ptr<StagePrograms> programs_;
  std::unique_ptr<TokenShare> tokens_;
  SavedPlacement placement_;
  std::unique_ptr<ElasticSlabs> slabs_;
  std::unique_ptr<HostCopies> copies_;
  std::unique_ptr<StashPool> stash_;
  std::unique_ptr<LayerCopies> weight_copies_;
  std::unique_ptr<RoundingTables> roundings_;
  std::vector<std::vector<std::unique_ptr<ChunkRun>>> runs_;  // by chunk, by place
  std::vector<ExpertState>* experts_ = nullptr;
};

}  // namespace tessera
