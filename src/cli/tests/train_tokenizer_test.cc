#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

using CliTrainTokenizer = CliTest;

TEST_F(CliTrainTokenizer, LearnsATokenizerThatTrainsAModel) {
  const std::string tokenizer = path("tokenizer.json");
  const std::string out =
      succeed({"tokenize", path("text.txt"), "--train", tokenizer, "--vocab-size", "300", "--split",
               "llama3", "--output", path("tokens")})
          .out;
  EXPECT_THAT(out, HasSubstr("wrote the tokenizer " + tokenizer + ": 300 tokens"));
  const Json learnt = Json::parse(read_all(tokenizer));
  EXPECT_EQ(learnt["model"]["vocab"].size(), 300);
  EXPECT_EQ(learnt["added_tokens"][0]["content"], "<|endoftext|>");

  succeed(train(
      "run", {"--data.text=", "--data.tokens=" + path("tokens"), "--data.tokenizer=" + tokenizer}));
  const Json result = succeed_json({"generate", path("run"), "--prompt", "the old man", "--json",
                                    "--max-tokens", "4", "--logprobs"});
  EXPECT_LT(result["prompt_tokens"].size(), 10U);  // fewer tokens than bytes
  EXPECT_EQ(result["tokens"].size() + (result["ended"] ? 1 : 0), 4U);
}

TEST_F(CliTrainTokenizer, SaysWhereTheTextHasNoMorePairs) {
  const std::string out = succeed({"tokenize", path("text.txt"), "--train", path("tokenizer.json"),
                                   "--vocab-size", "5000"})
                              .out;
  EXPECT_THAT(out, HasSubstr("5000 were asked for, but no other pair occurs 2 times"));
}

TEST_F(CliTrainTokenizer, RefusesWhatCannotBeLearnt) {
  const auto refuse = [this](const Arguments& options, const std::string& message) {
    Arguments all = {"tokenize", path("text.txt"), "--train", path("tokenizer.json")};
    all.insert(all.end(), options.begin(), options.end());
    expect_refused(all, {message});
  };
  refuse({"--vocab-size", "100"}, "vocab");
  refuse({"--split", "lama3"}, "llama3");
  refuse({"--tokenizer", "byte"}, "excludes");
}

}  // namespace
}  // namespace tessera
