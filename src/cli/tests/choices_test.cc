#include <cmath>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

class CliChoices : public CliTest {
 protected:
  CliChoices() { succeed(train("run", {"--train.steps=40"})); }

  Json evaluate(const std::string& lines) const {
    write_all(path("choices.jsonl"), lines);
    return succeed_json({"eval", path("run"), "--choices", path("choices.jsonl"), "--json"});
  }
  /// The sum of log-probabilities of the tokens of `text` from `first` on, by `generate`.
  double log_likelihood(const std::string& text, size_t first) const {
    const Json result = succeed_json(
        {"generate", path("run"), "--prompt", text, "--max-tokens", "0", "--logprobs", "--json"});
    double sum = 0;  // prompt_tokens begin with the second token
    for (size_t i = first; i < text.size(); ++i)
      sum += result["prompt_tokens"][i - 1]["logprob"].get<double>();
    return sum;
  }
};

TEST_F(CliChoices, LikelihoodsAreThoseOfGenerate) {
  const Json result = evaluate(
      R"({"context": "the old man", "choices": [" and the sea", " qzx"], "answer": 0})"
      "\n\n"
      R"({"question": "it was ", "choices": ["a", "the best", "%%%%"], "answer": "the best"})"
      "\n");
  ASSERT_EQ(result["questions"].size(), 2);
  const auto& first = result["questions"][0];
  EXPECT_NEAR(first["log_likelihoods"][0], log_likelihood("the old man and the sea", 11), 1e-3);
  EXPECT_NEAR(first["log_likelihoods"][1], log_likelihood("the old man qzx", 11), 1e-3);
  EXPECT_EQ(first["bytes"], (std::vector<int>{12, 4}));
  EXPECT_EQ(first["best_per_byte"], 0);
  // A blank at the end of the context belongs to the choice.
  const auto& second = result["questions"][1];
  EXPECT_NEAR(second["log_likelihoods"][1], log_likelihood("it was the best", 6), 1e-3);
  EXPECT_EQ(second["answer"], 1);
  EXPECT_EQ(result["tokens"], 12 + 4 + 2 + 9 + 5);
}

TEST_F(CliChoices, PackingDoesNotChangeLikelihoods) {
  // More questions than one batch holds, the same one first, in the middle and last.
  const std::string probe =
      R"({"context": "the sea", "choices": [" was calm", " is"], "answer": 1})"
      "\n";
  std::string lines = probe;
  for (int i = 0; i < 150; ++i) {
    lines += fmt::format(R"({{"prompt": "{}", "choices": ["yes", "no"], "answer": {}}})",
                         std::string(i % 37, 'x'), i % 2) +
             "\n";
    if (i == 75) lines += probe;
  }
  const Json result = evaluate(lines + probe);
  const auto& questions = result["questions"];
  ASSERT_EQ(questions.size(), 153);
  for (const size_t at : {size_t{77}, size_t{152}}) {
    for (const int choice : {0, 1}) {
      EXPECT_NEAR(questions[at]["log_likelihoods"][choice],
                  questions[0]["log_likelihoods"][choice].get<double>(), 1e-4);
    }
  }
  double right = 0;
  for (const Json& question : questions) right += question["best"] == question["answer"] ? 1 : 0;
  EXPECT_NEAR(result["accuracy"], right / 153, 1e-12);
}

TEST_F(CliChoices, RefusesBadLines) {
  const auto refuse = [&](const std::string& line, const std::string& message) {
    write_all(path("bad.jsonl"), "\n" + line);
    expect_refused({"eval", path("run"), "--choices", path("bad.jsonl")}, {message});
  };
  refuse("{", "bad.jsonl:2");
  refuse(R"({"choices": ["a", "b"], "answer": 0})", "none of context, question and prompt");
  refuse(R"({"context": "a", "prompt": "b", "choices": ["a", "b"], "answer": 0})", "more than one");
  refuse(R"({"context": "a", "choices": ["a"], "answer": 0})", "two or more");
  refuse(R"({"context": "a", "choices": ["a", ""], "answer": 0})", "a choice is empty");
  refuse(R"({"context": "a", "choices": ["a", "b"], "answer": 2})", "no index of the 2 choices");
  refuse(R"({"context": "a", "choices": ["a", "b"], "answer": "c"})", "none of the choices");
  refuse("", "has no question");
}

}  // namespace
}  // namespace tessera
