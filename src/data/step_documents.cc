#include "data/step_documents.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {
namespace {

/// One row of a step as the source fills it.
struct WholeRow {
  int64_t row = -1;
  std::vector<int32_t> tokens, labels, positions;

  explicit WholeRow(int64_t length) : tokens(length), labels(length), positions(length) {}
  RowView view() { return {tokens, labels, positions}; }
};

/// Fills a micro-batch from its begin.
class BatchWriter {
 public:
  BatchWriter(DocumentBatch& to, const DocumentShape& shape) : to_(to), shape_(shape) {
    Batch& batch = to_.batch;
    batch.tokens.assign(shape.num_tokens, 0);
    batch.labels.assign(shape.num_tokens, kNoLabel);
    batch.positions.assign(shape.num_tokens, 0);
    batch.cu_seqlens.assign(1, 0);
    batch.num_valid = 0;
    to_.segments.assign(shape.num_tokens, -1);
  }

  void add(const WholeRow& row, const IndexRange& range) {
    Batch& batch = to_.batch;
    const int64_t padded = (range.count + shape_.unit - 1) / shape_.unit * shape_.unit;
    ensure(at_ + padded <= shape_.num_tokens, "documents of more than {} tokens",
           shape_.num_tokens);
    const auto copy = [&](const std::vector<int32_t>& from, std::vector<int32_t>& to) {
      std::copy_n(from.begin() + range.begin, range.count, to.begin() + at_);
    };
    copy(row.tokens, batch.tokens);
    copy(row.labels, batch.labels);
    copy(row.positions, batch.positions);
    const auto labels = batch.labels.begin() + at_;
    batch.num_valid += range.count - std::count(labels, labels + range.count, kNoLabel);
    std::fill_n(to_.segments.begin() + at_, range.count,
                static_cast<int32_t>(batch.cu_seqlens.size() - 1));
    end_sequence(at_ + padded);
  }

  /// With sequences of about the same size.
  void fill_rest() {
    const int64_t units = (shape_.num_tokens - at_) / shape_.unit;
    const int64_t room = shape_.max_sequences + 1 - std::ssize(to_.batch.cu_seqlens);
    ensure(units == 0 || room > 0, "more than {} documents in a micro-batch",
           shape_.max_sequences - 1);
    const int64_t count = std::min({units, room, kFillingSequences});
    const int64_t begin = at_;
    for (int64_t i = 1; i <= count; ++i) end_sequence(begin + units * i / count * shape_.unit);
    to_.batch.cu_seqlens.resize(shape_.max_sequences + 1, static_cast<int32_t>(shape_.num_tokens));
  }

 private:
  void end_sequence(int64_t end) {
    at_ = end;
    to_.batch.cu_seqlens.push_back(static_cast<int32_t>(end));
  }

  DocumentBatch& to_;
  DocumentShape shape_;
  int64_t at_ = 0;
};

}  // namespace

StepDocuments::StepDocuments(const BatchSource& source, int64_t step)
    : source_(source), step_(step) {
  for (int64_t row = 0; row < source.rows_per_step(); ++row) {
    int64_t begin = 0;
    for (const int32_t end : source.list_documents(step, row)) {
      places_.push_back({row, begin});
      lengths_.push_back(end - begin);
      begin = end;
    }
  }
}

DocumentBatch StepDocuments::pack(std::span<const int32_t> documents,
                                  const DocumentShape& shape) const {
  DocumentBatch result;
  BatchWriter writer(result, shape);
  WholeRow row(source_.row_length());
  for (const int32_t document : documents) {
    const Place& place = places_.at(document);
    if (row.row != place.row) source_.fetch_row(step_, place.row, row.view());
    row.row = place.row;
    writer.add(row, {place.begin, lengths_[document]});
  }
  writer.fill_rest();
  return result;
}

}  // namespace tessera
