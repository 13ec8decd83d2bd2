#include "data/row_source.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace tessera {
namespace {

/// What fills the end of a row that documents do not fill. Any id will do: nothing attends to it
/// and it has no label.
constexpr int32_t kPaddingToken = 0;

/// Takes the labels away that carry no loss; labels[i] is token first + i of the file.
void silence(const TokenFile& file, int64_t first, std::span<int32_t> labels) {
  const auto ranges = file.silent_ranges();
  const int64_t end = first + static_cast<int64_t>(labels.size());
  for (auto at = std::ranges::upper_bound(ranges, first, {}, &TokenRange::end);
       at != ranges.end() && at->begin < end; ++at) {
    const int64_t from = std::max(at->begin, first) - first;
    const int64_t to = std::min(at->end, end) - first;
    std::fill(labels.begin() + from, labels.begin() + to, kNoLabel);
  }
}

/// Sets tokens and labels to the file's from `begin` on; the last label, behind which the caller's
/// stretch of text may end, to kNoLabel unless `has_next`.
void place_tokens(const TokenFile& file, int64_t begin, bool has_next, std::span<int32_t> tokens,
                  std::span<int32_t> labels) {
  file.read(begin, tokens);
  std::copy(tokens.begin() + 1, tokens.end(), labels.begin());
  const auto length = static_cast<int64_t>(tokens.size());
  if (has_next) file.read(begin + length, labels.last(1));
  silence(file, begin + 1, labels.first(labels.size() - (has_next ? 0 : 1)));
  if (!has_next) labels.back() = kNoLabel;
}

/// Ends the stretch that begins at `start`, counting its positions.
void end_stretch(int64_t start, int64_t end, const RowView& row, std::vector<int32_t>& ends) {
  std::iota(row.positions.begin() + start, row.positions.begin() + end, 0);
  ends.push_back(static_cast<int32_t>(end));
}

/// The most stretches that a window of `length` tokens can be cut into by the borders of documents.
int64_t most_stretches(std::span<const int64_t> offsets, int64_t length) {
  std::vector<int64_t> borders(offsets.begin() + 1, offsets.end());
  std::erase(borders, 0);
  std::erase(borders, offsets.back());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  // Borders b with begin < b < begin + length cut the window: a run of them spans at most length
  // - 2.
  int64_t most = 1;
  for (size_t first = 0, last = 0; last < borders.size(); ++last) {
    while (borders[last] - borders[first] > length - 2 && first < last) ++first;
    if (length >= 2) most = std::max(most, static_cast<int64_t>(last - first) + 2);
  }
  return most;
}

/// Windows of S + 1 tokens, each beginning at the last token of the one before it.
class StreamRows final : public RowSource {
 public:
  StreamRows(const TokenFile& file, const TokenRange& range, int64_t row_length,
             bool split_documents)
      : file_(file),
        range_(range),
        row_length_(row_length),
        num_rows_(std::max<int64_t>(range.num_tokens() - 1, 0) / row_length),
        split_documents_(split_documents) {
    if (split_documents) max_stretches_ = most_stretches(file.document_offsets(), row_length);
  }

  int64_t num_rows() const override { return num_rows_; }
  int64_t max_stretches() const override { return max_stretches_; }
  int64_t max_shift() const override { return range_.num_tokens() - 1 - num_rows_ * row_length_; }

  void fill(int64_t row_idx, int64_t shift, const RowView& row,
            std::vector<int32_t>& ends) const override {
    const int64_t begin = range_.begin + shift + row_idx * row_length_;
    place_tokens(file_, begin, true, row.tokens, row.labels);
    int64_t start = 0;
    for (const int64_t border : borders_in(begin)) {
      row.labels[border - 1] = kNoLabel;
      end_stretch(start, border, row, ends);
      start = border;
    }
    if (start < row_length_) end_stretch(start, row_length_, row, ends);
  }

  std::vector<int32_t> list_documents(int64_t row_idx, int64_t shift) const override {
    const std::vector<int64_t> borders = borders_in(range_.begin + shift + row_idx * row_length_);
    std::vector<int32_t> ends(borders.begin(), borders.end());
    if (ends.empty() || ends.back() < row_length_)
      ends.push_back(static_cast<int32_t>(row_length_));
    return ends;
  }

