#include "optim/exchange/transfer_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "core/random.h"

namespace tessera {
namespace {

using testing::ElementsAre;

/// Operations that complete when the test says so, or when somebody waits for them.
struct Ledger {
  std::vector<std::string> started;
  std::set<std::string> complete;

  TransferQueue::Stage stage(const std::string& name) {
    return [this, name](std::byte*) {
      started.push_back(name);
      return Pending(std::make_unique<Operation>(*this, name));
    };
  }

  class Operation : public Work {
   public:
    Operation(Ledger& ledger, std::string name) : ledger_(ledger), name_(std::move(name)) {}
    void wait() override { ledger_.complete.insert(name_); }
    bool done() override { return ledger_.complete.contains(name_); }
    void abandon() noexcept override {}

   private:
    Ledger& ledger_;
    std::string name_;
  };
};

TEST(TransferQueue, StagesOfOneFollowEachOtherAndTransfersRunSideBySide) {
  Ledger ledger;
  TransferQueue queue(1, 0);
  queue.add({ledger.stage("a0"), ledger.stage("a1")});
  queue.add({ledger.stage("b0"), ledger.stage("b1")});
  EXPECT_THAT(ledger.started, ElementsAre("a0", "b0"));
  ledger.complete.insert("b0");
  queue.poll();
  EXPECT_THAT(ledger.started, ElementsAre("a0", "b0")) << "b1 may not overtake a1";
  ledger.complete.insert("a0");
  queue.poll();
  EXPECT_THAT(ledger.started, ElementsAre("a0", "b0", "a1", "b1"));
  queue.wait_all();
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(ledger.complete.size(), 4);
}

TEST(TransferQueue, SlotsLimitWhatIsUnderWay) {
  Ledger ledger;
  TransferQueue queue(2, 100);
  EXPECT_EQ(queue.staging_bytes(), 256);
  std::vector<std::byte*> slots;
  for (const char* name : {"a", "b", "c", "d"}) {
    queue.add({[&slots](std::byte* staging) {
                 slots.push_back(staging);
                 return Pending();
               },
               ledger.stage(name)});
  }
  EXPECT_THAT(ledger.started, ElementsAre("a", "b"));
  ledger.complete.insert("b");
  queue.poll();
  EXPECT_THAT(ledger.started, ElementsAre("a", "b")) << "a still has the slot that c gets";
  ledger.complete.insert("a");
  queue.poll();
  EXPECT_THAT(ledger.started, ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(slots[0], slots[2]);
  EXPECT_EQ(slots[1], slots[3]);
  EXPECT_EQ(slots[1] - slots[0], 128);
  queue.wait_all();
}

TEST(TransferQueue, WaitCompletesUpToItsNumber) {
  Ledger ledger;
  TransferQueue queue(1, 64);
  const int64_t first = queue.add({ledger.stage("a0"), ledger.stage("a1")});
  const int64_t second = queue.add({ledger.stage("b0")});
  queue.add({ledger.stage("c0")});
  queue.wait(first);
  EXPECT_THAT(ledger.complete, ElementsAre("a0", "a1"));
  queue.wait(second);
  EXPECT_FALSE(ledger.complete.contains("c0"));
  queue.wait(second);
  queue.wait_all();
  EXPECT_TRUE(ledger.complete.contains("c0"));
}

// Whatever completes when, each stage's operations start in the order of the transfers.
TEST(TransferQueue, OrderOfEachStageDoesNotDependOnTiming) {
  Random random(3, 0);
  for (int trial = 0; trial < 100; ++trial) {
    Ledger ledger;
    TransferQueue queue(static_cast<int64_t>(1 + random.next_below(4)),
                        random.next_below(2) == 0 ? 0 : 8);
    const int num_transfers = static_cast<int>(random.next_below(7));
    for (int t = 0; t < num_transfers; ++t) {
      queue.add({ledger.stage(fmt::format("0:{}", t)), ledger.stage(fmt::format("1:{}", t)),
                 ledger.stage(fmt::format("2:{}", t))});
      for (const std::string& name : ledger.started) {
        if (random.next_below(3) == 0) ledger.complete.insert(name);
      }
      queue.poll();
    }
    queue.wait_all();
    std::map<char, std::vector<std::string>> by_stage;
    for (const std::string& name : ledger.started) by_stage[name[0]].push_back(name);
    EXPECT_EQ(std::ssize(ledger.started), 3 * num_transfers);
    for (const auto& [stage, names] : by_stage) EXPECT_TRUE(std::ranges::is_sorted(names));
  }
}

}  // namespace
}  // namespace tessera
