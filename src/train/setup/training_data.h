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

/// The data of a run, opened: tokenizer, token files and the two sources of batches.
struct TrainingData {
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<std::shared_ptr<const TokenFile>> files;  ///< one, or those of a blend
  Blend blend;
  std::unique_ptr<BatchSource> train;
  std::unique_ptr<BatchSource> validation;  ///< null where nothing is held out

  int64_t num_tokens() const;
  int64_t num_documents() const;
  /// Of all files, see TokenFile::fingerprint.
  uint64_t fingerprint() const;
  /// "a: 700 samples, 1.25 epochs; b: ..." for the steps before `step`.
  std::string describe_samples(int64_t step) const;
};

/// data.text and how it is read.
TextSource make_text_source(const DataSettings& data);

/// Makes the token file from text where that has not been done (calling `progress`), opens it, and
/// sets model.vocab_size where it is 0. Throws UserError for data that cannot be trained on.
TrainingData open_training_data(Settings& settings,
                                const std::function<void(const PrepareProgress&)>& progress = {});

/// The vocabulary of the model: the configured one, which must hold the tokenizer's, or that
/// rounded up to a multiple of 64.
int64_t resolve_vocab_size(int64_t configured, const Tokenizer& tokenizer);

/// Views of a batch for the model.
MicroBatch view_batch(Batch& batch);

}  // namespace tessera
