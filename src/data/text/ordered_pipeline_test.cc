#include "data/text/ordered_pipeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

#include "core/random.h"

namespace tessera {
namespace {

/// A pipeline over 0 .. count - 1 that doubles; it may throw at one item, at one of three places.
struct Doubling {
  int64_t count = 0;
  int64_t throw_at = -1;
  int throwing_stage = 0;
  std::vector<int64_t> consumed = {};
  std::atomic<int64_t> in_flight = 0;
  std::atomic<int64_t> most_in_flight = 0;

  void run(int num_threads, int64_t max_weight) {
    int64_t next = 0;
    const OrderedPipeline<int64_t, int64_t> pipeline{
        .produce = [&]() -> std::optional<int64_t> {
          if (next == count) return std::nullopt;
          fail(next, 0);
          const int64_t now = ++in_flight;
          most_in_flight = std::max(most_in_flight.load(), now);
          return next++;
        },
        .transform =
            [&](const int64_t& item) {
              fail(item, 1);
              std::this_thread::sleep_for(
                  std::chrono::microseconds(mix(7, static_cast<uint64_t>(item)) % 200));
              return 2 * item;
            },
        .consume =
            [&](const int64_t& item, const int64_t& doubled) {
              fail(item, 2);
              --in_flight;
              EXPECT_EQ(doubled, 2 * item);
              consumed.push_back(item);
            },
        .weigh = [](const int64_t&) { return 1; },
        .max_weight = max_weight};
    pipeline.run(num_threads);
  }

  void fail(int64_t item, int stage) const {
    if (item == throw_at && stage == throwing_stage) throw std::runtime_error(std::to_string(item));
  }
};

TEST(OrderedPipelineTest, ConsumesEverythingInOrder) {
  for (const int num_threads : {1, 2, 5}) {
    for (const int64_t count : {0, 1, 200}) {
      Doubling doubling{.count = count};
      doubling.run(num_threads, 6);
      ASSERT_EQ(static_cast<int64_t>(doubling.consumed.size()), count);
      for (int64_t i = 0; i < count; ++i) EXPECT_EQ(doubling.consumed[i], i);
      EXPECT_LE(doubling.most_in_flight, 6);
    }
  }
}

TEST(OrderedPipelineTest, AnErrorEndsItAfterAllThatCameBefore) {
  for (const int num_threads : {1, 2, 4}) {
    for (int stage = 0; stage < 3; ++stage) {
      Doubling doubling{.count = 100, .throw_at = 37, .throwing_stage = stage};
      try {
        doubling.run(num_threads, 8);
        FAIL() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "37");
      }
      EXPECT_EQ(doubling.consumed.size(), 37);
    }
  }
}

TEST(OrderedPipelineTest, TheCallersThreadPauses) {
  const auto caller = std::this_thread::get_id();
  for (const int num_threads : {1, 2, 4}) {
    int64_t next = 0;
    int pauses = 0;
    const OrderedPipeline<int64_t, int64_t> endless{
        .produce = [&] { return std::optional(next++); },
        .transform = [](const int64_t& item) { return item; },
        .consume = [](const int64_t&, const int64_t&) {},
        .weigh = [](const int64_t&) { return 1; },
        .max_weight = 8,
        .pause =
            [&] {
              EXPECT_EQ(std::this_thread::get_id(), caller);
              if (++pauses == 20) throw std::runtime_error("enough");
            }};
    EXPECT_THROW(endless.run(num_threads), std::runtime_error);
    EXPECT_EQ(pauses, 20);
  }
}

}  // namespace
}  // namespace tessera
