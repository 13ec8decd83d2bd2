#include "data/text/tokenize.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "data/data_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

/// An id for each word and for each run of white space, so that only a cut between words is right,
/// and one for the start of a text, so that a continuation must be told.
class WordTokenizer final : public Tokenizer {
 public:
  explicit WordTokenizer(int64_t vocab_size = 1000) : vocab_size_(vocab_size) {}

  std::string name() const override { return "words of " + std::to_string(vocab_size_); }
  int64_t vocab_size() const override { return vocab_size_; }
  int32_t end_of_document() const override { return 0; }
  size_t cut(std::string_view text, size_t limit) const override {
    for (size_t at = limit; at > 0; --at) {
      if (is_border(text, at)) return at;
    }
    for (size_t at = limit; at < text.size(); ++at) {
      if (is_border(text, at)) return at;
    }
    return text.size();
  }
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    ids.push_back(1);
    encode_continuation(text, ids);
  }
  void encode_continuation(std::string_view text, std::vector<int32_t>& ids) const override {
    for (size_t begin = 0; begin < text.size();) {
      size_t end = begin + 1;
      while (end < text.size() && is_space(text[end]) == is_space(text[begin])) ++end;
      const uint64_t hash = hash_text(text.data() + begin, end - begin);
      ids.push_back(2 + static_cast<int32_t>(hash % static_cast<uint64_t>(vocab_size_ - 2)));
      begin = end;
    }
  }
  std::string decode(std::span<const int32_t>) const override { return ""; }

 private:
  static bool is_space(char c) { return c == ' ' || c == '\n'; }
  static bool is_border(std::string_view text, size_t at) {
    return is_space(text[at - 1]) && !is_space(text[at]);
  }
  int64_t vocab_size_;
};

struct Content {
  std::vector<int32_t> ids;
  std::vector<int64_t> offsets;
  std::vector<TokenRange> silent;
  bool operator==(const Content&) const = default;
};

Content content_of(const std::string& prefix, int64_t vocab_size) {
  const TokenFile file(prefix, vocab_size);
  return {read_ids(file),
          {file.document_offsets().begin(), file.document_offsets().end()},
          {file.silent_ranges().begin(), file.silent_ranges().end()}};
}

/// What the documents must become.
Content encode_documents(const std::vector<std::string>& documents, const Tokenizer& tokenizer) {
  Content content;
  content.offsets.push_back(0);
  for (const std::string& document : documents) {
    if (document.find_first_not_of(" \n") == std::string::npos) continue;
    tokenizer.encode(document, content.ids);
    content.ids.push_back(tokenizer.end_of_document());
    content.offsets.push_back(static_cast<int64_t>(content.ids.size()));
  }
  return content;
}

class TokenizeTest : public DataTest {
 protected:
  TokenizeRequest request(const std::string& name) const {
    TokenizeRequest request;
    request.source.paths = {path(name)};
    request.prefix = path("out");
    return request;
  }
  void expect_clean() const {
    EXPECT_FALSE(fs::exists(path("out.partial")));
    EXPECT_TRUE(fs::exists(path("out.json")));
  }
  std::string bytes() const {
    return read_text_file(path("out.bin")) + "|" + read_text_file(path("out.idx"));
  }
  void remove_output() const {
    for (const char* name : {"out.bin", "out.idx", "out.json", "out.partial"})
      remove_path(path(name));
  }

  Random random_{11, 0};
};

std::vector<std::string> random_documents(Random& random, uint64_t longest) {
  std::vector<std::string> documents(1 + random.next_below(30));
  for (std::string& document : documents) {
    const uint64_t kind = random.next_below(6);
    if (kind == 0) document = std::string(random.next_below(longest), ' ') + "\n";
    if (kind == 1) document = std::string(random.next_below(longest), 'x') + "\n";
    if (kind > 1) document = random_text(random, random.next_below(longest)) + "\n";
    std::erase(document, '\r');
  }
  documents.front() = "first word\n";
  return documents;
}

