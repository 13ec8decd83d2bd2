#pragma once

#include <thread>

#include "cli/tests/cli_testing.h"

namespace tessera {

/// Trainings that save every step and are killed at random moments.
class CliKillTest : public CliTest {
 protected:
  /// Each killed run is continued by the next from a checkpoint at least as new as the last that
  /// was reported as saved; at last one run ends by itself.
  void kill_and_continue(int num_kills, uint64_t seed) {
    Random random(seed, 0);
    int64_t saved = 0;
    for (int kill = 0; kill < num_kills; ++kill) {
      saved = kill_one(saved, random.next_uniform());
      if (::testing::Test::HasFailure()) return;
    }
    const Finished last = succeed_with_notes(command(saved + 60));
    EXPECT_THAT(last.out, ::testing::HasSubstr("continuing after step "));
    expect_every_step_once(saved + 60);
    const Finished text =
        succeed_with_notes({"generate", path("run"), "--json", "--max-tokens", "2"});
    EXPECT_EQ(nlohmann::json::parse(text.out)["checkpoint"],
              path("run/checkpoints/" + checkpoints("run").back()));
  }

 private:
  Arguments command(int64_t steps) const {
    return train("run", {"--run.checkpoint_interval=1", "--train.validation_interval=0",
                         "--optim.schedule=constant", "--train.steps=" + std::to_string(steps)});
  }

  /// Runs what must succeed, where a kill within a save may have left one to be noted.
  Finished succeed_with_notes(const Arguments& arguments) const {
    Finished finished = run_tessera(arguments);
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_THAT(finished.err, ::testing::MatchesRegex("(tessera: note: [^\n]*\n)*"));
    return finished;
  }

  /// Lets a run go on from at least step `saved`, kills it, and gives the last step that it saved.
  int64_t kill_one(int64_t saved, double moment) {
    ChildProcess child(command(1'000'000));
    if (saved > 0) {
      const std::string line = child.read_line_with("continuing after step ");
      EXPECT_GE(std::atoll(line.c_str() + std::string("continuing after step ").size()), saved);
    }
    EXPECT_NE(child.read_line_with("saved "), "") << child.wait().err;
    // The moment falls anywhere in some steps with their saves.
    std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int64_t>(moment * 60'000)));
    child.send(SIGKILL);
    const Finished killed = child.wait();
    EXPECT_EQ(killed.code, 128 + SIGKILL) << killed.err;
    return last_saved(killed.out);
  }

  static int64_t last_saved(const std::string& out) {
    const std::string mark = "/checkpoints/step-";
    const size_t line = out.rfind("saved ", out.rfind('\n'));
    const size_t at = out.find(mark, line);
    return at == std::string::npos ? 0 : std::atoll(out.c_str() + at + mark.size());
  }

  void expect_every_step_once(int64_t num_steps) const {
    const auto steps = read_steps("run");
    ASSERT_EQ(static_cast<int64_t>(steps.size()), num_steps);
    for (int64_t i = 0; i < num_steps; ++i) {
      EXPECT_EQ(steps[i]["step"], i + 1);
    }
  }
};

}  // namespace tessera
