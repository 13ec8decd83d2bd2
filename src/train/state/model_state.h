#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/run/training_model.h"
#include "model/weights/parameters.h"
#include "model/weights/rounding_history.h"
#include "optim/sharded/fully_sharded.h"
#include "optim/sharded/sharded_optimizer.h"
#include "step/build/build_step.h"
#include "step/run/step_parameters.h"
#include "train/setup/run_layout.h"
#include "train/setup/settings.h"

namespace tessera {

/// Layers of multi-token prediction in which weights to start from differ from the model's.
struct LoadedPrediction {
  int64_t added = 0;     ///< only the model has them
  int64_t left_out = 0;  ///< only the checkpoint has them
};

/// Everything that training changes, as one rank holds it: its parts of the weights, expert biases,
/// its share of the optimizer's moments and masters. With full sharding on several ranks, weights
/// are whole only while a pass over their module needs them.
class ModelState {
 public:
  /// Bytes that construction will take. Gradients with the staging through which they are reduced,
  /// and weights gathered. With full sharding, weights and gradients are this rank's shares and the
  /// buffers for whole modules.
  struct Bytes {
    int64_t weights = 0;
    int64_t gradients = 0;
    int64_t optimizer = 0;
    int64_t on_host = 0;  ///< of the host's memory, where the state is there; not of the total
    int64_t total() const { return weights + gradients + optimizer; }
    /// What a run goes on from, wherever it is.
    int64_t held() const { return weights + optimizer + on_host; }
    bool operator==(const Bytes&) const = default;
  };
  /// Exact for rank run.rank(); the world may be planned only.
  static Bytes count_bytes(const Settings& settings, const RunLayout& run,
                           const Backend& backend = optimizer_on_host());

  /// What construction took.
  Bytes bytes() const;

  /// Bytes at most of what rank run.rank() saves: of owned_model() and owned_optimizer().
  static int64_t count_saved_bytes(const Settings& settings, const RunLayout& run);

  /// What the optimizer of rank run.rank() exchanges in a step, for build_step. Its communicators
  /// are planned only, and so may the world be.
  static StepSharding plan_sharding(const Settings& settings, const RunLayout& run);

  /// All ranks of the world call.
  ModelState(const Settings& settings, const RunLayout& run, World& world,
             const Backend& backend = optimizer_on_host());
  /// Of a run on one rank.
  explicit ModelState(const Settings& settings);

  /// Fresh weights from a seed; moments are zero.
  void initialize(uint64_t seed);

  /// Where `weights()` is null, with the addresses of all weights and gradients.
  ParameterSet& parameters() { return parameters_; }
  const ParameterSet& parameters() const { return parameters_; }
  /// Gives the model its weights; null where they stay where they are.
  WeightStore* weights() { return sharded_parameters_.get(); }
  /// What a step's tasks ask of all this: see StepRunner.
  StepParameters& step_parameters();
  std::vector<ExpertState>& experts() { return experts_; }
  const std::vector<ExpertState>& experts() const { return experts_; }
  /// Of a recipe without delayed scales it is empty.
  RoundingHistory& roundings() { return roundings_; }
  const RoundingHistory& roundings() const { return roundings_; }
  DistributedOptimizer& optimizer();
  const DistributedOptimizer& optimizer() const;

  /// Returns when all updated weights are here: before anything but a step's forward passes reads
  /// them, and before the state is destroyed, since other ranks count on this one.
  void wait_weights();

  /// For checkpoints: weights and expert biases, and moments, masters and the history of roundings,
  /// each element of the model at one rank.
  std::vector<NamedSlice> owned_model() const;
  std::vector<NamedSlice> owned_optimizer() const;
  /// Fills everything from a checkpoint of the same model and precision, also of weights, whatever
  /// its layout and the formats of its optimizer's state. Throws UserError otherwise. A history of
  /// roundings that it lacks begins anew.
  void load(const CheckpointReader& reader);
  /// For copies that the same rank of the same layout loads: all that this rank holds.
  std::vector<NamedSlice> held_model() const;
  std::vector<NamedSlice> held_optimizer() const;
  /// Fills everything from a part that has all that this rank holds. Throws UserError otherwise,
  /// but for the history of roundings.
  void load_held(const CheckpointReader& reader);
  /// Fills weights and expert biases alone, F32 or BF16, as the start of a training. Adapters that
  /// the checkpoint lacks, and layers of multi-token prediction that only the model has, start from
  /// the seed; such layers that only the checkpoint has are left out. Throws UserError where other
  /// names or any shapes are not this model's.
  LoadedPrediction load_weights(const CheckpointReader& reader, uint64_t seed);

 private:
  void initialize(uint64_t seed, const std::function<bool(const std::string&)>& of);
  void cast_weights();
  void require_same_weights(const CheckpointReader& reader) const;
  void append_roundings(std::vector<NamedSlice>& slices) const;
  std::vector<NamedSlice> held_weights() const;

  ModelConfig config_;
  DType dtype_;
  ProductPrecision products_;
  OptimizerKind optimizer_kind_;
  StateFormats formats_;
  bool names_biases_;  ///< one rank saves expert biases and roundings, which all have
  ParameterSet parameters_;
  std::vector<NamedSlice> frozen_;        ///< of weights that are not trained, what is here
  std::vector<NamedSlice> owned_frozen_;  ///< and what of it this rank saves
  std::vector<ExpertState> experts_;
  RoundingHistory roundings_;
  // One of the two:
  std::unique_ptr<ShardedOptimizer> replicated_;
  std::unique_ptr<FullySharded> sharded_;
  std::unique_ptr<ReplicatedParameters> replicated_parameters_;  ///< of `replicated_`
  std::unique_ptr<ShardedParameters> sharded_parameters_;        ///< of `sharded_`
};

/// What a rank's plans of a step and of an evaluation are built of. Of `parameters`, the rank's,
/// names are read; the result refers to the model and to them.
StepRequest request_step(const Settings& settings, const RunLayout& run, const TrainingModel& model,
                         const ParameterSet& parameters);

}  // namespace tessera
