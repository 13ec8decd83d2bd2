#include "train/state/memory_prediction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
