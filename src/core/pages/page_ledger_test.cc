#include "core/pages/page_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"

namespace tessera {
namespace {

using Runs = std::vector<std::pair<int64_t, int64_t>>;
constexpr int64_t kMost = 4;

Runs runs_of(const std::vector<PageLedger::Piece>& pieces) {
  Runs runs;
  for (const PageLedger::Piece& piece : pieces) runs.emplace_back(piece.begin, piece.end);
  return runs;
}

/// As memory would come, with what came.
Runs take(PageLedger& pages, int64_t begin, int64_t end, int64_t most = kMost) {
  const auto missing = pages.need(begin, end, most);
  for (const PageLedger::Piece& piece : missing) pages.add(piece);
  return runs_of(missing);
}

TEST(PageLedger, TellsWhatIsMissingOnce) {
  PageLedger pages(1000, 100);
  EXPECT_EQ(take(pages, 150, 150), Runs());
  EXPECT_EQ(take(pages, 150, 151), (Runs{{100, 200}}));
  EXPECT_EQ(take(pages, 320, 480), (Runs{{300, 400}, {400, 500}})) << "pieces end at page 4";
  EXPECT_EQ(take(pages, 0, 1000), (Runs{{0, 100}, {200, 300}, {500, 800}, {800, 1000}}));
  EXPECT_EQ(take(pages, 0, 1000), Runs());
  EXPECT_EQ(pages.num_bytes(), 1000);
  EXPECT_EQ(take(*std::make_unique<PageLedger>(1000, 100), 0, 1000, 1 << 30), (Runs{{0, 1000}}));
}

TEST(PageLedger, WhatIsMissingAndDoesNotComeIsMissingStill) {
  PageLedger pages(1000, 100);
  EXPECT_EQ(pages.need(0, 400, kMost).size(), 1);
  EXPECT_EQ(pages.num_bytes(), 0);
  EXPECT_EQ(take(pages, 0, 400), (Runs{{0, 400}}));
}

TEST(PageLedger, APieceIsIdleWhenAllOfItWasLeft) {
  PageLedger pages(1000, 100);
  take(pages, 0, 100);
  pages.keep();
  take(pages, 0, 800);
  EXPECT_TRUE(pages.idle().empty());
  pages.leave(0, 350, 1);
  EXPECT_TRUE(pages.idle().empty()) << "page 3 is not wholly within";
  EXPECT_EQ(pages.idle_bytes(), 200);
  pages.leave(300, 1000, 2);
  EXPECT_EQ(runs_of(pages.idle()), (Runs{{100, 400}, {400, 800}})) << "page 0 is kept";
  EXPECT_EQ(pages.idle().front().left_at, 2);
  EXPECT_EQ(take(pages, 120, 130), Runs());
  EXPECT_EQ(runs_of(pages.idle()), (Runs{{400, 800}}));
  pages.remove(pages.idle().front());
  EXPECT_EQ(pages.num_bytes(), 400);
  EXPECT_EQ(pages.idle_bytes(), 200);
  EXPECT_EQ(take(pages, 500, 600), (Runs{{500, 600}}));
}

TEST(PageLedger, RefusesWhatDoesNotFit) {
  PageLedger pages(1000, 100);
  EXPECT_THROW(pages.need(900, 1001, kMost), InternalError);
  EXPECT_THROW(pages.need(-1, 5, kMost), InternalError);
  EXPECT_THROW(pages.leave(5, 4, 0), InternalError);
  take(pages, 0, 400);
  EXPECT_THROW(pages.add({100, 200}), InternalError);
  EXPECT_THROW(pages.remove({0, 400}), InternalError) << "it is needed";
  pages.leave(0, 1000, 1);
  EXPECT_THROW(pages.remove({0, 200}), InternalError) << "half a piece";
}

/// Against a table of pages: the same random requests.
TEST(PageLedger, AgreesWithATable) {
  std::mt19937 random(5);
  constexpr int64_t kPages = 37;
  PageLedger pages(kPages * 10 - 3, 10);
  enum { kNone, kKept, kNeeded, kIdle };
  std::vector<int> table(kPages, kNone);
  const auto count = [&](int state) { return std::ranges::count(table, state) * 10; };
  for (int64_t round = 0; round < 2000; ++round) {
    const int64_t a = static_cast<int64_t>(random() % (kPages * 10 - 2));
    const int64_t b = static_cast<int64_t>(random() % (kPages * 10 - 2));
    const int64_t begin = std::min(a, b);
    const int64_t end = std::max(a, b);
    const int64_t last = end == kPages * 10 - 3 ? kPages : end / 10;
    switch (random() % 3) {
      case 0:
        take(pages, begin, end);
        for (int64_t page = begin / 10; begin < end && page < (end + 9) / 10; ++page)
          table[page] = table[page] == kKept ? kKept : kNeeded;
        break;
      case 1:
        pages.leave(begin, end, round);
        for (int64_t page = (begin + 9) / 10; page < last; ++page)
          table[page] = table[page] == kNeeded ? kIdle : table[page];
        break;
      default:
        for (const PageLedger::Piece& piece : pages.idle()) {
          if (random() % 2 == 0) continue;
          pages.remove(piece);
          for (int64_t page = piece.begin / 10; page < piece.end / 10; ++page) {
            EXPECT_EQ(table[page], kIdle);
            table[page] = kNone;
          }
        }
    }
    if (round == 3) {
      pages.keep();
      for (int& state : table) state = state == kNone ? kNone : kKept;
    }
    ASSERT_EQ(pages.idle_bytes(), count(kIdle));
    ASSERT_EQ(pages.num_bytes(), kPages * 10 - count(kNone));
  }
}

}  // namespace
}  // namespace tessera
