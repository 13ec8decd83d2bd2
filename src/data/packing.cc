#include "data/packing.h"

#include <algorithm>
#include <bit>

#include "core/error.h"

namespace tessera {
namespace {

std::vector<PackedPiece> cut_documents(std::span<const int64_t> offsets, const TokenRange& range,
                                       int64_t row_length) {
  std::vector<PackedPiece> pieces;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    const int64_t end = std::min(offsets[i + 1], range.end);
    for (int64_t begin = std::max(offsets[i], range.begin); begin < end; begin += row_length) {
      const int64_t length = std::min(row_length, end - begin);
      pieces.push_back({begin, static_cast<int32_t>(length), begin + length == end});
    }
  }
  return pieces;
}

/// Rows by the room that is left in them.
class RowsByRoom {
 public:
  explicit RowsByRoom(int64_t row_length)
      : rows_(row_length + 1), filled_(rows_.size() / 64 + 1, 0) {}

  void add(int64_t room, int64_t row) {
    rows_[room].push_back(row);
    filled_[room / 64] |= uint64_t{1} << (room % 64);
  }
  /// The least room of at least `length` that some row has, or -1.
  int64_t find(int64_t length) const {
    size_t word = length / 64;
    uint64_t bits = filled_[word] >> (length % 64) << (length % 64);
    while (bits == 0 && ++word < filled_.size()) bits = filled_[word];
    return bits == 0 ? -1 : static_cast<int64_t>(word) * 64 + std::countr_zero(bits);
  }
  int64_t take(int64_t room) {
    auto& rows = rows_[room];
    const int64_t row = rows.back();
    rows.pop_back();
    if (rows.empty()) filled_[room / 64] &= ~(uint64_t{1} << (room % 64));
    return row;
  }

 private:
  std::vector<std::vector<int64_t>> rows_;  // by room
  std::vector<uint64_t> filled_;            // a bit for each room that some row has
};

/// The row of each piece; pieces are ordered by falling length. Gives the number of rows.
int64_t assign_rows(const std::vector<PackedPiece>& pieces, int64_t row_length,
                    std::vector<int64_t>& row_of) {
  RowsByRoom open(row_length);
  int64_t num_rows = 0;
  for (const PackedPiece& piece : pieces) {
    const int64_t found = open.find(piece.length);
    const int64_t row = found < 0 ? num_rows++ : open.take(found);
    const int64_t room = (found < 0 ? row_length : found) - piece.length;
    if (room > 0) open.add(room, row);
    row_of.push_back(row);
  }
  return num_rows;
}

}  // namespace

std::span<const PackedPiece> PackedRows::row(int64_t row_idx) const {
  const size_t first = row_offsets[row_idx];
  const size_t last = row_offsets[row_idx + 1];
  return std::span(pieces).subspan(first, last - first);
}

PackedRows pack_documents(std::span<const int64_t> document_offsets, const TokenRange& range,
                          int64_t row_length) {
  std::vector<PackedPiece> pieces = cut_documents(document_offsets, range, row_length);
  std::ranges::stable_sort(pieces, std::greater<>(), &PackedPiece::length);
  std::vector<int64_t> row_of;
  row_of.reserve(pieces.size());
  const int64_t num_rows = assign_rows(pieces, row_length, row_of);
  // A counting sort by row.
  PackedRows rows;
  rows.row_offsets.assign(num_rows + 1, 0);
  for (const int64_t row : row_of) ++rows.row_offsets[row + 1];
  for (size_t i = 1; i < rows.row_offsets.size(); ++i) {
    rows.row_offsets[i] += rows.row_offsets[i - 1];
  }
  std::vector<int64_t> next(rows.row_offsets.begin(), rows.row_offsets.end() - 1);
  rows.pieces.resize(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    rows.pieces[next[row_of[i]]++] = pieces[i];
  }
  return rows;
}

}  // namespace tessera
