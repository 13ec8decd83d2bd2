#pragma once

#include <map>
#include <memory>

#include "model/build/model_program.h"
#include "model/run/saved_policy.h"
#include "model/weights/parameters.h"
#include "runtime/derived_program.h"

namespace tessera {

/// The layer program of one kind, differentiated.
struct KindProgram {
  ModelProgram layout;  // its forward program lives in `derived`
  DerivedProgram derived;
};

/// The part of a model that one rank runs.
struct ModelPart {
  StageGroups groups = single_rank_groups();
  /// This rank's chunks of the pipeline, in the order of the model; empty: the whole model.
  std::vector<PipelineChunk> chunks = {};
  /// The micro-batches of each chunk whose activations are held at a time; empty: one each.
  std::vector<int64_t> in_flight = {};
  /// Weight gradients in a pass of their own (zero-bubble pipelines).
  bool split_weights = false;
  /// Whether backward passes that follow one another take turns layer by layer, so that a layer's
  /// gradients are complete before the next layer has any.
  bool layers_in_turn = false;
  /// Whether a forward pass may run side by side with a backward pass (PipelineSpec): each of the
  /// two then has working memory of its own.
  bool merges_passes = false;
};

/// The head of one depth (see build_head), differentiated.
struct HeadPasses {
  ModelProgram layout;  // its forward program lives in `derived`
  DerivedProgram derived;
};

/// What two layers must share to run the same program.
struct LayerProgramKey {
  LayerKind kind;
  std::vector<std::string> recomputed;  ///< names of values (see names_of_layer)
  std::vector<std::string> offloaded;   ///< likewise
  std::vector<std::string> plain;       ///< weights (ProductPrecision), likewise
  bool stashes = false;                 ///< what SavedPolicy::stash says
  auto operator<=>(const LayerProgramKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// Programs of layers, each compiled once.
using KindPrograms = std::map<LayerProgramKey, std::shared_ptr<const KindProgram>>;

/// All programs that a rank runs, shared by its layers and micro-batches. Immutable once built.
struct StagePrograms {
  ModelConfig config;
  BatchShape shape;
  ModelPart part;
  Backend backend;
  SavedPolicy policy;
  ModelProgram embedding_layout;
  ModelProgram evaluation_layout;
  std::shared_ptr<const DerivedProgram> embedding;    // null where no chunk needs it
  std::vector<HeadPasses> heads;                      // by depth; empty where no chunk has the loss
  std::shared_ptr<const Executable> evaluation_head;  // null likewise
  KindPrograms kinds;
  std::map<int64_t, const KindProgram*> of_layers;  // of this rank's chunks, counted in the model
  std::shared_ptr<KindPrograms> compiled;  // `kinds`, and those of other policies (with_policy)
  /// Of micro-batches of dynamic context parallelism, by the logarithm of their degree: the same
  /// programs but for the groups in which documents are shared. Empty where the degree is fixed.
  std::vector<std::shared_ptr<const StagePrograms>> of_degrees;

  StagePrograms(const ModelConfig& model, const BatchShape& batch, ModelPart model_part,
                const SavedPolicy& saved_policy, const Backend& where);
  /// The same part of the model with another policy, whose names are not checked. What was compiled
  /// for this one or for others made of it is not compiled again. Not on two threads at a time.
  std::unique_ptr<StagePrograms> with_policy(const SavedPolicy& other) const;

  LayerProgramKey key_of(int64_t layer) const {
    return {config.layer_kind(layer), names_of_layer(policy.recompute, layer),
            names_of_layer(policy.offload.entries, layer),
            names_of_layer(shape.products.plain, layer), policy.stash.has_value()};
  }
  /// Rows that come to this rank's experts of a layer where routing is balanced: each rank gets as
  /// many as its own tokens have choices, and those of its `etp` group.
  int64_t balanced_rows() const {
    return own_tokens(shape, part.groups) * config.moe.choices() * part.groups.etp->size();
  }
  /// What of layers is stashed, where anything is.
  std::optional<StashRule> stash_rule() const;
  const KindProgram& kind_of(int64_t layer) const { return *of_layers.at(layer); }
  /// The program that layers of that key would run, compiled where it is not known yet.
  const KindProgram& compile_kind(const LayerProgramKey& key) const;
  /// Bytes of the largest working set of any program; where passes are merged, of two of them.
  int64_t transient_bytes() const { return backward_working() + working_bytes(); }
  /// Where that of backward programs begins.
  int64_t backward_working() const;
  /// Of one.
  int64_t working_bytes() const;
  /// Model FLOPs of one micro-batch in this rank's chunks, forward and backward.
  double model_flops() const;
  /// What the compiler's passes do to each of the training programs, which are compiled again.
  std::vector<CompileReport> compile_reports() const;
  Shape hidden_shape() const { return {own_tokens(shape, part.groups), config.state_width()}; }
  int64_t hidden_bytes() const {
    return align_up(hidden_shape().num_elements() * dtype_size(shape.dtype));
  }
};

}  // namespace tessera
