#include "core/process/processors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Processors, AreThoseOfASyntheticMachine) {
  const auto nodes = parse_numa_nodes("numa:2 core:3 pu:2");
  ASSERT_EQ(nodes.size(), 2);
  EXPECT_EQ(nodes[0].number, 0);
  EXPECT_EQ(nodes[1].number, 1);
  EXPECT_THAT(nodes[0].cores, ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5)));
  EXPECT_THAT(nodes[1].processors(), ElementsAre(6, 7, 8, 9, 10, 11));
  EXPECT_THAT([] { parse_numa_nodes("two nodes"); },
              ThrowsMessage<UserError>(HasSubstr("two nodes")));
}

TEST(Processors, AreFoundOnThisMachine) {
  const auto nodes = find_numa_nodes();
  ASSERT_FALSE(nodes.empty());
  std::vector<int> all;
  for (const NumaNode& node : nodes) {
    const auto own = node.processors();
    all.insert(all.end(), own.begin(), own.end());
  }
  EXPECT_FALSE(all.empty());
  for (const int processor : bound_processors()) EXPECT_THAT(all, ::testing::Contains(processor));
  EXPECT_EQ(numa_node_of("no address"), -1);
}

/// Threads that are there, and those that come.
TEST(Processors, AreThoseThatAProcessIsBoundTo) {
  const auto before = bound_processors();
  ASSERT_FALSE(before.empty());
  const std::vector<int> one = {before.back()};
  if (!bind_process(one)) GTEST_SKIP() << "the system allows no binding";
  EXPECT_EQ(bound_processors(), one);
  std::vector<int> of_thread;
  std::thread([&] { of_thread = bound_processors(); }).join();
  EXPECT_EQ(of_thread, one);
  EXPECT_TRUE(bind_process(before));
  EXPECT_EQ(bound_processors(), before);
}

TEST(Processors, AreWrittenAsRanges) {
  EXPECT_EQ(format_ranges({}), "");
  EXPECT_EQ(format_ranges({4}), "4");
  EXPECT_EQ(format_ranges({0, 1, 2, 5, 8, 9}), "0-2,5,8-9");
}

}  // namespace
}  // namespace tessera
