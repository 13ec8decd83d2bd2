#include "train/tune/reward_tasks.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/file/file.h"
#include "data/permutation.h"
#include "train/tune/reward_command.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

/// How many characters two texts begin with alike.
int64_t common_prefix(std::string_view a, std::string_view b) {
  return std::ranges::mismatch(a, b).in1 - a.begin();
}

RewardPrompt ask_sum(Random& random) {
  constexpr uint64_t kBound = 100;
  const uint64_t a = random.next_below(kBound);
  const uint64_t b = random.next_below(kBound);
  return {.text = fmt::format("{}+{}=", a, b), .solution = fmt::format("{}", a + b)};
}

double reward_sum(const RewardPrompt& prompt, std::string_view answer) {
  const std::string& sum = prompt.solution;
  if (answer == sum) return 1;
  const auto longer = static_cast<double>(std::max(answer.size(), sum.size()));
  return 0.5 * static_cast<double>(common_prefix(answer, sum)) / longer;
}

RewardPrompt ask_copy(Random& random) {
  constexpr int kLetters = 4;
  RewardPrompt prompt;
  for (int i = 0; i < kLetters; ++i)
    prompt.solution += static_cast<char>('a' + random.next_below(8));
  prompt.text = fmt::format("{}>", prompt.solution);
  return prompt;
}

double reward_copy(const RewardPrompt& prompt, std::string_view answer) {
  const std::string& letters = prompt.solution;
  int64_t right = 0;
  for (size_t i = 0; i < std::min(letters.size(), answer.size()); ++i)
    right += letters[i] == answer[i] ? 1 : 0;
  return static_cast<double>(right) /
         static_cast<double>(std::max({letters.size(), answer.size(), size_t{1}}));
}

RewardPrompt ask_digits(Random& /*random*/) {
  return {.text = "digits:"};
}

double reward_digits(const RewardPrompt& /*prompt*/, std::string_view answer) {
  const auto digits = std::ranges::count_if(answer, [](char c) { return c >= '0' && c <= '9'; });
  return static_cast<double>(digits) / static_cast<double>(std::max<size_t>(answer.size(), 1));
}

constexpr RewardTask kTasks[] = {{"arithmetic", ask_sum, reward_sum},
                                 {"copy", ask_copy, reward_copy},
                                 {"digits", ask_digits, reward_digits}};

/// The lines of a file that are not blank, with what each has under "prompt".
std::vector<RewardPrompt> read_prompts(const std::string& path) {
  std::istringstream lines(read_text_file(path));
  std::vector<RewardPrompt> prompts;
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const Json json = Json::parse(line, nullptr, false);
    require(json.is_object() && json.contains("prompt") && json["prompt"].is_string(),
            "{}, line {}: expected a JSON object with \"prompt\", a text", path, number);
    prompts.push_back(
        {.text = json["prompt"].get<std::string>(), .line = line, .line_number = number});
  }
  require(!prompts.empty(), "{}: there is no prompt in it", path);
  return prompts;
}

/// What the command is given of an answer: the prompt's own line, or the prompt, and "completion".
std::string command_line(const WrittenAnswer& answer) {
  Json json = answer.prompt->line.empty() ? Json{{"prompt", answer.prompt->text}}
                                          : Json::parse(answer.prompt->line);
  json["completion"] = answer.text;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<double> ask_command(const RlSettings& rl, std::span<const WrittenAnswer> answers) {
  std::string given;
  for (const WrittenAnswer& answer : answers) {
    given += command_line(answer);
    given += '\n';
  }
  return parse_rewards(run_reward_command(rl.reward_command, given, rl.reward_timeout),
                       std::ssize(answers));
}

}  // namespace

const RewardTask& find_reward_task(std::string_view name) {
  const auto found = std::ranges::find(kTasks, name, &RewardTask::name);
  require(found != std::end(kTasks), "rl.task is \"{}\", which is no task", name);
  return *found;
}

PromptSource::PromptSource(const RlSettings& rl, uint64_t seed)
    : seed_(seed), task_(&find_reward_task(rl.task)) {
  if (!rl.prompts.empty()) prompts_ = read_prompts(rl.prompts);
}

RewardPrompt PromptSource::prompt(int64_t rollout, int64_t place,
                                  int64_t prompts_per_rollout) const {
  const auto number = static_cast<uint64_t>(rollout * prompts_per_rollout + place);
  if (prompts_.empty()) {
    Random random(seed_, mix(hash_text("rl prompt", 9), number));
    return task_->ask(random);
  }
  const uint64_t epoch = number / prompts_.size();
  const Permutation order(prompts_.size(), mix(mix(seed_, hash_text("rl order", 8)), epoch));
  return prompts_[order(number % prompts_.size())];
}

std::vector<double> find_rewards(const RlSettings& rl, std::span<const WrittenAnswer> answers) {
  if (!rl.reward_command.empty()) return ask_command(rl, answers);
  const RewardTask& task = find_reward_task(rl.task);
  std::vector<double> rewards;
  for (const WrittenAnswer& answer : answers)
    rewards.push_back(task.reward(*answer.prompt, answer.text));
  return rewards;
}

}  // namespace tessera
