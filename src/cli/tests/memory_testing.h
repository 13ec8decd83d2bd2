#pragma once

#include "cli/tests/cli_testing.h"

namespace tessera {

/// What rank 0 held at most beside what was predicted before the first step: within 3 %, and the
/// MiB by which heaps of libraries differ from run to run, which are more than that of a small
/// model.
class CliMemory : public CliTest {
 protected:
  static constexpr double kTolerance = 0.03;
  static constexpr double kHeapBytes = 4 << 20;

  void expect_as_predicted(const std::string& run, const Arguments& options) {
#if defined(TESSERA_SANITIZED)
    GTEST_SKIP() << "sanitizers take memory of their own";
#endif
    Arguments arguments = train(
        run, {"--model.hidden_size=384", "--model.num_layers=4", "--model.num_heads=4",
              "--moe.num_experts=8", "--moe.top_k=2", "--moe.inner_size=768",
              "--data.sequence_length=128", "--train.micro_batch=2", "--train.global_batch=8",
              "--train.steps=4", "--train.validation_interval=0", "--run.checkpoint_interval=0"});
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Finished finished = run_tessera(arguments);
    ASSERT_EQ(finished.code, 0) << finished.err;
    const auto steps = read_steps(run);
    ASSERT_EQ(steps.size(), 4U);
    const double used = steps.back()["memory_used"];
    const double predicted = steps.back()["memory_predicted"];
    EXPECT_NEAR(used, predicted, kTolerance * predicted + kHeapBytes)
        << run << ": " << (used / predicted - 1) * 100 << " %";
  }
};

}  // namespace tessera
