#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/sampler.h"
#include "data/text/prepare.h"
#include "data/text/text_source.h"
#include "model/run/training_model.h"
#include "tokenizer/tokenizer.h"
#include "train/setup/settings.h"

namespace tessera {

/// The data of a run, opened: tokenizer, token files and the two sources of batches. A run whose
/// steps are given their batches has the tokenizer alone.
struct TrainingData {
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<std::shared_ptr<const TokenFile>> files;  ///< one, or those of a blend
  Blend blend;
  std::unique_ptr<BatchSource> train;       ///< null where batches are given
  std::unique_ptr<BatchSource> validation;  ///< null where nothing is held out

  int64_t given_sequences = 0;  ///< stretches that given batches have at most

  /// Stretches of any batch, at most.
  int64_t max_sequences() const;
  int64_t num_tokens() const;
  int64_t num_documents() const;
  /// Of all files, see TokenFile::fingerprint.
  uint64_t fingerprint() const;
  /// "a: 700 samples, 1.25 epochs; b: ..." for the steps before `step`.
  std::string describe_samples(int64_t step) const;
};

/// data.text and how it is read.
TextSource make_text_source(const DataSettings& data);

/// Makes the token file from text where that has not been done (calling `progress`, and `pause` as
/// of a TokenizeRequest), opens it, and sets model.vocab_size where it is 0. Throws UserError for
/// data that cannot be trained on.
TrainingData open_training_data(Settings& settings,
                                const std::function<void(const PrepareProgress&)>& progress = {},
                                const std::function<void()>& pause = {});

/// The same for a run whose steps are given their batches: any number of stretches where
/// data.split_documents, those of packed answers where an objective has these (AnswerBatches), else
/// one for each sequence.
TrainingData prepare_without_data(Settings& settings);

/// Throws UserError where a step does not take them, of which it takes from `fewest` to `most`.
void check_given_batches(const std::vector<Batch>& batches, int64_t fewest, int64_t most,
                         const BatchShape& shape);

/// Pads cu_seqlens with empty stretches up to the bound that a model was built for.
void pad_sequences(Batch& batch, int64_t max_sequences);

/// The vocabulary of the model: the configured one, which must hold the tokenizer's, or that
/// rounded up to a multiple of 64.
int64_t resolve_vocab_size(int64_t configured, const Tokenizer& tokenizer);

/// Of a step's micro-batch of that number among those of all ranks: the same in every layout.
RouterNoise router_noise(const Settings& settings, int64_t step, int64_t micro_batch);

/// Views of a batch for the model; without noise, for an evaluation.
MicroBatch view_batch(Batch& batch, const RouterNoise& noise = {});

}  // namespace tessera
