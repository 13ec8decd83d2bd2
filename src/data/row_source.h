#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/packing.h"
#include "data/token_file.h"

namespace tessera {

/// Marks a position that has no next token to learn.
inline constexpr int32_t kNoLabel = -100;

/// How documents become rows of a batch.
enum class Packing {
  kStream,   ///< all documents one after the other, cut every S tokens
  kBestFit,  ///< whole documents side by side where they fit, see pack_documents
};

/// One row of a batch, S tokens; see Batch.
struct RowView {
  std::span<int32_t> tokens;
  std::span<int32_t> labels;
  std::span<int32_t> positions;
};

/// The rows that a range of a token file gives. Immutable.
class RowSource {
 public:
  RowSource() = default;
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;
  virtual ~RowSource() = default;

  /// Rows that hold the range once.
  virtual int64_t num_rows() const = 0;
  /// The most stretches that attention is cut into in one row.
  virtual int64_t max_stretches() const = 0;
  /// The rows may begin up to this many tokens later, and hold the range except for them.
  virtual int64_t max_shift() const { return 0; }
  /// Fills a row, and appends the end of each of its stretches to `ends`.
  virtual void fill(int64_t row_idx, int64_t shift, const RowView& row,
                    std::vector<int32_t>& ends) const = 0;
  /// The ends of a row's stretches, without one that pads the row.
  virtual std::vector<int32_t> list_documents(int64_t row_idx, int64_t shift) const = 0;
};

/// Rows of `row_length` tokens. `split_documents`: attention, positions and labels stay within a
/// document. A label whose token carries no loss is kNoLabel either way. The file must outlive the
/// rows. There may be none at all.
std::unique_ptr<RowSource> make_rows(const TokenFile& file, const TokenRange& range,
                                     int64_t row_length, Packing packing, bool split_documents);

}  // namespace tessera
