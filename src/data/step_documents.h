#pragma once

#include <vector>

#include "core/slice.h"
#include "data/sampler.h"

namespace tessera {

/// Sequences at most that what is left of a micro-batch is cut into: attention within one long one
/// would be work for nothing.
inline constexpr int64_t kFillingSequences = 8;

/// What a micro-batch of chosen documents is to look like.
struct DocumentShape {
  int64_t num_tokens = 0;     ///< of the micro-batch, a multiple of `unit`
  int64_t unit = 1;           ///< each document takes a multiple of so many tokens
  int64_t max_sequences = 1;  ///< bounds that cu_seqlens has room for, less one
};

/// Documents side by side, each followed by what fills its last unit, and behind all of them
/// sequences of nothing but tokens that fill the micro-batch: these have no labels.
struct DocumentBatch {
  Batch batch;
  std::vector<int32_t> segments;  ///< [T] each token's sequence, -1 for one that fills
};

/// The documents of the rows of a training step, or the parts of documents that the rows have,
/// without what pads rows: numbered row by row, whichever micro-batches they go to. Where documents
/// are kept apart, a step's loss does not depend on that. The source must outlive it.
class StepDocuments {
 public:
  StepDocuments(const BatchSource& source, int64_t step);

  /// Tokens of each document.
  const std::vector<int64_t>& lengths() const { return lengths_; }
  /// A micro-batch of these documents, in rising order. REQUIRES that they fit.
  DocumentBatch pack(std::span<const int32_t> documents, const DocumentShape& shape) const;

 private:
  struct Place {
    int64_t row = 0;  ///< of the step
    int64_t begin = 0;
  };

  const BatchSource& source_;
  int64_t step_;
  std::vector<int64_t> lengths_;
  std::vector<Place> places_;
};

}  // namespace tessera
