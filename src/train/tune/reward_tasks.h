#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/random.h"
#include "train/setup/objective.h"

namespace tessera {

/// What a model is asked, and what a reward is found from.
struct RewardPrompt {
  std::string text;
  std::string solution = {};  ///< of a task that checks answers
  std::string line = {};      ///< the JSON line that it came from, where it came from a file
  int64_t line_number = 0;    ///< of that line
};

/// A task whose prompts are made, and whose answers are checked, by rules.
struct RewardTask {
  std::string_view name;
  RewardPrompt (*ask)(Random& random);
  /// From 0 to 1. `answer` is what the model wrote.
  double (*reward)(const RewardPrompt& prompt, std::string_view answer);
};

/// arithmetic: sums of two numbers below 100, "17+5="; 1 for the sum alone, else half of what part
/// of it is right from the left. copy: "abcd>"; the share of characters that are right. digits:
/// "digits:"; the share of digits among all characters.
/// Throws UserError for a name that is none's.
const RewardTask& find_reward_task(std::string_view name);

/// Where a run's prompts come from, a pure function of the settings and (rollout, place in it):
/// those of a task are drawn, those of a file come in an order of its own in each epoch.
class PromptSource {
 public:
  /// Throws UserError for a file that cannot be used.
  PromptSource(const RlSettings& rl, uint64_t seed);
  RewardPrompt prompt(int64_t rollout, int64_t place, int64_t prompts_per_rollout) const;
  /// Those of the file; none where they are a task's.
  std::span<const RewardPrompt> listed() const { return prompts_; }

 private:
  uint64_t seed_;
  const RewardTask* task_;
  std::vector<RewardPrompt> prompts_;  ///< of the file; empty: the task's
};

/// A prompt and what was written behind it.
struct WrittenAnswer {
  const RewardPrompt* prompt = nullptr;
  std::string text;
};

/// Rewards of a rollout's answers: by the task, or by rl.reward_command. Throws UserError where the
/// command fails, takes longer than rl.reward_timeout, or does not answer one number a line.
std::vector<double> find_rewards(const RlSettings& rl, std::span<const WrittenAnswer> answers);

}  // namespace tessera
