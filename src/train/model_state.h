#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/parameters.h"
#include "model/training_model.h"
#include "optim/optimizer.h"
#include "train/settings.h"

namespace tessera {

/// Everything that training changes: weights, expert biases, the optimizer's moments and masters.
class ModelState {
 public:
  /// Bytes that construction will take.
  struct Bytes {
    int64_t weights = 0;
    int64_t gradients = 0;
    int64_t optimizer = 0;
    int64_t total() const { return weights + gradients + optimizer; }
  };
  static Bytes count_bytes(const ModelConfig& config, DType dtype);

  ModelState(const ModelConfig& config, DType dtype, const AdamWOptions& options);

  /// Fresh weights from a seed; moments are zero.
  void initialize(uint64_t seed);

  ParameterSet& parameters() { return parameters_; }
  std::vector<ExpertState>& experts() { return experts_; }
  AdamWOptimizer& optimizer() { return *optimizer_; }

  /// Views for checkpoints: weights and expert biases; moments and masters.
  std::vector<NamedTensor> model_tensors() const;
  std::vector<NamedTensor> optimizer_tensors() const;
  /// Fills everything from a checkpoint of the same shapes and precision. Throws UserError
  /// otherwise.
  void load(const CheckpointReader& reader);
  /// Fills weights and expert biases alone, F32 or BF16, as the start of a training. Throws
  /// UserError where the names or shapes are not this model's.
  void load_weights(const CheckpointReader& reader);

 private:
  ModelConfig config_;
  ParameterSet parameters_;
  std::vector<ExpertState> experts_;
  std::unique_ptr<AdamWOptimizer> optimizer_;
};

}  // namespace tessera
