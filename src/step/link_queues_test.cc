#include "step/link_queues.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tessera {
namespace {

TEST(LinkQueues, ExchangesOfAGroupFollowOneAnother) {
  LinkQueues links;
  const size_t queue = links.add_queue();
  const size_t first = links.start(queue, LinkKind::kNode, 1, 2);
  const size_t second = links.start(queue, LinkKind::kNode, 1.5, 4);
  EXPECT_DOUBLE_EQ(links.find(first).begin, 1);
  EXPECT_DOUBLE_EQ(links.find(first).end, 3);
  EXPECT_DOUBLE_EQ(links.find(second).came, 1.5);
  EXPECT_DOUBLE_EQ(links.find(second).begin, 3);
  EXPECT_DOUBLE_EQ(links.find(second).end, 7);
}

TEST(LinkQueues, GroupsShareTheLinkThatTheyPass) {
  LinkQueues links;
  const size_t gathered = links.start(links.add_queue(), LinkKind::kNetwork, 0, 4);
  EXPECT_DOUBLE_EQ(links.find(gathered).end, 4);
  // At 1 three seconds are left. Both go on at half of the speed until the second is over at 3.
  const size_t tokens = links.start(links.add_queue(), LinkKind::kNetwork, 1, 1);
  EXPECT_DOUBLE_EQ(links.find(tokens).end, 3);
  EXPECT_DOUBLE_EQ(links.find(gathered).end, 5);
}

TEST(LinkQueues, LinksOfANodeAndBetweenNodesAreDifferent) {
  LinkQueues links;
  const size_t network = links.start(links.add_queue(), LinkKind::kNetwork, 0, 4);
  const size_t node = links.start(links.add_queue(), LinkKind::kNode, 0, 3);
  const size_t own[] = {links.start(links.add_queue(), LinkKind::kOwn, 0, 2),
                        links.start(links.add_queue(), LinkKind::kOwn, 0, 2)};
  EXPECT_DOUBLE_EQ(links.find(network).end, 4);
  EXPECT_DOUBLE_EQ(links.find(node).end, 3);
  EXPECT_DOUBLE_EQ(links.find(own[0]).end, 2);
  EXPECT_DOUBLE_EQ(links.find(own[1]).end, 2);
}

TEST(LinkQueues, WhatIsBehindOthersOfItsGroupTakesNoPartYet) {
  LinkQueues links;
  const size_t queue = links.add_queue();
  links.start(queue, LinkKind::kNode, 0, 2);
  const size_t behind = links.start(queue, LinkKind::kNode, 0, 2);
  const size_t other = links.start(links.add_queue(), LinkKind::kNode, 0, 1);
  EXPECT_DOUBLE_EQ(links.find(other).end, 2);  // half of the link beside the first of the queue
  EXPECT_DOUBLE_EQ(links.find(behind).begin, 3);
  EXPECT_DOUBLE_EQ(links.find(behind).end, 5);
}

TEST(LinkQueues, ALinkIsNeverIdleAndNeverFasterThanItIs) {
  LinkQueues links;
  std::vector<size_t> queues;
  for (int i = 0; i < 3; ++i) queues.push_back(links.add_queue());
  std::vector<size_t> all;
  double work = 0;
  for (int i = 0; i < 30; ++i) {
    const double seconds = 0.5 + i % 4;
    work += seconds;
    all.push_back(links.start(queues[i % 3], LinkKind::kNode, 0.25 * i, seconds));
  }
  double last = 0;
  for (const size_t number : all) {
    last = std::max(last, links.find(number).end);
    EXPECT_GE(links.find(number).begin, links.find(number).came);
  }
  EXPECT_NEAR(last, work, 1e-9);
}

}  // namespace
}  // namespace tessera
