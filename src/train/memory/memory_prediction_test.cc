#include "train/memory/memory_prediction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "comm/thread/thread_world.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGibibyte = int64_t{1} << 30;

MemoryPrediction of_gibibytes(int64_t weights, int64_t activations, int64_t program) {
  return {.program = program * kGibibyte,
          .state = {.weights = weights * kGibibyte,
                    .gradients = 2 * weights * kGibibyte,
                    .optimizer = 4 * weights * kGibibyte},
          .activations = {.saved = activations * kGibibyte}};
}

TEST(MemoryPrediction, WhatDoesNotFitIsRefusedWithItsParts) {
  require_memory(of_gibibytes(10, 9, 1), "cuda:0", 80 * kGibibyte);
  try {
    require_memory(of_gibibytes(10, 10, 1), "cuda:0", 80 * kGibibyte);
    FAIL() << "81 GiB were taken to fit 80";
  } catch (const UserError& error) {
    for (const char* part :
         {"81 GiB of cuda:0", "10 GiB weights", "20 GiB gradients", "40 GiB optimizer",
          "10 GiB activations", "it has 80 GiB", "79 GiB are free", "train.micro_batch"})
      EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(MemoryPrediction, WhatAGpusLibrariesTakeCounts) {
  MemoryPrediction memory = of_gibibytes(10, 4, 1);
  memory.overhead = {.communication = 3 * kGibibyte, .graphs = kGibibyte};
  EXPECT_THAT(describe(memory), HasSubstr("79 GiB were predicted"));
  EXPECT_THAT(describe(memory),
              HasSubstr("4 GiB activations, 3 GiB communication, 1 GiB CUDA graphs and 1 GiB"));
  EXPECT_THAT([&] { require_memory(memory, "cuda:0", 78 * kGibibyte); },
              ::testing::ThrowsMessage<UserError>(HasSubstr("3 GiB communication")));
  EXPECT_THAT(describe(of_gibibytes(10, 4, 1)), ::testing::Not(HasSubstr("communication")));
}

/// Ranks of one machine share its memory; on the host that also holds what they train with.
TEST(MemoryPrediction, SnapshotsNeedRoomForThoseOfAllRanksOfAMachine) {
  const auto has_room = [](bool on_host, int64_t available) {
    std::atomic<int> yes = 0;
    run_thread_world(3, [&](World& world) {
      MemoryPrediction memory = of_gibibytes(1, 2, 5);
      memory.snapshot = 10 * kGibibyte;
      memory.on_host = on_host;
      // One rank finds less than the others.
      const int64_t found = available + (world.rank() == 1 ? 0 : 100 * kGibibyte);
      if (has_room_for_snapshot(memory, found, *world.make_world_group())) ++yes;
    });
    EXPECT_TRUE(yes == 0 || yes == 3) << yes;
    return yes == 3;
  };
  EXPECT_TRUE(has_room(false, 30 * kGibibyte));
  EXPECT_FALSE(has_room(false, 30 * kGibibyte - 1));
  EXPECT_TRUE(has_room(true, int64_t{3} * (7 + 2 + 10) * kGibibyte));
  EXPECT_FALSE(has_room(true, int64_t{3} * (7 + 2 + 10) * kGibibyte - 1));
}

TEST(MemoryPrediction, WhatAGpusHostHasIsNoneOfItsOwn) {
  MemoryPrediction memory = of_gibibytes(1, 2, 5);
  memory.on_host = false;
  memory.activations.offloaded = memory.snapshot = memory.state.on_host = 100 * kGibibyte;
  EXPECT_EQ(memory.beside(), 300 * kGibibyte);
  EXPECT_NO_THROW(require_memory(memory, "cuda:0", 80 * kGibibyte));
  EXPECT_THAT(describe(memory), HasSubstr("100 GiB offloaded optimizer state (of the host's"));
  memory.on_host = true;
  EXPECT_THROW(require_memory(memory, "cpu", 80 * kGibibyte), UserError);
}

TEST(MemoryPrediction, MoreInUseThanThereIsLeavesNothingFree) {
  try {
    require_memory(of_gibibytes(1, 1, 90), "cuda:0", 80 * kGibibyte);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("0 B are free"));
  }
}

}  // namespace
}  // namespace tessera
