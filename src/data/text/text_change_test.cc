#include <fstream>
#include <nlohmann/json.hpp>

#include "data/data_testing.h"
#include "data/text/tokenize.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Json = nlohmann::json;

/// Tokens of text, or states on the way there, that are not what they were.
class TextChangeTest : public DataTest {
 protected:
  TokenizeRequest request(const std::string& name) const {
    TokenizeRequest request;
    request.source.paths = {path(name)};
    request.prefix = path("out");
    return request;
  }
  std::string bytes() const {
    return read_text_file(path("out.bin")) + "|" + read_text_file(path("out.idx"));
  }
  void remove_output() const {
    for (const char* name : {"out.bin", "out.idx", "out.json", "out.partial"})
      remove_path(path(name));
  }
};

/// Writes text of the same size and gives the file the time that it had.
void change_secretly(const std::string& path, const std::string& text) {
  ASSERT_EQ(fs::file_size(path), text.size());
  const auto time = fs::last_write_time(path);
  std::ofstream(path, std::ios::binary) << text;
  fs::last_write_time(path, time);
}

TEST_F(TextChangeTest, ChangedTextIsNoticedWhateverItsSizeAndTime) {
  const auto tokenizer = make_byte_tokenizer();
  write("f/a.txt", "one two three");
  write("f/b.jsonl.gz", gzip("{\"text\": \"four\"}\n"));
  TokenizeRequest request = this->request("f");
  tokenize_text(request, *tokenizer);
  change_secretly(path("f/a.txt"), "one two THREE");
  EXPECT_THAT(error_of([&] { tokenize_text(request, *tokenizer); }), HasSubstr("--overwrite"));
  request.other = OtherTokens::kReplace;
  EXPECT_FALSE(tokenize_text(request, *tokenizer).reused);
  EXPECT_TRUE(tokenize_text(request, *tokenizer).reused);
  change_secretly(path("f/b.jsonl.gz"), gzip("{\"text\": \"FIVE\"}\n"));
  EXPECT_FALSE(tokenize_text(request, *tokenizer).reused);
}

TEST_F(TextChangeTest, AStateOfTextThatChangedIsNotContinued) {
  const auto tokenizer = make_byte_tokenizer();
  std::string text;
  for (int i = 0; i < 300; ++i) text += "word" + std::to_string(i) + " ";
  write("a.txt", text);
  TokenizeRequest request = this->request("a.txt");
  request.sync_seconds = 0;
  request.num_threads = 1;
  request.chunks = {.chunk_bytes = 200, .lookahead_bytes = 10};
  int chunks = 0;
  request.progress = [&](const TokenizeProgress&) {
    if (++chunks == 5) user_error("enough");
  };
  EXPECT_EQ(error_of([&] { tokenize_text(request, *tokenizer); }), "enough");
  ASSERT_TRUE(fs::exists(path("out.partial/state.json")));
  request.progress = {};
  text[0] = 'W';
  change_secretly(path("a.txt"), text);
  EXPECT_THAT(error_of([&] { tokenize_text(request, *tokenizer); }),
              HasSubstr("a file has changed"));
  request.other = OtherTokens::kReplace;
  EXPECT_EQ(tokenize_text(request, *tokenizer).resumed_at, 0);
  EXPECT_EQ(tokenizer->decode(read_ids(TokenFile(request.prefix, 257))), text);
}

/// A state with numbers that cannot be, as damage or malice leaves, is started over.
TEST_F(TextChangeTest, ImpossibleNumbersOfAStateAreStartedOver) {
  const auto tokenizer = make_byte_tokenizer();
  write("a.txt", "one two three");
  const TokenizeRequest request = this->request("a.txt");
  tokenize_text(request, *tokenizer);
  const std::string expected = bytes();
  const Json finished = Json::parse(read_text_file(path("out.json")));
  const std::vector<std::pair<const char*, const char*>> fields = {
      {"position", "file"},          {"position", "offset"},        {"position", "line"},
      {"counts", "num_tokens"},      {"counts", "num_sequences"},   {"counts", "num_documents"},
      {"counts", "sequence_tokens"}, {"counts", "document_tokens"}, {"damage", "count"}};
  const std::vector<Json> numbers = {-1, INT64_MAX, UINT64_MAX, 1.5, 1e300, int64_t{1} << 50};
  for (const auto& [group, field] : fields) {
    for (const Json& number : numbers) {
      remove_output();
      Json state = {{"made_of", finished["made_of"]}, {"look", finished["look"]}};
      state["state"] = finished["result"];
      state["state"]["finishing"] = false;
      state["state"][group][field] = number;
      write("out.partial/state.json", state.dump());
      write("out.partial/tokens", "x");
      write("out.partial/sequences", "");
      EXPECT_EQ(tokenize_text(request, *tokenizer).resumed_at, 0) << group << field << number;
      EXPECT_EQ(bytes(), expected);
    }
  }
}

}  // namespace
}  // namespace tessera
