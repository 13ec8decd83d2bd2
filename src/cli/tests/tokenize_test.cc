#include <thread>

#include "cli/tests/cli_testing.h"
#include "data/token_file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

class CliTokenize : public CliTest {
 protected:
  Arguments tokenize(const Arguments& options) const {
    Arguments all = {"tokenize", "--output", path("out"), "--tokenizer", "byte"};
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }
  std::string ids() const {
    const TokenFile file(path("out"), 257);
    std::vector<int32_t> ids(file.num_tokens());
    file.read(0, ids);
    std::string text;
    for (const int32_t id : ids) text += id == 256 ? '$' : static_cast<char>(id);
    return text;
  }
};

TEST_F(CliTokenize, TextAndJsonLines) {
  write_all(path("a.txt"), "one\n\ntwo\n");
  write_all(path("b.jsonl"), "{\"content\": \"three\"}\n{\"content\": \"\"}\n");
  const Arguments arguments = tokenize({path("a.txt"), path("b.jsonl"), "--separator", "",
                                        "--json-key", "content", "--threads", "2"});
  const std::string out = succeed(arguments).out;
  EXPECT_EQ(ids(), "one\n$two\n$three$");
  EXPECT_THAT(out, HasSubstr("3 documents, 16 tokens"));
  EXPECT_THAT(out, HasSubstr("left out 1 documents without text"));
  EXPECT_THAT(out, HasSubstr(" MB/s"));
  EXPECT_THAT(succeed(arguments).out, HasSubstr("nothing to do"));
  Arguments as_json = arguments;
  as_json.emplace_back("--json");
  const Json json = succeed_json(as_json);
  EXPECT_EQ(json["tokens"], 16);
  EXPECT_EQ(json["bytes"], 13);
  EXPECT_EQ(json["tokenizer"], "byte");
  EXPECT_EQ(json["reused"], true);
}

TEST_F(CliTokenize, TokensTrainLikeTheTextTheyAreMadeOf) {
  succeed(train("direct", {"--train.steps=2"}));
  succeed(tokenize({path("text.txt")}));
  succeed(train("tokens", {"--train.steps=2", "--data.text=", "--data.tokens=" + path("out")}));
  EXPECT_EQ(read_steps("direct")[1]["loss"], read_steps("tokens")[1]["loss"]);
}

TEST_F(CliTokenize, InstructionsAndLinesThatAreSkipped) {
  write_all(path("a.jsonl"), "{\"prompt\": \"2+2=\", \"completion\": \"4\"}\nno json\n");
  expect_refused(tokenize({path("a.jsonl"), "--instructions"}),
                 {path("a.jsonl"), "line 2", "JSON"});
  const std::string out =
      succeed(tokenize({path("a.jsonl"), "--instructions", "--skip-invalid"})).out;
  EXPECT_THAT(out, HasSubstr("4 of the tokens carry no loss"));
  EXPECT_THAT(out, HasSubstr("skipped 1 lines; the first: " + path("a.jsonl") + ": line 2"));
  EXPECT_EQ(ids(), "2+2=4$");
}

TEST_F(CliTokenize, Mistakes) {
  write_all(path("a.txt"), "text");
  expect_refused({"tokenize", path("a.txt"), "--output", path("out")}, {"--tokenizer is required"});
  expect_refused({"tokenize", path("a.txt"), "--tokenizer", "byte"}, {"--output is required"});
  expect_refused({"tokenize", "--output", path("out"), "--tokenizer", "byte"},
                 {"inputs is required"});
  expect_refused(tokenize({path("b.txt")}), {"b.txt does not exist", "a.txt"});
  expect_refused(tokenize({path("a.txt"), "--threads", "-2"}),
                 {"--threads must be from 0 to 4096, found -2"});
  expect_refused(tokenize({path("a.txt"), "--format", "xml"}), {"--format", "xml"});
  expect_refused(tokenize({path("a.txt"), "--instructions"}), {"instructions are lines of JSON"});
  expect_refused(tokenize({path("a.txt"), "--sync-seconds", "-1"}), {"--sync-seconds"});
  write_all(path("a.txt.gz"), "no gzip");
  expect_refused(tokenize({path("a.txt.gz")}), {"a.txt.gz", "compressed data is damaged"});
  succeed(tokenize({path("a.txt")}));
  write_all(path("a.txt"), "another");
  expect_refused(tokenize({path("a.txt")}), {"out.idx", "--overwrite"});
  succeed(tokenize({path("a.txt"), "--overwrite"}));
  EXPECT_EQ(ids(), "another$");
}