TEST_F(TokenizeTest, TextBecomesTheIdsOfItsDocumentsWhateverTheChunksAndThreads) {
  for (int round = 0; round < 60; ++round) {
    const auto documents = random_documents(random_, round % 2 == 0 ? 30 : 3000);
    std::string text;
    for (const std::string& document : documents) text += document + "<sep>  \n";
    write("f/a.txt", text);
    write("f/b.txt.gz", gzip(text));
    const WordTokenizer tokenizer(round % 3 == 0 ? 70'000 : 1000);
    auto wanted = documents;
    wanted.insert(wanted.end(), documents.begin(), documents.end());
    TokenizeRequest request = this->request("f");
    request.source.separator_line = "<sep>";
    request.num_threads = 1 + static_cast<int>(random_.next_below(4));
    request.chunks = {.chunk_bytes = 1 + random_.next_below(2000),
                      .lookahead_bytes = 1 + random_.next_below(1000)};
    const TokenizeSummary summary = tokenize_text(request, tokenizer);
    const Content expected = encode_documents(wanted, tokenizer);
    ASSERT_EQ(content_of(request.prefix, tokenizer.vocab_size()), expected) << round;
    EXPECT_EQ(summary.num_tokens, static_cast<int64_t>(expected.ids.size()));
    EXPECT_EQ(summary.num_documents, static_cast<int64_t>(expected.offsets.size()) - 1);
    EXPECT_EQ(summary.new_text_bytes, summary.text_bytes);
    expect_clean();
    remove_output();
  }
}

TEST_F(TokenizeTest, BlankLinesSeparateWhereverChunksEnd) {
  const WordTokenizer tokenizer;
  const std::string text = "one two\n\nthree\nfour\n \n\n\nfive\n\n";
  write("a.txt", text);
  const Content expected = encode_documents({"one two\n", "three\nfour\n", "five\n"}, tokenizer);
  for (size_t chunk = 1; chunk < 40; ++chunk) {
    TokenizeRequest request = this->request("a.txt");
    request.source.separator_line = "";
    request.chunks = {.chunk_bytes = chunk, .lookahead_bytes = 5};
    tokenize_text(request, tokenizer);
    EXPECT_EQ(content_of(request.prefix, 1000), expected) << chunk;
    remove_output();
  }
}

TEST_F(TokenizeTest, WithoutSeparatorAFileIsADocument) {
  const WordTokenizer tokenizer;
  for (int round = 0; round < 20; ++round) {
    const std::string text = random_documents(random_, 5000).back() + "end";
    write("f/a.txt", "\xEF\xBB\xBF" + text);
    write("f/b.txt", "");
    write("f/c.txt.zst", zstd(text));
    write("f/d.txt.xz", xz(std::string(5000, '\n')));
    TokenizeRequest request = this->request("f");
    request.chunks = {.chunk_bytes = 1 + random_.next_below(3000), .lookahead_bytes = 50};
    tokenize_text(request, tokenizer);
    EXPECT_EQ(content_of(request.prefix, 1000), encode_documents({text, text}, tokenizer));
    remove_output();
  }
}

std::string json_lines(const std::vector<std::string>& documents) {
  std::string lines;
  for (size_t i = 0; i < documents.size(); ++i) {
    lines += Json{{"id", i}, {"text", documents[i]}, {"meta", {{"text", "no"}}}}.dump() + "\n";
    if (i % 3 == 0) lines += "\n";
  }
  return lines;
}

TEST_F(TokenizeTest, LinesOfJsonBecomeDocuments) {
  for (int round = 0; round < 40; ++round) {
    const auto documents = random_documents(random_, 500);
    std::string lines = json_lines(documents);
    if (round % 2 == 0) lines.pop_back();
    write("a.jsonl", round % 3 == 0 ? "\xEF\xBB\xBF" + lines : lines);
    const WordTokenizer tokenizer;
    TokenizeRequest request = this->request("a.jsonl");
    request.num_threads = 1 + static_cast<int>(random_.next_below(4));
    request.chunks.chunk_bytes = 1 + random_.next_below(2000);
    const TokenizeSummary summary = tokenize_text(request, tokenizer);
    const Content expected = encode_documents(documents, tokenizer);
    ASSERT_EQ(content_of(request.prefix, 1000), expected) << round;
    EXPECT_EQ(summary.blank_documents + summary.num_documents,
              static_cast<int64_t>(documents.size()));
    remove_output();
  }
}

TEST_F(TokenizeTest, LinesThatCannotBeUsedAreRefusedWithTheirPlaceOrSkipped) {
  const WordTokenizer tokenizer;
  const std::string good = json_lines({"one", "two", "three"});
  write("a.jsonl.gz", gzip(good + "{\"text\": 1}\n" + good + "no json\n{\"text\": \"four\"}\n"));
  for (const size_t chunk : {1, 100, 100'000}) {
    TokenizeRequest request = this->request("a.jsonl.gz");
    request.chunks.chunk_bytes = chunk;
    EXPECT_THAT(error_of([&] { tokenize_text(request, tokenizer); }),
                HasSubstr("a.jsonl.gz: line 5: 'text' is a number"));
    EXPECT_FALSE(fs::exists(path("out.partial")));
    request.source.skip_invalid = true;
    const TokenizeSummary summary = tokenize_text(request, tokenizer);
    EXPECT_EQ(summary.skipped_lines, 2);
    EXPECT_THAT(summary.first_skipped, HasSubstr("line 5"));
    EXPECT_EQ(content_of(request.prefix, 1000),
              encode_documents({"one", "two", "three", "one", "two", "three", "four"}, tokenizer));
    remove_output();
  }
}

TEST_F(TokenizeTest, LinesTooLongToBeHeldAreRefusedOrSkipped) {
  const WordTokenizer tokenizer;
  const std::string large = json_lines({std::string(5000, 'x')});
  for (const bool last : {false, true}) {
    write("a.jsonl", json_lines({"one"}) + (last ? large : large + json_lines({"two"})));
    TokenizeRequest request = this->request("a.jsonl");
    request.chunks = {.chunk_bytes = 200, .lookahead_bytes = 0, .max_line_bytes = 4000};
    EXPECT_THAT(error_of([&] { tokenize_text(request, tokenizer); }),
                HasSubstr("a.jsonl: line 3: too long"));
    request.source.skip_invalid = true;
    EXPECT_EQ(tokenize_text(request, tokenizer).skipped_lines, 1);
    EXPECT_EQ(content_of(request.prefix, 1000),
              encode_documents(
                  last ? std::vector<std::string>{"one"} : std::vector<std::string>{"one", "two"},
                  tokenizer));
    remove_output();
    request.chunks.max_line_bytes = 8000;
    request.source.skip_invalid = false;
    EXPECT_EQ(tokenize_text(request, tokenizer).num_documents, last ? 2 : 3);
    remove_output();
  }
}

TEST_F(TokenizeTest, InstructionsSayWhichTokensCarryLoss) {
  const auto tokenizer = make_byte_tokenizer();
  write("a.jsonl",
        "{\"prompt\": \"ab\", \"completion\": \"c\"}\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", "
        "\"content\": \"v\"}]}\n"
        "{\"prompt\": \"\", \"completion\": \"de\"}\n");
  TokenizeRequest request = this->request("a.jsonl");
  request.source.instructions = true;
  for (const size_t chunk : {1, 60, 10'000}) {
    request.chunks.chunk_bytes = chunk;
    const TokenizeSummary summary = tokenize_text(request, *tokenizer);
    const Content content = content_of(request.prefix, 257);
    const std::string prompt = "<|user|>\nu\n<|assistant|>\n";
    EXPECT_EQ(tokenizer->decode(content.ids).size() + 3, content.ids.size());
    const auto second = static_cast<int64_t>(4 + prompt.size());
    EXPECT_THAT(content.offsets, ElementsAre(0, 4, second + 2, second + 5));
    EXPECT_THAT(content.silent, ElementsAre(TokenRange{0, 2}, TokenRange{4, second}));
    EXPECT_EQ(summary.silent_tokens, second - 2);
    remove_output();
  }
}

/// Copies the partial folder at some of the moments at which its state is saved: what a process
/// killed then leaves.
TEST_F(TokenizeTest, GoesOnFromEveryStateToTheSameBytes) {
  for (const bool instructions : {false, true}) {
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      lines += Json{{"prompt", random_text(random_, random_.next_below(100))},
                    {"completion", "c" + random_text(random_, random_.next_below(100))},
                    {"text", random_text(random_, random_.next_below(200))}}
                   .dump() +
               "\n";
    }
    fs::remove_all(path("f"));
    write("f/b.jsonl.gz", gzip(lines));
    if (!instructions)
      write("f/a.txt", random_text(random_, 3000) + "\n\n\n" + std::string(3000, '\n'));
    if (!instructions) write("f/c.txt.xz", xz(random_text(random_, 3000)));
    const WordTokenizer tokenizer;
    TokenizeRequest request = this->request("f");
    request.source.instructions = instructions;
    request.source.separator_line = "";
    request.chunks = {.chunk_bytes = 300, .lookahead_bytes = 10};
    request.sync_seconds = 0;
    request.num_threads = 2;
    int num_states = 0;
    request.progress = [&](const TokenizeProgress&) {
      fs::copy(path("out.partial"), path("state" + std::to_string(num_states++)),
               fs::copy_options::recursive);
    };
    tokenize_text(request, tokenizer);
    const std::string expected = bytes();
    ASSERT_GT(num_states, 15);
    request.progress = {};
    request.sync_seconds = 5;
    for (int state = 0; state < num_states; state += 1 + num_states / 12) {
      remove_output();
      fs::rename(path("state" + std::to_string(state)), path("out.partial"));
      // Whatever was written behind the state must not matter.
      std::ofstream(path("out.partial/tokens"), std::ios::app) << "more";
      std::ofstream(path("out.partial/sequences"), std::ios::app) << "more";
      const TokenizeSummary summary = tokenize_text(request, tokenizer);
      EXPECT_TRUE(bytes() == expected) << state;
      EXPECT_TRUE(state == 0 || summary.resumed_at > 0);
      EXPECT_LE(summary.new_text_bytes, summary.text_bytes);
      expect_clean();
    }
    remove_output();
    for (int state = 0; state < num_states; ++state) {
      fs::remove_all(path("state" + std::to_string(state)));
    }
  }
}

TEST_F(TokenizeTest, GoesOnAfterAPauseThatEndedIt) {
  write("a.txt", random_text(random_, 5000));
  const WordTokenizer tokenizer;
  TokenizeRequest request = this->request("a.txt");
  request.chunks = {.chunk_bytes = 100, .lookahead_bytes = 10};
  tokenize_text(request, tokenizer);
  const std::string expected = bytes();
  remove_output();
  request.sync_seconds = 0;
  request.num_threads = 2;
  int pauses = 0;
  request.pause = [&] {
    if (++pauses == 30) throw std::runtime_error("enough");
  };
  EXPECT_THROW(tokenize_text(request, tokenizer), std::runtime_error);
  EXPECT_FALSE(fs::exists(path("out.idx")));
  request.pause = {};
  tokenize_text(request, tokenizer);
  EXPECT_TRUE(bytes() == expected);
  expect_clean();
}

/// A kill between the renames at the end.
TEST_F(TokenizeTest, FinishesNamingTheFiles) {
  const WordTokenizer tokenizer;
  write("a.txt", "one two three");
  const TokenizeRequest request = this->request("a.txt");
  tokenize_text(request, tokenizer);
  const std::string expected = bytes();
  const std::string bin = read_text_file(path("out.bin"));
  const std::string idx = read_text_file(path("out.idx"));
  Json state = Json::parse(read_text_file(path("out.json")));
  state["state"] = state["result"];
  for (const int renamed : {0, 1, 2, 3}) {
    remove_output();
    write("out.partial/state.json", state.dump());
    write("out.partial/sequences", "");
    write(renamed > 0 ? "out.bin" : "out.partial/tokens", bin);
    write(renamed > 1 ? "out.idx" : "out.partial/index", idx);
    if (renamed == 0) write("out.idx", "old");
    if (renamed == 3) write("out.json", state.dump());
    tokenize_text(request, tokenizer);
    EXPECT_EQ(bytes(), expected) << renamed;
    expect_clean();
  }
}

TEST_F(TokenizeTest, NothingIsDoneTwice) {
  const WordTokenizer tokenizer;
  write("a.txt", "one two three");
  const TokenizeRequest request = this->request("a.txt");
  const TokenizeSummary first = tokenize_text(request, tokenizer);
  EXPECT_FALSE(first.reused);
  const TokenizeSummary second = tokenize_text(request, tokenizer);
  EXPECT_TRUE(second.reused);
  EXPECT_EQ(second.num_tokens, first.num_tokens);
  EXPECT_EQ(second.text_bytes, first.text_bytes);
}

TEST_F(TokenizeTest, OtherTokensAreReplacedOnlyWhenAskedFor) {
  const WordTokenizer tokenizer;
  write("a.txt", "one two three");
  TokenizeRequest request = this->request("a.txt");
  tokenize_text(request, tokenizer);
  const std::string before = bytes();
  request.source.separator_line = "";
  EXPECT_THAT(error_of([&] { tokenize_text(request, tokenizer); }), HasSubstr("--overwrite"));
  EXPECT_THAT(error_of([&] { tokenize_text(request, WordTokenizer(99)); }),
              HasSubstr("out.idx exists"));
  EXPECT_EQ(bytes(), before);
  EXPECT_FALSE(fs::exists(path("out.partial")));
  request.other = OtherTokens::kReplace;
  tokenize_text(request, WordTokenizer(99));
  EXPECT_NE(bytes(), before);
}

TEST_F(TokenizeTest, UnfinishedTokensOfOtherTextAreKept) {
  const WordTokenizer tokenizer;
  write("a.jsonl", json_lines({"one", "two", "three"}) + "no json");
  TokenizeRequest request = this->request("a.jsonl");
  request.sync_seconds = 0;
  request.chunks.chunk_bytes = 20;
  const std::string error = error_of([&] { tokenize_text(request, tokenizer); });
  EXPECT_THAT(error, HasSubstr("line 5: no JSON"));
  ASSERT_TRUE(fs::exists(path("out.partial/state.json")));
  request.source.skip_invalid = true;
  EXPECT_THAT(error_of([&] { tokenize_text(request, tokenizer); }),
              ::testing::AllOf(HasSubstr("out.partial holds unfinished tokens"),
                               HasSubstr("skip_invalid was false and is true")));
  EXPECT_TRUE(fs::exists(path("out.partial/state.json")));
  request.other = OtherTokens::kReplace;
  EXPECT_EQ(tokenize_text(request, tokenizer).resumed_at, 0);
  expect_clean();
}

TEST_F(TokenizeTest, ADamagedStateIsStartedOver) {
  const WordTokenizer tokenizer;
  write("a.txt", "one two three");
  for (const char* state : {"", "{", "[]", "{\"made_of\": {}, \"state\": {\"position\": 3}}"}) {
    write("out.partial/state.json", state);
    write("out.partial/tokens", "x");
    const TokenizeRequest request = this->request("a.txt");
    EXPECT_EQ(tokenize_text(request, tokenizer).resumed_at, 0);
    EXPECT_EQ(content_of(request.prefix, 1000), encode_documents({"one two three"}, tokenizer));
    remove_output();
  }
}

TEST_F(TokenizeTest, RefusesWhatCannotBeTokenized) {
  const WordTokenizer tokenizer;
  const auto refuse = [&](const std::string& name, const std::string& message) {
    EXPECT_THAT(error_of([&] { tokenize_text(request(name), tokenizer); }), HasSubstr(message));
    EXPECT_FALSE(fs::exists(path("out.partial")));
    EXPECT_FALSE(fs::exists(path("out.idx")));
  };
  refuse("none.txt", "does not exist");
  fs::create_symlink("nowhere", path("link.txt"));
  refuse("link.txt", "link.txt does not exist: it is a link to nowhere, which is not there");
  write("blank.txt", " \n \n");
  refuse("blank.txt", "no text but blanks");
  write("blank.jsonl", "{\"text\": \" \"}");
  refuse("blank.jsonl", "no text but blanks");
  write("nul.txt", std::string("ab\0c", 4));
  refuse("nul.txt", "NUL byte at offset 2");
  const std::string text = random_text(random_, 50'000);
  const std::string packed = gzip(text);
  write("cut.txt.gz", packed.substr(0, packed.size() / 2));
  refuse("cut.txt.gz", "cut.txt.gz ends in the middle of its compressed data");
  write("latin.txt.gz", gzip(text.substr(0, 900) + std::string(900, '\xE9')));
  refuse("latin.txt.gz", "latin.txt.gz is no UTF-8 text");
  TokenizeRequest negative = request("cut.txt.gz");
  negative.num_threads = -1;
  EXPECT_THAT(error_of([&] { tokenize_text(negative, tokenizer); }), HasSubstr("threads is -1"));
  TokenizeRequest nameless = request("cut.txt.gz");
  nameless.prefix = path("") + "/";
  EXPECT_THAT(error_of([&] { tokenize_text(nameless, tokenizer); }),
              HasSubstr("is a folder; name the token file in it too"));
}

/// Invalid bytes are judged by the whole file, and characters at chunks' ends are none.
TEST_F(TokenizeTest, CharactersAtTheEndOfAChunkAreWhole) {
  const auto tokenizer = make_byte_tokenizer();
  std::string text;
  while (text.size() < 3000) text += "\xE6\xB0\xB4\xC3\xA9\xF0\x9F\x98\x80";
  write("a.txt", text);
  for (const size_t chunk : {1, 2, 3, 7, 100}) {
    TokenizeRequest request = this->request("a.txt");
    request.chunks = {.chunk_bytes = chunk, .lookahead_bytes = 8};
    EXPECT_EQ(tokenize_text(request, *tokenizer).num_tokens, static_cast<int64_t>(text.size()) + 1);
    remove_output();
  }
}

}  // namespace
}  // namespace tessera
