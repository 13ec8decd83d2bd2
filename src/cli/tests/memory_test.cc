#include "cli/tests/memory_testing.h"

namespace tessera {
namespace {

TEST_F(CliMemory, OfOneRankIsAsPredicted) {
  expect_as_predicted("f32", {});
  expect_as_predicted("bf16", {"--train.precision=bf16"});
  expect_as_predicted("recomputed", {"--train.recompute=all"});
}

}  // namespace
}  // namespace tessera
