#include "core/pages/elastic_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>

namespace tessera {
namespace {

using Kind = ElasticMemory::Kind;

TEST(ElasticMemory, KeepsWhatIsThereWhileItGrows) {
  Device& host = host_device();
  const int64_t page = host.page_bytes();
  ElasticMemory memory(Kind::kByPage, 5 * page + 10, "a test", host);
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
  ElasticMemory memory(Kind::kWhole, 100, "a test", host_device());
  EXPECT_FALSE(memory.is_by_page());
  EXPECT_EQ(memory.committed_bytes(), 100);
  memory.commit(0, 100);
  memory.data()[99] = std::byte{1};
  EXPECT_EQ(ElasticMemory(Kind::kByPage, 0, "nothing", host_device()).data(), nullptr);
}

TEST(ElasticMemoryDeathTest, WhatWasNotAskedForCannotBeTouched) {
  const int64_t page = host_device().page_bytes();
  ElasticMemory memory(Kind::kByPage, 4 * page, "a test", host_device());
  memory.commit(0, page);
  EXPECT_DEATH(memory.data()[page] = std::byte{1}, "");
}

/// Again and again, at the same addresses.
TEST(ElasticMemory, WhatWasLeftIsTakenBackPieceByPiece) {
  Device& host = host_device();
  const int64_t page = host.page_bytes();
  ElasticMemory memory(Kind::kByPage, 40 * page, "a test", host);
  memory.commit(0, 2 * page);
  memory.keep();
  for (int round = 0; round < 3; ++round) {
    memory.commit(0, 20 * page);
    std::memset(memory.data(), round + 1, 20 * page);
    memory.leave(0, 40 * page, round);
    EXPECT_EQ(memory.idle_bytes(), 18 * page);
    for (const ElasticMemory::Piece& piece : memory.idle()) memory.take_back(piece);
    EXPECT_EQ(memory.committed_bytes(), 2 * page);
    EXPECT_EQ(memory.data()[2 * page - 1], std::byte(round + 1)) << "what was kept stays";
  }
}

TEST(ElasticMemoryDeathTest, WhatWasTakenBackCannotBeTouched) {
  const int64_t page = host_device().page_bytes();
  ElasticMemory memory(Kind::kByPage, 4 * page, "a test", host_device());
  memory.keep();
  memory.commit(0, 2 * page);
  memory.leave(0, 2 * page, 1);
  memory.take_back(memory.idle().front());
  EXPECT_DEATH(memory.data()[page] = std::byte{1}, "");
}

}  // namespace
}  // namespace tessera