 private:
  /// The borders of documents behind tokens of the window that begins there, as offsets in it.
  std::vector<int64_t> borders_in(int64_t begin) const {
    std::vector<int64_t> borders;
    if (!split_documents_) return borders;
    const auto offsets = file_.document_offsets();
    for (auto at = std::ranges::upper_bound(offsets, begin);
         at != offsets.end() && *at <= begin + row_length_; ++at) {
      if (borders.empty() || borders.back() != *at - begin) borders.push_back(*at - begin);
    }
    return borders;
  }

  const TokenFile& file_;
  TokenRange range_;
  int64_t row_length_;
  int64_t num_rows_;
  int64_t max_stretches_ = 1;
  bool split_documents_;
};

/// Whole documents side by side; what is left of a row is padding without labels.
class PackedDocuments final : public RowSource {
 public:
  PackedDocuments(const TokenFile& file, const TokenRange& range, int64_t row_length,
                  bool split_documents)
      : file_(file),
        rows_(pack_documents(file.document_offsets(), range, row_length)),
        split_documents_(split_documents) {
    if (!split_documents) return;
    for (int64_t i = 0; i < rows_.num_rows(); ++i) {
      const auto pieces = rows_.row(i);
      int64_t filled = 0;
      for (const PackedPiece& piece : pieces) filled += piece.length;
      const int64_t padding = filled < row_length ? 1 : 0;
      max_stretches_ = std::max(max_stretches_, static_cast<int64_t>(pieces.size()) + padding);
    }
  }

  int64_t num_rows() const override { return rows_.num_rows(); }
  int64_t max_stretches() const override { return max_stretches_; }

  void fill(int64_t row_idx, int64_t, const RowView& row,
            std::vector<int32_t>& ends) const override {
    const size_t row_length = row.tokens.size();
    size_t start = 0;
    for (const PackedPiece& piece : rows_.row(row_idx)) {
      const size_t length = piece.length;
      place_tokens(file_, piece.begin, !piece.ends_document, row.tokens.subspan(start, length),
                   row.labels.subspan(start, length));
      if (split_documents_) {
        end_stretch(static_cast<int64_t>(start), static_cast<int64_t>(start + length), row, ends);
      } else if (start > 0) {
        join(row, start, piece.begin);
      }
      start += length;
    }
    std::fill(row.tokens.begin() + start, row.tokens.end(), kPaddingToken);
    std::fill(row.labels.begin() + start, row.labels.end(), kNoLabel);
    const auto from = static_cast<int64_t>(split_documents_ ? start : 0);
    if (std::cmp_less(from, row_length)) {
      end_stretch(from, static_cast<int64_t>(row_length), row, ends);
    }
  }

  std::vector<int32_t> list_documents(int64_t row_idx, int64_t) const override {
    std::vector<int32_t> ends;
    int32_t filled = 0;
    for (const PackedPiece& piece : rows_.row(row_idx)) {
      filled += piece.length;
      if (split_documents_ || ends.empty()) {
        ends.push_back(filled);
      } else {
        ends.back() = filled;
      }
    }
    return ends;
  }

 private:
  /// Across documents, a document's last token is followed by the next one's first.
  void join(const RowView& row, size_t start, int64_t next_token) const {
    int32_t& label = row.labels[start - 1];
    label = row.tokens[start];
    silence(file_, next_token, {&label, 1});
  }

  const TokenFile& file_;
  PackedRows rows_;
  int64_t max_stretches_ = 1;
  bool split_documents_;
};

}  // namespace

std::unique_ptr<RowSource> make_rows(const TokenFile& file, const TokenRange& range,
                                     int64_t row_length, Packing packing, bool split_documents) {
  if (packing == Packing::kStream) {
    return std::make_unique<StreamRows>(file, range, row_length, split_documents);
  }
  return std::make_unique<PackedDocuments>(file, range, row_length, split_documents);
}

}  // namespace tessera
