#include "comm/timed_work.h"

#include <gtest/gtest.h>

#include "comm/communicator.h"

namespace tessera {
namespace {

using Time = TimedWork::Time;

/// What a device knows of its work once it has been synchronised.
struct FakeDevice {
  std::vector<TimedWork::Use> asked;
  bool measures = true;
};

class FakeWork final : public Work, public TimedWork {
 public:
  explicit FakeWork(FakeDevice& device) : device_(device) {}
  void wait() override {}
  bool done() override { return true; }
  void abandon() noexcept override {}
  bool when_known(Use use) override {
    if (device_.measures) device_.asked.push_back(std::move(use));
    return device_.measures;
  }

 private:
  FakeDevice& device_;
};

class FakeCommunicator final : public Communicator {
 public:
  FakeCommunicator(FakeDevice& device, std::shared_ptr<CommStatistics> statistics)
      : Communicator("fake", {0, 1}, 0, std::move(statistics)), device_(device) {}

 private:
  Pending begin() { return Pending(std::make_unique<FakeWork>(device_)); }
  Pending do_all_gather_v(const Tensor&, const Tensor&, std::span<const int64_t>) override {
    return begin();
  }
  Pending do_reduce_scatter_v(const Tensor&, const Tensor&, std::span<const int64_t>) override {
    return begin();
  }
  Pending do_all_reduce(const Tensor&, const Tensor&, ReduceOp) override { return begin(); }
  Pending do_all_to_all_v(const Tensor&, const Tensor&, std::span<const int64_t>,
                          std::span<const int64_t>) override {
    return begin();
  }
  Pending do_send(const Tensor&, int64_t) override { return begin(); }
  Pending do_receive(const Tensor&, int64_t) override { return begin(); }
  Pending do_broadcast(const Tensor&, int64_t) override { return begin(); }
  void do_barrier() override {}

  FakeDevice& device_;
};

class TimedWorkTest : public ::testing::Test {
 protected:
  TimedWorkTest() {
    statistics_->observe([this](const CommEvent& event) { events_.push_back(event); });
  }
  /// Waits and looks: it is told once.
  void exchange() {
    float value = 0;
    const Tensor tensor = view(std::span(&value, 1), {1});
    Pending pending = group_.all_reduce(tensor, tensor);
    EXPECT_TRUE(pending.done());
    pending.wait();
  }

  FakeDevice device_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
  FakeCommunicator group_{device_, statistics_};
  std::vector<CommEvent> events_;
};

TEST_F(TimedWorkTest, ObserversLearnTheDevicesTimesOnceTheseAreKnown) {
  exchange();
  EXPECT_TRUE(events_.empty());
  ASSERT_EQ(device_.asked.size(), 1);
  const Time begin = std::chrono::steady_clock::now() + std::chrono::hours(1);
  device_.asked[0](begin, begin + std::chrono::seconds(2));
  ASSERT_EQ(events_.size(), 1);
  EXPECT_EQ(events_[0].begin, begin);
  EXPECT_EQ(events_[0].end, begin + std::chrono::seconds(2));
  EXPECT_EQ(events_[0].group, "fake");
  EXPECT_EQ(events_[0].kind, CommKind::kAllReduce);
}

TEST_F(TimedWorkTest, WithoutMeasuresTheHostsTimesCount) {
  device_.measures = false;
  exchange();
  ASSERT_EQ(events_.size(), 1);
  EXPECT_LE(events_[0].end, std::chrono::steady_clock::now());
}

TEST_F(TimedWorkTest, WhatIsKnownTooLateIsNotTold) {
  exchange();
  statistics_->observe(nullptr);
  device_.asked[0]({}, {});
  EXPECT_TRUE(events_.empty());
}

}  // namespace
}  // namespace tessera
