#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Runs in FP16 as a user sees them.
class CliHalfPrecision : public CliTest {
 protected:
  Arguments train_fp16(const std::string& run, Arguments more) const {
    more.emplace_back("--train.precision=fp16");
    return train(run, more);
  }
};

TEST_F(CliHalfPrecision, TellsTheScaleAndWhatOverflows) {
  const Finished finished =
      succeed(train_fp16("run", {"--train.steps=40", "--precision.initial_loss_scale=1099511627776",
                                 "--precision.loss_scale_window=8"}));
  EXPECT_THAT(finished.out, HasSubstr("the loss scale is 1099511627776 at first"));
  EXPECT_THAT(finished.out, HasSubstr("gradients overflowed"));
  EXPECT_THAT(finished.out, Not(HasSubstr("not finite")));
  const auto steps = read_steps("run");
  ASSERT_EQ(steps.size(), 40);
  double scale = 1099511627776.0;
  int64_t skipped = 0;
  int64_t good = 0;
  for (const auto& step : steps) {
    EXPECT_EQ(step["loss_scale"], scale);
    const bool overflowed = step["grad_norm"].is_null();
    skipped += overflowed ? 1 : 0;
    good = overflowed ? 0 : good + 1;
    if (overflowed) scale /= 2;
    if (good == 8) scale *= 2, good = 0;
    EXPECT_EQ(step["skipped_steps"], skipped);
  }
  EXPECT_GT(skipped, 3);
  const auto saved = succeed_json({"inspect", "--checkpoint", path("run"), "--json"});
  EXPECT_EQ(saved["state"]["loss_scale"]["scale"], scale);
  EXPECT_EQ(saved["state"]["loss_scale"]["good_steps"], good);
  succeed({"eval", path("run")});
  succeed({"generate", path("run"), "--prompt", "The", "--max-tokens", "4"});
}

TEST_F(CliHalfPrecision, StopsAtTheSmallestScale) {
  expect_error(run_tessera(train_fp16("run", {"--precision.initial_loss_scale=1099511627776",
                                              "--precision.min_loss_scale=549755813888"})),
               {"step 2", "a loss scale of 549755813888, the smallest", "precision.min_loss_scale",
                "nothing was updated"});
}

TEST_F(CliHalfPrecision, RefusesWhatCannotBe) {
  expect_refused(train_fp16("run", {"--precision.loss_scale=1000"}),
                 {"precision.loss_scale is 1000", "power of two"});
  expect_refused(train_fp16("run", {"--precision.saved=fp8"}),
                 {"precision.saved is set, but train.precision is \"fp16\""});
  expect_refused(train("run", {"--precision.hysteresis=2"}),
                 {"precision.hysteresis is set, but train.precision is \"f32\""});
  expect_refused(train_fp16("run", {"--optim.release_gradients=true", "--train.max_grad_norm=0"}),
                 {"optim.release_gradients", "set precision.loss_scale to a constant"});
  expect_refused(train_fp16("run", {"--moe.experts=block_sparse"}),
                 {"block_sparse", "train.precision = \"fp16\""});
}

}  // namespace
}  // namespace tessera
