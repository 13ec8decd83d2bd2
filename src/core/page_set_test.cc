#include "core/page_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "core/elastic_memory.h"
#include "core/error.h"

namespace tessera {
namespace {

using Runs = std::vector<std::pair<int64_t, int64_t>>;

Runs add(PageSet& pages, int64_t begin, int64_t end) {
  Runs runs;
  pages.add(begin, end, [&](int64_t first, int64_t behind) { runs.emplace_back(first, behind); });
  return runs;
}

TEST(PageSet, TellsNewPagesOnce) {
  PageSet pages(1000, 100);
  EXPECT_EQ(add(pages, 150, 150), Runs());
  EXPECT_EQ(add(pages, 150, 151), (Runs{{100, 200}}));
  EXPECT_EQ(add(pages, 320, 480), (Runs{{300, 500}}));
  EXPECT_EQ(add(pages, 0, 1000), (Runs{{0, 100}, {200, 300}, {500, 1000}}));
  EXPECT_EQ(add(pages, 0, 1000), Runs());
  EXPECT_EQ(pages.num_bytes(), 1000);
}

TEST(PageSet, ARunThatIsRefusedIsNotAdded) {
  PageSet pages(1000, 100);
  pages.add(200, 300);
  int64_t calls = 0;
  const auto refuse_second = [&](int64_t, int64_t) {
    if (++calls == 2) throw UserError("no");
  };
  EXPECT_THROW(pages.add(0, 1000, refuse_second), UserError);
  EXPECT_EQ(pages.num_bytes(), 300);
  EXPECT_EQ(add(pages, 0, 1000), (Runs{{300, 1000}}));
}

TEST(PageSet, RefusesBytesThatAreNotThere) {
  PageSet pages(1000, 100);
  EXPECT_THROW(pages.add(900, 1001), InternalError);
  EXPECT_THROW(pages.add(-1, 5), InternalError);
  EXPECT_THROW(pages.add(5, 4), InternalError);
}

TEST(ElasticMemory, KeepsWhatIsThereWhileItGrows) {
  Device& host = host_device();
  const int64_t page = host.page_bytes();
  ElasticMemory memory(ElasticMemory::Kind::kByPage, 5 * page + 10, "a test", host);
  EXPECT_EQ(memory.committed_bytes(), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % page, 0U);
  memory.commit(page - 1, page + 1);
  EXPECT_EQ(memory.committed_bytes(), 2 * page);
  std::memset(memory.data(), 7, 2 * page);
  memory.commit(0, memory.num_bytes());
  EXPECT_EQ(memory.committed_bytes(), 6 * page);
  EXPECT_EQ(memory.data()[2 * page - 1], std::byte{7});
  memory.data()[5 * page + 9] = std::byte{8};
  const ElasticMemory moved = std::move(memory);
  EXPECT_EQ(moved.data()[5 * page + 9], std::byte{8});
  EXPECT_TRUE(moved.contains(moved.data() + 5 * page + 9));
  EXPECT_FALSE(moved.contains(moved.data() + 5 * page + 10));
}

TEST(ElasticMemory, IsWholeWhereItIsAskedFor) {
  ElasticMemory memory(ElasticMemory::Kind::kWhole, 100, "a test", host_device());
  EXPECT_FALSE(memory.is_by_page());
  EXPECT_EQ(memory.committed_bytes(), 100);
  memory.commit(0, 100);
  memory.data()[99] = std::byte{1};
  EXPECT_EQ(ElasticMemory(ElasticMemory::Kind::kByPage, 0, "nothing", host_device()).data(),
            nullptr);
}

TEST(ElasticMemoryDeathTest, WhatWasNotAskedForCannotBeTouched) {
  const int64_t page = host_device().page_bytes();
  ElasticMemory memory(ElasticMemory::Kind::kByPage, 4 * page, "a test", host_device());
  memory.commit(0, page);
  EXPECT_DEATH(memory.data()[page] = std::byte{1}, "");
}

}  // namespace
}  // namespace tessera
