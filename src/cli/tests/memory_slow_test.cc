#include <cstdlib>

#include "cli/tests/memory_testing.h"

namespace tessera {
namespace {

/// `--ranks` needs mpirun.
class CliRanksMemory : public CliMemory {
 protected:
  void SetUp() override {
    if (std::system("command -v mpirun > /dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun";
  }
};

TEST_F(CliRanksMemory, OfTwoRanksIsAsPredicted) {
  expect_as_predicted("replicas", {"--ranks", "2"});
  expect_as_predicted("experts", {"--ranks", "2", "--parallel.ep=2"});
  expect_as_predicted("stages", {"--ranks", "2", "--parallel.pp=2"});
  expect_as_predicted("sharded", {"--ranks", "2", "--optim.shard=full"});
}

TEST_F(CliRanksMemory, OfExpertsWhoseRowsAreBoundedIsAsPredicted) {
  const Arguments bounded = {"--ranks", "2", "--parallel.ep=2", "--parallel.exchange=bounded"};
  expect_as_predicted("bounded", bounded);
  Arguments stashed = bounded;
  stashed.emplace_back("--train.stash=auto");
  expect_as_predicted("stashed", stashed);
  stashed.emplace_back("--train.precision=bf16");
  expect_as_predicted("stashed-bf16", stashed);
}

TEST_F(CliRanksMemory, OfFourRanksIsAsPredicted) {
  expect_as_predicted("four", {"--ranks", "4", "--parallel.ep=2", "--train.recompute=all"});
}

}  // namespace
}  // namespace tessera
