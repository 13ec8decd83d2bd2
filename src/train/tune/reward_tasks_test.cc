#include "train/tune/reward_tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "core/error.h"
#include "core/file/file.h"
#include "train/testing/tiny_run.h"
#include "train/tune/reward_command.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "nothing was refused";
}

double reward_of(const char* task, const RewardPrompt& prompt, std::string_view answer) {
  return find_reward_task(task).reward(prompt, answer);
}

TEST(RewardTasks, CheckAnswers) {
  const RewardPrompt sum{.text = "17+25=", .solution = "42"};
  EXPECT_EQ(reward_of("arithmetic", sum, "42"), 1);
  EXPECT_EQ(reward_of("arithmetic", sum, "41"), 0.25);
  EXPECT_EQ(reward_of("arithmetic", sum, "4242"), 0.25);
  EXPECT_EQ(reward_of("arithmetic", sum, ""), 0);
  const RewardPrompt copy{.text = "abcd>", .solution = "abcd"};
  EXPECT_EQ(reward_of("copy", copy, "abcd"), 1);
  EXPECT_EQ(reward_of("copy", copy, "abxd"), 0.75);
  EXPECT_EQ(reward_of("copy", copy, "abcdabcd"), 0.5);
  EXPECT_EQ(reward_of("digits", {}, "1x2y"), 0.5);
  EXPECT_EQ(reward_of("digits", {}, ""), 0);
}

TEST(RewardTasks, PromptsAreAFunctionOfTheirPlace) {
  const PromptSource one({}, 7);
  const PromptSource same({}, 7);
  const PromptSource other({}, 8);
  std::set<std::string> texts;
  std::set<std::string> others;
  for (int64_t place = 0; place < 8; ++place) {
    const RewardPrompt prompt = one.prompt(3, place, 8);
    EXPECT_EQ(same.prompt(3, place, 8).text, prompt.text);
    EXPECT_EQ(reward_of("arithmetic", prompt, prompt.solution), 1);
    texts.insert(prompt.text);
    others.insert(other.prompt(3, place, 8).text);
  }
  EXPECT_GT(texts.size(), 5U);
  EXPECT_NE(texts, others);
}

class RewardCommand : public ::testing::Test {
 protected:
  /// Rewards of two answers to a prompt of a file.
  std::vector<double> rewards(const std::string& command, double seconds = 20) const {
    const RewardPrompt prompt{.text = "x", .line = R"({"prompt": "x", "want": "ab"})"};
    const std::vector<WrittenAnswer> answers = {{&prompt, "ab\n\"c\""}, {&prompt, "\xff"}};
    RlSettings rl;
    rl.reward_command = command;
    rl.reward_timeout = seconds;
    return find_rewards(rl, answers);
  }
};

TEST_F(RewardCommand, IsGivenLinesAndAnswersNumbers) {
  const testing::TemporaryFolder folder;
  const std::string given = folder.file("given");
  EXPECT_THAT(rewards(fmt::format("cat > {}; echo 1; echo 2.5", given)), ElementsAre(1, 2.5));
  EXPECT_EQ(read_text_file(given),
            "{\"prompt\":\"x\",\"want\":\"ab\",\"completion\":\"ab\\n\\\"c\\\"\"}\n"
            "{\"prompt\":\"x\",\"want\":\"ab\",\"completion\":\"\ufffd\"}\n");
  EXPECT_THAT(rewards(R"(grep -c '"want":"ab"'; echo -1.5e1)"), ElementsAre(2, -15));
  for (int i = 0; i < 20; ++i)  // reads nothing, and may have ended before it is written to
    EXPECT_THAT(rewards("echo 1; echo 2"), ElementsAre(1, 2));
}

TEST_F(RewardCommand, TakesMoreThanAPipeHolds) {
  const std::string given(1 << 20, 'x');
  EXPECT_EQ(run_reward_command("cat", given, 20), given);
}

TEST_F(RewardCommand, FailuresAreNamed) {
  const auto failure = [&](const std::string& command, double seconds = 20) {
    return message_of([&] { rewards(command, seconds); });
  };
  EXPECT_THAT(failure("exit 3"), HasSubstr("ended with exit code 3"));
  EXPECT_THAT(failure("kill -9 $$"), HasSubstr("was ended by signal 9"));
  EXPECT_THAT(failure("echo 1"), HasSubstr("printed 1 lines for 2 answers"));
  EXPECT_THAT(failure("echo 1; echo two"), HasSubstr("line 2 of its output is \"two\""));
  EXPECT_THAT(failure("echo 1; echo nan"), HasSubstr("expected a number"));
  EXPECT_THAT(failure("sleep 30", 0.1), HasSubstr("had not ended after 0.1 s"));
}

TEST(PromptFile, IsReadInAnOrderOfItsOwn) {
  const testing::TemporaryFolder folder;
  RlSettings rl;
  rl.prompts = folder.file("prompts.jsonl");
  rl.reward_command = "cat";
  std::ofstream(rl.prompts) << "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\", \"n\": 1}\n"
                            << "{\"prompt\": \"c\"}\n";
  const PromptSource source(rl, 1);
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::set<std::string> texts;
    for (int64_t place = 0; place < 3; ++place) texts.insert(source.prompt(epoch, place, 3).text);
    EXPECT_THAT(texts, ElementsAre("a", "b", "c"));
  }
  std::ofstream(rl.prompts) << "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n";
  EXPECT_THAT(message_of([&] { PromptSource(rl, 1); }), HasSubstr("line 2: expected"));
  std::ofstream(rl.prompts) << "\n";
  EXPECT_THAT(message_of([&] { PromptSource(rl, 1); }), HasSubstr("there is no prompt"));
}

}  // namespace
}  // namespace tessera
