#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/blend.h"
#include "data/row_source.h"
#include "data/token_file.h"

namespace tessera {

/// One micro-batch: T = B * S tokens, the B rows one after the other. Attention runs within the
/// stretches [cu_seqlens[i], cu_seqlens[i + 1]); positions count from 0 in each.
struct Batch {
  std::vector<int32_t> tokens;     ///< [T]
  std::vector<int32_t> labels;     ///< [T] the next token, or kNoLabel
  std::vector<int32_t> positions;  ///< [T]
  std::vector<int32_t>
      cu_seqlens;         ///< [max_sequences + 1] ascending from 0; padded with T (empty stretches)
  int64_t num_valid = 0;  ///< labels that count
  /// For objectives beyond the next token (train.objective); empty: none given.
  std::vector<float> weights = {};    ///< [T] factors of the tokens' losses
  std::vector<int32_t> experts = {};  ///< [MoE layers, T, K] choices of routers; -1: their own
};

/// Which part of the documents a BatchSource reads: training data in random order, or held-out data
/// or the whole file in its own order and once.
enum class Split { kTrain, kValidation, kAll };

struct SamplerConfig {
  int64_t sequence_length = 0;    ///< S
  int64_t micro_batch_size = 0;   ///< B rows a micro-batch
  int64_t num_micro_batches = 1;  ///< micro-batches a step
  uint64_t seed = 0;
  double validation_fraction = 0;  ///< share of the tokens, cut at the border of a document
  /// false: a row is one stretch, though it may cross documents. true: attention, positions and
  /// labels stay within a document.
  bool split_documents = false;
  Packing packing = Packing::kStream;
};

/// The two splits of a file. Validation is the last `validation_fraction` of the tokens, its begin
/// moved to the nearest border of documents when that changes its size by less than half; else (a
/// few large documents) the cut is inside a document. The two never overlap. Throws UserError when
/// a split would be empty.
TokenRange split_range(const TokenFile& file, double validation_fraction, Split split);

/// Micro-batches as a pure function of the configuration and (step, micro_batch): no state, so a
/// run is resumed by its step number alone.
///
/// Each dataset's split gives W rows (see RowSource). Sample k of the run is drawn from the dataset
/// that the blend says, there as sample i: row permutation_epoch(i mod W) of the split, epoch =
/// i / W. Each epoch visits each row once, in an order of its own that no memory holds (see
/// Permutation); rows of a stream are shifted in each epoch by a random number of the tokens that
/// they leave over. Validation (or all of a file) visits the rows of all datasets only once, one
/// dataset in its own order, several mixed in proportion to their rows: rows past the last have no
/// labels, so that one pass counts each row exactly once.
class BatchSource {
 public:
  /// One dataset. Throws UserError when the split is shorter than one row, with the numbers of
  /// tokens.
  BatchSource(std::shared_ptr<const TokenFile> file, const SamplerConfig& config, Split split);
  /// A blend of several; it matters for training alone.
  BatchSource(std::vector<std::shared_ptr<const TokenFile>> files, Blend blend,
              const SamplerConfig& config, Split split);

  /// Fills `batch`, reusing its memory. step >= 0; 0 <= micro_batch < num_micro_batches.
  void fetch(int64_t step, int64_t micro_batch, Batch& batch) const;

  /// Of training, rows one by one, numbered through a step's micro-batches.
  int64_t rows_per_step() const { return samples_per_step(); }
  int64_t row_length() const { return config_.sequence_length; }
  void fetch_row(int64_t step, int64_t row, const RowView& view) const;
  /// The ends of its stretches, without one that pads it.
  std::vector<int32_t> list_documents(int64_t step, int64_t row) const;

  /// Rows that hold every dataset's split once.
  int64_t num_windows() const { return num_rows_; }
  /// Stretches that cu_seqlens has room for: B, or where documents are kept apart B times the most
  /// documents that any row touches.
  int64_t max_sequences() const;
  /// The number of steps that visit this many rows, rounded up.
  int64_t steps_per_epoch() const;
  int64_t num_datasets() const { return static_cast<int64_t>(datasets_.size()); }
  const TokenRange& range(int64_t dataset = 0) const;
  /// Tokens of all datasets' splits.
  int64_t num_tokens() const;
  /// Training: the samples of each dataset in the steps before `step`.
  std::vector<int64_t> count_samples(int64_t step) const;
  /// Training: the same in times that each of a dataset's rows has been seen.
  std::vector<double> count_epochs(int64_t step) const;

 private:
  struct Dataset {
    std::shared_ptr<const TokenFile> file;
    TokenRange range;
    std::unique_ptr<RowSource> rows;
  };

  void add_dataset(std::shared_ptr<const TokenFile> file);
  int64_t samples_per_step() const { return config_.micro_batch_size * config_.num_micro_batches; }
  /// A row of a dataset, as an epoch shifts it.
  struct TrainingRow {
    const RowSource& rows;
    int64_t row_idx;
    int64_t shift;
  };
  TrainingRow find_training_row(int64_t sample) const;
  void fill_training_row(int64_t sample, const RowView& row, std::vector<int32_t>& ends) const;
  void fill_row_in_order(int64_t sample, const RowView& row, std::vector<int32_t>& ends) const;

  SamplerConfig config_;
  Split split_;
  Blend blend_;
  std::vector<Dataset> datasets_;
  std::vector<int64_t> rows_before_ = {0};  // [datasets + 1] rows of the earlier datasets
  int64_t num_rows_ = 0;
};

}  // namespace tessera
