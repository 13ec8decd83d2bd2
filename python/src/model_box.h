#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "arrays.h"
#include "model/run/forward_model.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"

namespace tessera::python {

/// A model's parts, wherever they are.
struct ModelParts {
  ModelConfig config;  ///< without multi-token prediction
  const Settings& settings;
  const Backend& backend;
  ParameterSet& parameters;
  std::vector<ExpertState>& experts;
  const Tokenizer& tokenizer;
};

/// A model that scores and writes: one of its own, or the one that a trainer trains. One thread at
/// a time.
class ModelBox {
 public:
  explicit ModelBox(std::unique_ptr<LoadedModel> own);
  /// Of a trainer: `parts` and what `turns` belong to must live as long as this, and `settle` is
  /// called before weights are read.
  ModelBox(const ModelParts& parts, Turns& turns, std::function<void()> settle);

  const ModelParts& parts() const { return parts_; }
  Turns& turns() const { return turns_; }
  /// Null of a trainer's.
  const LoadedModel* own() const { return own_.get(); }
  void settle() const { settle_(); }

  /// Forgets what a GPU was given of the model beside its weights (biases of experts), which a step
  /// has changed.
  void forget() { scorer_ = {}; }

  /// −log p of each label, 0 where there is none: [B, T].
  std::vector<float> score(const TokenRows& rows);
  /// F32 scores of each next token, [B, T, V].
  std::vector<float> logits(const Rows& tokens);
  /// Writes all weights, and the configuration, as a checkpoint into `root`; returns its folder.
  std::string save(const std::string& root) const;

 private:
  struct Scorer {
    int64_t num_tokens = 0;
    int64_t max_sequences = 0;
    std::unique_ptr<ForwardModel> model;
  };

  std::unique_ptr<LoadedModel> own_;
  ModelParts parts_;
  Turns own_turns_;
  Turns& turns_;
  std::function<void()> settle_;
  Scorer scorer_;  ///< of the last shape
};

}  // namespace tessera::python
