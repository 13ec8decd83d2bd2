#include "model/batch/staging.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "ops/testing/shadow_backend.h"

namespace tessera {
namespace {

constexpr int64_t kBytes = 3 * kAlignment;

void fill(std::byte* block, int value) {
  std::fill_n(block, kBytes, static_cast<std::byte>(value));
}

/// A device that brings `num_places` micro-batches, each to memory of its own, again and again.
class RepeatedBrings : public ::testing::Test {
 protected:
  void record(int num_places) {
    for (int place = 0; place < num_places; ++place) {
      fill(staging_.next(), place);
      brought_.emplace_back(kBytes, "a test", device());
    }
    ASSERT_TRUE(device().begin_recording());
    for (const Buffer& to : brought_) staging_.bring(to.data());
    work_ = device().end_recording().work;
  }
  Device& device() const { return backend_.device(); }
  /// What the device brings now.
  void expect(const std::vector<int>& values) {
    work_->run();
    for (size_t place = 0; place < values.size(); ++place) {
      std::vector<std::byte> found(kBytes);
      device().copy(found.data(), brought_[place].data(), kBytes);
      EXPECT_EQ(found, std::vector(kBytes, static_cast<std::byte>(values[place]))) << place;
    }
  }
  void release() {
    for (size_t i = 0; i < brought_.size(); ++i) staging_.release();
  }

  Backend backend_ = testing::make_shadow_backend({});
  Staging staging_{kBytes, backend_.device()};
  std::vector<Buffer> brought_;
  std::unique_ptr<RecordedWork> work_;
};

/// Blocks for the next step are filled while the device has not read those of this one.
TEST_F(RepeatedBrings, ReadWhatTheHostChoseLast) {
  record(2);
  std::vector<int> now = {0, 1};
  for (int step = 1; step < 6; ++step) {
    const std::vector<int> next = {10 * step, 10 * step + 1};
    for (size_t place = 0; place < 2; ++place) fill(staging_.spare(place), next[place]);
    expect(now);
    release();
    for (size_t place = 0; place < 2; ++place) staging_.next_from_spare(place);
    expect(next);
    now = next;
  }
}

/// As an evaluation's do between two steps.
TEST_F(RepeatedBrings, LeaveWhatIsFilledToWhoeverStagesBetween) {
  record(2);
  expect({0, 1});
  release();
  for (size_t place = 0; place < 2; ++place) fill(staging_.spare(place), 7);
  fill(staging_.next(), 3);
  const Buffer other(kBytes, "a test", device());
  staging_.bring(other.data());
  staging_.release();
  for (size_t place = 0; place < 2; ++place) staging_.next_from_spare(place);
  expect({7, 7});
}

TEST_F(RepeatedBrings, ReadWhatIsStagedInstead) {
  record(1);
  release();
  fill(staging_.spare(0), 7);
  fill(staging_.next(), 4);
  expect({4});
}

TEST_F(RepeatedBrings, ComeInTheOrderOfTheirPlaces) {
  record(2);
  release();
  EXPECT_THROW(staging_.next_from_spare(1), InternalError);
}

TEST_F(RepeatedBrings, NeedSomethingStaged) {
  EXPECT_THROW(staging_.bring(nullptr), InternalError);
}

}  // namespace
}  // namespace tessera
