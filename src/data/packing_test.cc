#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/random.h"

namespace tessera {
namespace {

struct Documents {
  std::vector<int64_t> offsets = {0};
  int64_t num_tokens() const { return offsets.back(); }
};

Documents random_documents(Random& random) {
  Documents documents;
  const uint64_t longest = 1 + random.next_below(60);
  for (uint64_t i = random.next_below(80); i > 0; --i) {
    documents.offsets.push_back(documents.num_tokens() +
                                static_cast<int64_t>(random.next_below(longest)));
  }
  return documents;
}

/// Every token of the range in exactly one row, rows not overfull, pieces within documents.
void check_cover(const PackedRows& rows, const Documents& documents, const TokenRange& range,
                 int64_t row_length) {
  std::vector<int> seen(documents.num_tokens(), 0);
  for (int64_t i = 0; i < rows.num_rows(); ++i) {
    int64_t filled = 0;
    ASSERT_FALSE(rows.row(i).empty());
    for (const PackedPiece& piece : rows.row(i)) {
      ASSERT_GT(piece.length, 0);
      filled += piece.length;
      const auto after = std::ranges::upper_bound(documents.offsets, piece.begin);
      const int64_t document_end = std::min(*after, range.end);
      const int64_t document_begin = std::max(*std::prev(after), range.begin);
      ASSERT_LE(piece.begin + piece.length, document_end);
      ASSERT_EQ(piece.ends_document, piece.begin + piece.length == document_end);
      if (document_end - document_begin <= row_length) {
        ASSERT_EQ(piece.length, document_end - document_begin) << "cut without need";
      }
      for (int64_t at = piece.begin; at < piece.begin + piece.length; ++at) {
        ++seen[at];
      }
    }
    ASSERT_LE(filled, row_length);
  }
  for (int64_t at = 0; at < documents.num_tokens(); ++at) {
    ASSERT_EQ(seen[at], at >= range.begin && at < range.end ? 1 : 0) << at;
  }
}

TEST(PackingTest, EveryDocumentIsInExactlyOneRow) {
  Random random(5, 0);
  for (int round = 0; round < 300; ++round) {
    const Documents documents = random_documents(random);
    const auto bound = static_cast<uint64_t>(documents.num_tokens()) + 1;
    TokenRange range = {static_cast<int64_t>(random.next_below(bound)),
                        static_cast<int64_t>(random.next_below(bound))};
    if (range.begin > range.end) std::swap(range.begin, range.end);
    if (random.next_below(2) == 0) range = {0, documents.num_tokens()};
    const auto row_length =
        static_cast<int64_t>(1 + random.next_below(random.next_below(2) ? 9 : 200));
    const PackedRows rows = pack_documents(documents.offsets, range, row_length);
    check_cover(rows, documents, range, row_length);
    if (::testing::Test::HasFatalFailure()) return;
    const PackedRows again = pack_documents(documents.offsets, range, row_length);
    EXPECT_EQ(rows.pieces, again.pieces);
    EXPECT_EQ(rows.row_offsets, again.row_offsets);
  }
}

TEST(PackingTest, LongestFirstIntoTheLeastRoom) {
  // Lengths 4 7 3 6 2 5 in rows of 10: 7+3, 6+4, 5+2.
  const std::vector<int64_t> offsets = {0, 4, 11, 14, 20, 22, 27};
  const PackedRows rows = pack_documents(offsets, {0, 27}, 10);
  ASSERT_EQ(rows.num_rows(), 3);
  EXPECT_EQ(
      rows.pieces,
      (std::vector<PackedPiece>{
          {4, 7, true}, {11, 3, true}, {14, 6, true}, {0, 4, true}, {22, 5, true}, {20, 2, true}}));
}

/// Best-fit decreasing never has two rows that would fit into one.
TEST(PackingTest, NoTwoRowsFitIntoOne) {
  Random random(6, 0);
  for (int round = 0; round < 50; ++round) {
    const Documents documents = random_documents(random);
    const PackedRows rows = pack_documents(documents.offsets, {0, documents.num_tokens()}, 64);
    std::vector<int64_t> filled;
    for (int64_t i = 0; i < rows.num_rows(); ++i) {
      int64_t sum = 0;
      for (const PackedPiece& piece : rows.row(i)) sum += piece.length;
      filled.push_back(sum);
    }
    std::ranges::sort(filled);
    ASSERT_TRUE(filled.size() < 2 || filled[0] + filled[1] > 64);
  }
}

TEST(PackingTest, NothingGivesNoRows) {
  EXPECT_EQ(pack_documents(std::vector<int64_t>{0}, {0, 0}, 8).num_rows(), 0);
  EXPECT_EQ(pack_documents(std::vector<int64_t>{0, 0, 5, 5}, {5, 5}, 8).num_rows(), 0);
}

}  // namespace
}  // namespace tessera
