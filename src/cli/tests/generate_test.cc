#include <cmath>
#include <sstream>

#include "cli/tests/cli_testing.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

/// A trained model.
class CliGenerate : public CliTest {
 protected:
  CliGenerate() { succeed(train("run", {"--train.steps=40"})); }

  Json generate(const Arguments& options) const {
    Arguments all = {"generate", path("run"), "--json"};
    all.insert(all.end(), options.begin(), options.end());
    return succeed_json(all);
  }
  /// The mean loss of the prompt's tokens after the first, by `generate --logprobs`.
  double prompt_loss(const std::string& run, const std::string& prompt) const {
    const Json result = succeed_json(
        {"generate", path(run), "--prompt", prompt, "--max-tokens", "0", "--logprobs", "--json"});
    double sum = 0;
    for (const Json& token : result["prompt_tokens"]) sum -= token["logprob"].get<double>();
    EXPECT_EQ(result["prompt_tokens"].size(), prompt.size() - 1);
    return sum / static_cast<double>(prompt.size() - 1);
  }
  /// The mean loss of the same tokens as one window, by `eval`.
  Json evaluate_window(const std::string& run, const std::string& text) const {
    write_all(path("window.txt"), text);
    return succeed_json({"eval", path(run), "--text", path("window.txt"), "--sequence-length",
                         std::to_string(text.size() - 1), "--batch-size", "1", "--json"});
  }
};

TEST_F(CliGenerate, SeedDecidesTheText) {
  const Arguments options = {"--prompt", "the old", "--max-tokens", "60",
                             "--top-k",  "50",      "--seed"};
  const auto with_seed = [&](const char* seed) {
    Arguments all = options;
    all.emplace_back(seed);
    return generate(all);
  };
  const Json first = with_seed("5");
  EXPECT_EQ(with_seed("5"), first);
  EXPECT_NE(with_seed("6")["text"], first["text"]);
  EXPECT_EQ(first["prompt"], "the old");
  for (const Json& token : first["tokens"]) {
    EXPECT_LT(token["id"], 256);
    EXPECT_LE(token["logprob"], 0);
  }
}

TEST_F(CliGenerate, TemperatureZeroIsGreedy) {
  const Json greedy = generate({"--prompt", "the ", "--max-tokens", "20", "--temperature", "0"});
  ASSERT_EQ(greedy["tokens"].size(), 20);
  EXPECT_EQ(generate({"--prompt", "the ", "--max-tokens", "20", "--temperature", "0", "--seed",
                      "77"})["text"],
            greedy["text"]);
  EXPECT_EQ(generate({"--prompt", "the ", "--max-tokens", "20", "--top-k", "1"})["text"],
            greedy["text"]);
  EXPECT_EQ(generate({"--prompt", "the ", "--max-tokens", "20", "--top-p", "1e-9"})["text"],
            greedy["text"]);
}

TEST_F(CliGenerate, SeveralTextsAreThoseOneByOne) {
  write_all(path("prompts.jsonl"), "\"the \"\n\n{\"prompt\": \"a old king and\"}\n\"\"\n");
  const auto lines = [this](const Arguments& options) {
    Arguments all = {
        "generate",   path("run"),    "--device", "cpu",    "--prompts", path("prompts.jsonl"),
        "--logprobs", "--max-tokens", "25",       "--seed", "3"};
    all.insert(all.end(), options.begin(), options.end());
    std::vector<Json> texts;
    std::istringstream out(succeed(all).out);
    for (std::string line; std::getline(out, line);) texts.push_back(Json::parse(line));
    return texts;
  };
  const std::vector<Json> texts = lines({"--samples", "3"});
  ASSERT_EQ(texts.size(), 9);
  EXPECT_EQ(lines({"--samples", "3", "--max-sequences", "1"}), texts);
  EXPECT_EQ(lines({"--samples", "3", "--max-sequences", "4"}), texts);
  for (size_t i = 0; i < texts.size(); ++i) {
    const Json& text = texts[i];
    EXPECT_EQ(text["prompt_idx"], i / 3);
    EXPECT_EQ(text["sample"], i % 3);
    const Json alone = generate({"--prompt", text["prompt"], "--device", "cpu", "--max-tokens",
                                 "25", "--seed", std::to_string(text["seed"].get<int>())});
    EXPECT_EQ(text["text"], alone["text"]);
    ASSERT_EQ(text["tokens"].size(), alone["tokens"].size());
    for (size_t j = 0; j < text["tokens"].size(); ++j)
      EXPECT_NEAR(text["tokens"][j]["logprob"].get<double>(),
                  alone["tokens"][j]["logprob"].get<double>(), 1e-4);
  }
}

TEST_F(CliGenerate, PromptsThatAreNoneAreRefused) {
  const auto refuse = [this](const std::string& text, const std::string& what) {
    write_all(path("prompts.jsonl"), text);
    expect_refused({"generate", path("run"), "--device", "cpu", "--prompts", path("prompts.jsonl")},
                   {"prompts.jsonl", what});
  };
  refuse("\"a\"\n{\"prompt\"", "line 2");
  refuse("5", "expected a string");
  refuse("{\"prompt\": \"a\", \"seed\": 3}", "expected a string");
  refuse("\n\n", "no prompt");
  expect_refused({"generate", path("run"), "--prompts", path("none.jsonl")}, {"none.jsonl"});
}

