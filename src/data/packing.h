#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/token_file.h"

namespace tessera {

/// Tokens of one document that stand together in a row.
struct PackedPiece {
  int64_t begin = 0;  ///< in the file's stream
  int32_t length = 0;
  bool ends_document = false;  ///< no token of the document follows in the range
  bool operator==(const PackedPiece&) const = default;
};

/// Documents laid out in rows of a fixed length.
struct PackedRows {
  std::vector<PackedPiece> pieces;   ///< row after row
  std::vector<int64_t> row_offsets;  ///< [rows + 1] the first piece of each row
  int64_t num_rows() const { return static_cast<int64_t>(row_offsets.size()) - 1; }
  std::span<const PackedPiece> row(int64_t row_idx) const;
};

/// Best-fit decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", 2024):
/// documents longer than a row are cut into full rows and a rest; then, longest first, each goes
/// into the row with the least room that still holds it, or else into a new one. Every token of
/// `range` is in exactly one row, and a document that fits a row is not cut. `document_offsets` as
/// in TokenFile. Takes 16 bytes a document, and about three times as much while packing.
PackedRows pack_documents(std::span<const int64_t> document_offsets, const TokenRange& range,
                          int64_t row_length);

}  // namespace tessera
