#include "core/pages/page_set.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

TEST(PageSet, CountsPagesOnce) {
  PageSet pages(1000, 100);
  const auto add = [&](int64_t begin, int64_t end) {
    pages.add(begin, end);
    return pages.num_bytes();
  };
  EXPECT_EQ(add(150, 150), 0);
  EXPECT_EQ(add(150, 151), 100);
  EXPECT_EQ(add(320, 480), 300);
  EXPECT_EQ(add(0, 1000), 1000);
  EXPECT_EQ(add(0, 1000), 1000);
}

TEST(PageSet, RefusesBytesThatAreNotThere) {
  PageSet pages(1000, 100);
  EXPECT_THROW(pages.add(900, 1001), InternalError);
  EXPECT_THROW(pages.add(-1, 5), InternalError);
  EXPECT_THROW(pages.add(5, 4), InternalError);
}

}  // namespace
}  // namespace tessera