TEST_F(CliTokenize, AFullDiskLosesNothing) {
  write_all(path("a.txt"), make_prose(3'000'000));
  const Arguments arguments = tokenize({path("a.txt"), "--sync-seconds", "0"});
  expect_error(run_tessera(arguments, 3'000'000), {path("out.partial/tokens"), "size of files"});
  EXPECT_FALSE(std::filesystem::exists(path("out.idx")));
  EXPECT_THAT(succeed(arguments).out, HasSubstr("went on from "));
  const std::string bin = read_all(path("out.bin"));
  const std::string idx = read_all(path("out.idx"));
  succeed({"tokenize", path("a.txt"), "--output", path("whole"), "--tokenizer", "byte"});
  EXPECT_TRUE(bin == read_all(path("whole.bin")));
  EXPECT_TRUE(idx == read_all(path("whole.idx")));
}

/// Until there is a file, for ten seconds at most: how fast a machine gets there differs.
void wait_for_file(const std::string& path) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!std::filesystem::exists(path) && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

/// Kills again and again, until a run ends by itself: after a random while, and in alternation as
/// soon as there is something to go on from.
TEST_F(CliTokenize, KilledRunsGoOnToTheSameBytes) {
  std::filesystem::create_directories(path("f"));
  const std::string prose = make_prose(3'000'000);
  write_all(path("f/a.txt"), prose);
  std::string lines;
  for (size_t at = 0; at + 300 < prose.size(); at += 300) {
    lines += Json{{"text", prose.substr(at, 300)}}.dump() + "\n";
  }
  write_all(path("f/b.jsonl"), lines);
  succeed(
      {"tokenize", path("f"), "--output", path("whole"), "--tokenizer", "byte", "--threads", "1"});
  const Arguments arguments = tokenize({path("f"), "--sync-seconds", "0", "--threads", "2"});
  Random random(17, 0);
  int num_kills = 0;
  int num_resumed = 0;
  for (double patience_ms = 40; num_kills < 60; patience_ms *= 1.05) {
    ChildProcess child(arguments);
    if (num_kills % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(
          static_cast<int64_t>(1000 * patience_ms * random.next_uniform())));
    } else {
      wait_for_file(path("out.partial/state.json"));
    }
    child.send(SIGKILL);
    const Finished finished = child.wait();
    num_resumed += std::filesystem::exists(path("out.partial/state.json")) ? 1 : 0;
    if (finished.code == 0) break;
    ASSERT_EQ(finished.code, 128 + SIGKILL) << finished.err;
    ++num_kills;
  }
  succeed(arguments);
  EXPECT_GT(num_kills, 1);
  EXPECT_GT(num_resumed, 0);
  EXPECT_TRUE(read_all(path("out.bin")) == read_all(path("whole.bin")));
  EXPECT_TRUE(read_all(path("out.idx")) == read_all(path("whole.idx")));
  EXPECT_FALSE(std::filesystem::exists(path("out.partial")));
}

TEST_F(CliTest, TokensOfAnotherTokenizerAreToldOf) {
  succeed({"tokenize", path("text.txt"), "--train", path("own.json"), "--vocab-size", "300"});
  succeed({"tokenize", path("text.txt"), "--tokenizer", path("own.json"), "-o", path("ids")});
  const Arguments tokens = {"--data.text=", "--data.tokens=" + path("ids"), "--train.steps=1"};
  const auto output = [&](const std::string& run, const Arguments& more) {
    Arguments all = tokens;
    all.insert(all.end(), more.begin(), more.end());
    return succeed(train(run, all)).out;
  };
  const std::string own = "--data.tokenizer=" + path("own.json");
  EXPECT_THAT(output("other", {}), ::testing::HasSubstr("ids was made by the tokenizer bpe-"));
  EXPECT_THAT(output("same", {own}), ::testing::Not(::testing::HasSubstr("was made by")));
  EXPECT_THAT(output("marked", {own, "--data.instructions=true"}),
              ::testing::HasSubstr("data.instructions changes nothing in"));
}

}  // namespace
}  // namespace tessera
