#include <filesystem>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Saves between steps, which are written while the run goes on.
class CliBackgroundSave : public CliTest {
 protected:
  Arguments saving(const std::string& run, const Arguments& options = {}) const {
    Arguments all = train(run, {"--optim.schedule=constant", "--train.validation_interval=0",
                                "--run.checkpoint_interval=3", "--run.keep_last=0"});
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }

  void expect_same_tensors(const fs::path& one, const fs::path& other) const {
    int num_files = 0;
    for (const auto& entry : fs::directory_iterator(one)) {
      if (entry.path().extension() != ".safetensors") continue;
      ++num_files;
      EXPECT_TRUE(read_all(entry.path().string()) ==
                  read_all((other / entry.path().filename()).string()))
          << entry.path();
    }
    EXPECT_GE(num_files, 2);
  }
};

TEST_F(CliBackgroundSave, WritesTheFilesOfStepsThatWait) {
  const Finished background = succeed(saving("a", {"--train.steps=10"}));
  EXPECT_THAT(background.out, AllOf(HasSubstr("a copy to save"), HasSubstr("; training waited ")));
  const Finished waiting =
      succeed(saving("b", {"--train.steps=10", "--run.background_save=false"}));
  EXPECT_THAT(waiting.out, AllOf(::testing::Not(HasSubstr("; training waited ")),
                                 HasSubstr(" s while training waited)")));
  ASSERT_EQ(checkpoints("a"), checkpoints("b"));
  ASSERT_EQ(checkpoints("a").size(), 4);
  for (const std::string& name : checkpoints("a"))
    expect_same_tensors(path("a/checkpoints/" + name), path("b/checkpoints/" + name));
  // From a save in the background a run goes on to the same end.
  fs::remove_all(path("a/checkpoints/step-00000010"));
  fs::remove_all(path("a/checkpoints/step-00000009"));
  EXPECT_THAT(succeed(saving("a", {"--train.steps=10"})).out, HasSubstr("continuing after step 6"));
  expect_same_tensors(path("a/checkpoints/step-00000010"), path("b/checkpoints/step-00000010"));
}

class CliFailingSave : public CliBackgroundSave, public ::testing::WithParamInterface<bool> {};

TEST_P(CliFailingSave, ARunGoesOnWithoutASaveThatFailsButEndsWithTheLast) {
  ChildProcess child(saving(
      "run", {"--train.steps=100000000", fmt::format("--run.background_save={}", GetParam())}));
  ASSERT_NE(child.read_line_with("saved "), "");
  fs::rename(path("run/checkpoints"), path("kept"));
  write_all(path("run/checkpoints"), "in the way");
  const std::string warning = child.read_line_with("warning: ");
  EXPECT_THAT(warning, AllOf(HasSubstr("training goes on without it"), HasSubstr("3 steps")));
  fs::remove(path("run/checkpoints"));
  ASSERT_NE(child.read_line_with("saved "), "");
  fs::rename(path("run/checkpoints"), path("kept-2"));
  write_all(path("run/checkpoints"), "in the way");
  ASSERT_NE(child.read_line_with("training goes on without it"), "");
  child.send(SIGTERM);
  const Finished finished = child.wait();
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.err, HasSubstr(path("run/checkpoints")));
}

INSTANTIATE_TEST_SUITE_P(InTheBackgroundOrNot, CliFailingSave, ::testing::Bool());

TEST_F(CliBackgroundSave, RanksSaveTogether) {
  const Finished finished =
      succeed(saving("run", {"--train.steps=7", "--train.global_batch=4", "--ranks", "2"}));
  EXPECT_THAT(finished.out, HasSubstr("; training waited "));
  EXPECT_EQ(checkpoints("run").size(), 3);
  EXPECT_THAT(succeed(saving("run", {"--train.steps=8", "--train.global_batch=4"})).out,
              HasSubstr("continuing after step 7 of 8"));
}

}  // namespace
}  // namespace tessera
