#pragma once

#include <memory>
#include <optional>
#include <string>

#include "ops/backend.h"
#include "tokenizer/tokenizer.h"
#include "train/setup/settings.h"
#include "train/state/checkpointing.h"
#include "train/state/model_state.h"

namespace tessera {

/// What becomes of weights that are NaN or infinite where a model is read.
enum class NonFiniteWeights : uint8_t { kRefuse, kAllow };

/// A model without its optimizer, for evaluation and generation. Not movable: models bound
/// to it keep references.
class LoadedModel {
 public:
  /// Opens the newest whole checkpoint at `path` (a run's folder, a folder of checkpoints, or one
  /// of them), with the configuration that it was trained with, except for the device. Throws
  /// UserError, also for weights that are NaN or infinite unless they are allowed.
  LoadedModel(const std::string& path, DeviceChoice device,
              NonFiniteWeights nonfinite = NonFiniteWeights::kRefuse);
  /// The newest whole checkpoint at `path` as a run of these settings that starts from it has it:
  /// on the same device, and in the same precision, to the bit.
  LoadedModel(const std::string& path, const Settings& of_run);
  /// A new model with random weights, as a run of these settings would start from (run.seed).
  /// Throws UserError for settings that give none.
  explicit LoadedModel(Settings settings);
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;

  const Settings& settings() const { return settings_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  int64_t step() const { return step_; }
  /// What the user should know: newer checkpoints passed over, weights that are not finite.
  const std::vector<std::string>& notes() const { return notes_; }
  /// The checkpoint; empty for a new model.
  const std::filesystem::path& path() const { return path_; }
  /// Where the weights are and programs run.
  const Backend& backend() const { return *backend_; }
  ParameterSet& parameters() { return *parameters_; }
  std::vector<ExpertState>& experts() { return experts_; }
  /// What products read where text is scored: as in training. Tokens are generated without
  /// rounding.
  ProductPrecision products() const;

 private:
  void describe(const OpenedCheckpoint& opened, DeviceChoice device);
  void load(const CheckpointReader& reader, Conversion conversion, NonFiniteWeights nonfinite);
  void take_memory();

  std::filesystem::path path_;
  Settings settings_;
  int64_t step_ = 0;
  std::vector<std::string> notes_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<Backend> backend_;
  std::unique_ptr<ParameterSet> parameters_;
  std::vector<ExpertState> experts_;
};

/// Loss of a model over tokens.
struct Evaluation {
  double loss = 0;  ///< mean nats per token, NaN or infinite where that of any token is
  int64_t num_tokens = 0;
  int64_t nonfinite_tokens = 0;  ///< whose loss is NaN or infinite
  int64_t num_bytes = 0;         ///< of text that those tokens stand for; 0 without a tokenizer
  double seconds = 0;
  double perplexity() const;
  double bits_per_byte() const;  ///< not finite without a tokenizer
};

struct EvaluationRequest {
  std::string text;             ///< file or folder of text; or
  std::string tokens;           ///< prefix of a token file; or neither: the run's own held-out data
  int64_t sequence_length = 0;  ///< 0: the training's
  int64_t batch_size = 8;
  int64_t max_batches = 0;  ///< 0: all
  /// Whether losses that are NaN or infinite are counted, and not an error.
  bool allow_nonfinite = false;
};

/// Evaluates windows of `sequence_length` tokens one after the other; each token but a window's
/// first is predicted once.
Evaluation evaluate(LoadedModel& model, const EvaluationRequest& request);

}  // namespace tessera