TEST_F(CliGenerate, TheDeviceIsChosen) {
  const auto generate_on = [this](const char* device) {
    return generate(
        {"--prompt", "the ", "--max-tokens", "20", "--temperature", "0", "--device", device});
  };
  EXPECT_EQ(generate_on("auto")["text"], generate_on("cpu")["text"]);
  const Json evaluation = succeed_json({"eval", path("run"), "--device=cpu", "--json"});
  EXPECT_NEAR(succeed_json({"eval", path("run"), "--json"})["loss"], evaluation["loss"], 1e-5);
  expect_refused({"generate", path("run"), "--device", "tpu"}, {"--device", "tpu"});
  if (!list_gpus().gpus.empty()) return;
  for (const char* command : {"generate", "eval"})
    expect_refused({command, path("run"), "--device=cuda"}, {"GPU", "--device=cpu"});
}

TEST_F(CliGenerate, EveryIdCanBePrinted) {
  // A temperature this high is uniform over the vocabulary, which the model rounds up to 320.
  const Json result = generate({"--prompt", "a", "--max-tokens", "200", "--temperature", "1e6"});
  EXPECT_TRUE(result["ended"] || result["tokens"].size() == 200);
  for (const Json& token : result["tokens"]) EXPECT_LT(token["id"], 257);
}

TEST_F(CliGenerate, StreamsThePromptAndTheText) {
  const Arguments options = {"--prompt", "the sea", "--max-tokens", "12"};
  const std::string text = generate(options)["text"];
  const Arguments plain = {"generate", path("run"), "--prompt", "the sea", "--max-tokens", "12"};
  EXPECT_THAT(succeed(plain).out, HasSubstr("the sea"));
  Arguments logprobs = plain;
  logprobs.emplace_back("--logprobs");
  const std::string table = succeed(logprobs).out;
  EXPECT_EQ(std::ranges::count(table, '\n'),
            1 + 6 + static_cast<int64_t>(generate(options)["tokens"].size()));
  EXPECT_THAT(succeed({"generate", path("run"), "--max-tokens", "3"}).out, ::testing::Not(""));
  EXPECT_FALSE(text.empty());
}

TEST_F(CliGenerate, LogProbabilitiesAreThoseOfEvaluation) {
  const std::string text = make_prose(30);
  const Json evaluation = evaluate_window("run", text);
  EXPECT_EQ(evaluation["tokens"], text.size() - 1);
  EXPECT_NEAR(prompt_loss("run", text), evaluation["loss"], 1e-5);
}

TEST_F(CliGenerate, TheCacheAgreesWithTheWholeForwardPass) {
  const Json result =
      generate({"--prompt", "the captain", "--max-tokens", "20", "--seed", "3", "--top-k", "4"});
  const auto& tokens = result["tokens"];
  const std::string text = "the captain" + result["text"].get<std::string>();
  const Json again = generate({"--prompt", text, "--max-tokens", "0"});
  const auto& prompt = again["prompt_tokens"];
  ASSERT_GE(prompt.size(), tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Json& whole = prompt[prompt.size() - tokens.size() + i];
    EXPECT_EQ(whole["id"], tokens[i]["id"]);
    EXPECT_NEAR(whole["logprob"], tokens[i]["logprob"], 1e-4);
  }
}

TEST_F(CliGenerate, EvaluationOfHeldOutData) {
  const Json evaluation = succeed_json({"eval", path("run"), "--json"});
  const double loss = evaluation["loss"];
  EXPECT_NEAR(evaluation["perplexity"], std::exp(loss), 1e-9);
  EXPECT_GT(loss, 0.5);
  EXPECT_LT(loss, std::log(257.0));
  EXPECT_EQ(evaluation["checkpoint"], path("run/checkpoints/step-00000040"));
  const double bytes = evaluation["bytes"];
  EXPECT_NEAR(evaluation["bits_per_byte"],
              loss * evaluation["tokens"].get<double>() / std::log(2.0) / bytes, 1e-9);
  const Json limited =
      succeed_json({"eval", path("run"), "--json", "--max-batches", "2", "--batch-size", "3"});
  EXPECT_EQ(limited["tokens"], 2 * 3 * 16);
  EXPECT_THAT(succeed({"eval", path("run")}).out, HasSubstr("perplexity"));
}

TEST_F(CliGenerate, OptionsOutOfRange) {
  const auto refuse = [this](const std::string& option, const std::string& value) {
    const std::string name = option.substr(2, 3);
    expect_refused({"generate", path("run"), option, value}, {name, value});
  };
  refuse("--temperature", "-1");
  refuse("--temperature", "nan");
  refuse("--top-p", "0");
  refuse("--top-p", "2");
  refuse("--top-k", "-1");
  refuse("--max-tokens", "-5");
  expect_refused({"generate", path("run"), "--seed", "-1"},
                 {"--seed must be at least 0, found -1"});
  expect_refused({"eval", path("run"), "--batch-size", "0"},
                 {"--batch-size must be from 1", "found 0"});
  expect_refused({"eval", path("run"), "--sequence-length", "-1"},
                 {"--sequence-length must be from 0", "found -1"});
  expect_refused({"eval", path("run"), "--text", path("text.txt"), "--tokens", path("x")},
                 {"text", "tokens", "not both"});
  expect_refused({"eval", path("run"), "--text", path("none.txt")}, {path("none.txt")});
  expect_refused({"eval", path("run"), "--tokens", path("none")}, {path("none")});
}

}  // namespace
}  // namespace tessera
