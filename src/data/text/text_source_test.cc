#include "data/text/text_source.h"

#include <chrono>

#include "data/data_testing.h"
#include "data/text/prepare.h"
#include "data/token_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TextSourceTest : public DataTest {};

TextSource source_of(const std::string& path, std::optional<std::string> separator = {}) {
  return {.paths = {path}, .separator_line = std::move(separator)};
}

std::vector<std::string> documents(const TextSource& source) {
  std::vector<std::string> documents;
  for_each_document(source, [&, open = false](std::string_view text, bool ends) mutable {
    if (!open) documents.emplace_back();
    documents.back() += text;
    open = !ends;
  });
  return documents;
}

TEST_F(TextSourceTest, AFileIsOneDocument) {
  EXPECT_THAT(documents(source_of(write("a.txt", "\xEF\xBB\xBFone\n\ntwo\n"))),
              ElementsAre("one\n\ntwo\n"));
}

TEST_F(TextSourceTest, SeparatorLinesEndDocuments) {
  const std::string file = write("a.txt", "one\nmore\n\n \t\r\ntwo\r\n\r\n\nthree");
  EXPECT_THAT(documents(source_of(file, "")), ElementsAre("one\nmore\n", "two\r\n", "three"));
  const std::string marked = write("b.txt", "<|end|>\na <|end|>\n<|end|>  \nb\n<|end|>");
  EXPECT_THAT(documents(source_of(marked, "<|end|>")), ElementsAre("a <|end|>\n", "b\n"));
}

TEST_F(TextSourceTest, AFolderIsReadInOrderWithoutHiddenFiles) {
  write("f/b.txt", "b");
  write("f/a/z.md", "z");
  write("f/a.txt", "a");
  write("f/empty.txt", "");
  write("f/blank.txt", " \n\t\n");
  write("f/.hidden", "no");
  write("f/.git/config", "no");
  fs::create_symlink("nowhere", path("f/broken"));
  EXPECT_THAT(documents(source_of(path("f"))), ElementsAre("a", "z", "b"));
}

TEST_F(TextSourceTest, SeveralPathsAreReadInTheirOrder) {
  TextSource source = source_of(write("b.txt", "b"));
  source.paths.push_back(write("f/a.txt", "a"));
  source.paths.push_back(
      write("c.jsonl", "{\"text\": \"c\"}\n\n{\"id\": [1, {}], \"text\": \"d\"}"));
  EXPECT_THAT(documents(source), ElementsAre("b", "a", "c", "d"));
  EXPECT_EQ(source.name(),
            fmt::format("{}, {}, {}", path("b.txt"), path("f/a.txt"), path("c.jsonl")));
}

TEST_F(TextSourceTest, FormatsFollowNamesUnlessTheyAreSaid) {
  const std::string line = "{\"text\": \"a\"}";
  write("f/a.jsonl", line);
  write("f/a.ndjson.gz", gzip(line));
  write("f/a.txt", line);
  EXPECT_THAT(documents(source_of(path("f"))), ElementsAre("a", "a", line));
  write("g/A.JSONL", line);
  write("g/B.Jsonl.GZ", gzip(line));
  EXPECT_THAT(documents(source_of(path("g"))), ElementsAre("a", "a"));
  TextSource source = source_of(path("f"));
  source.format = TextFormat::kText;
  EXPECT_THAT(documents(source), ElementsAre(line, line, line));
  source.format = TextFormat::kJsonl;
  EXPECT_THAT(documents(source), ElementsAre("a", "a", "a"));

  source = source_of(write("a.json.gz", gzip(line)));
  EXPECT_THAT(error_of([&] { documents(source); }), HasSubstr("say which by the format"));
  source.format = TextFormat::kJsonl;
  EXPECT_THAT(documents(source), ElementsAre("a"));
  source = source_of(path("f"));
  source.instructions = true;
  EXPECT_THAT(error_of([&] { documents(source); }),
              HasSubstr("a.txt: instructions are lines of JSON"));
}

TEST_F(TextSourceTest, LongDocumentsComeInPieces) {
  std::string text;
  for (int i = 0; text.size() < 3'000'000; ++i) text += std::to_string(i) + "\n";
  write("large.txt", text + "--\n" + std::string(2'500'000, '\n') + "--\nlast");
  int pieces = 0;
  std::vector<std::string> whole;
  for_each_document(source_of(path("large.txt"), "--"),
                    [&, open = false](std::string_view piece, bool ends) mutable {
                      if (!open) whole.emplace_back();
                      whole.back() += piece;
                      open = !ends;
                      ++pieces;
                      EXPECT_LT(piece.size(), 1'200'000);
                    });
  ASSERT_EQ(whole.size(), 2);
  EXPECT_TRUE(whole[0] == text);
  EXPECT_EQ(whole[1], "last");
  EXPECT_GE(pieces, 4);
}

/// What a run writes among the files of its text would be text of the next one.
TEST_F(TextSourceTest, RefusesOutputAmongItsFiles) {
  write("f/a.txt", "a");
  write("f/.hidden/b.txt", "b");
  const TextSource folder = source_of(path("f"));
  for (const char* within : {"f", "f/run", "f/deep/run", "f/../f/run", "f/."}) {
    EXPECT_THAT(error_of([&] { refuse_output_within(folder, path(within), "run.folder"); }),
                HasSubstr("run.folder " + path(within) + " is in the folder " + path("f")));
  }
  fs::create_directory_symlink(path("f"), path("link"));
  EXPECT_THAT(error_of([&] { refuse_output_within(folder, path("link/run"), "--output"); }),
              HasSubstr("--output"));
  for (const char* outside : {"run", "f-run", "f/.hidden/run", "f/.run", "."})
    refuse_output_within(folder, path(outside), "run.folder");
  refuse_output_within(source_of(path("f/a.txt")), path("f"), "run.folder");
  EXPECT_THAT(error_of([&] { refuse_output_within(source_of("."), "not-there", "--output"); }),
              HasSubstr("--output not-there is in the folder ."));
}

TEST_F(TextSourceTest, RefusesBinaryFiles) {
  const std::string nul = write("nul.bin", std::string("abc\0def", 7));
  EXPECT_THAT(error_of([&] { documents(source_of(nul)); }),
              HasSubstr("nul.bin is no text: it has a NUL byte at offset 3"));
  const std::string parquet = write("a.parquet", std::string("PAR1\x15\0\x15", 7));
  EXPECT_THAT(error_of([&] { documents(source_of(parquet)); }),
              HasSubstr("a.parquet is no text but Parquet; read_parquet of the Python module"));
  const std::string latin = write("latin.txt", std::string(500, 'a') + "\xE9" + "bc");
  EXPECT_THAT(error_of([&] { documents(source_of(latin)); }),
              HasSubstr("1 bytes are invalid, the first at offset 500"));
  const std::string damaged = write("damaged.txt", std::string(5000, 'a') + "\xE9" + "bc");
  EXPECT_EQ(documents(source_of(damaged)).size(), 1);
}

TEST_F(TextSourceTest, RefusesMissingAndEmptySources) {
  write("corpus.txt", "x");
  EXPECT_THAT(error_of([&] { list_text_files(source_of(path("corpsu.txt"))); }),
              HasSubstr("corpsu.txt does not exist; did you mean 'corpus.txt'?"));
  EXPECT_THAT(error_of([&] { list_text_files(source_of(path("no/corpus.txt"))); }),
              HasSubstr("nor does the folder"));
  EXPECT_THAT(error_of([] { list_text_files(source_of("")); }), HasSubstr("no text is given"));
  EXPECT_THAT(error_of([&] { list_text_files(source_of(write("empty.txt", ""))); }),
              HasSubstr("empty.txt is empty"));
  fs::create_directories(path("folder"));
  EXPECT_THAT(error_of([&] { list_text_files(source_of(path("folder"))); }), HasSubstr("no files"));
  EXPECT_THAT(error_of([] { list_text_files(source_of("/dev/null")); }),
              HasSubstr("neither a file nor a folder"));
}

TEST_F(TextSourceTest, TokensArePreparedOnceAndAgainWhenTheTextChanges) {
  const auto tokenizer = make_byte_tokenizer();
  write("f/a.txt", "ab");
  write("f/b.txt", "c");
  TextSource source = source_of(path("f"));
  std::vector<int64_t> done;
  const auto report = [&done](const PrepareProgress& progress) {
    EXPECT_EQ(progress.bytes_total, 3);
    done.push_back(progress.bytes_done);
  };
  const TokenizeSummary first = prepare_tokens(source, *tokenizer, path("cache"), report);
  EXPECT_FALSE(first.reused);
  EXPECT_EQ(first.num_tokens, 5);
  EXPECT_EQ(done.back(), 3);
  const TokenFile file(first.prefix, tokenizer->vocab_size());
  std::vector<int32_t> ids(5);
  file.read(0, ids);
  EXPECT_THAT(ids, ElementsAre('a', 'b', 256, 'c', 256));
  EXPECT_THAT(file.document_offsets(), ElementsAre(0, 3, 5));

  const TokenizeSummary second = prepare_tokens(source, *tokenizer, path("cache"));
  EXPECT_TRUE(second.reused);
  EXPECT_EQ(second.prefix, first.prefix);
  EXPECT_EQ(second.num_documents, 2);

  write("f/b.txt", "cd");
  EXPECT_FALSE(prepare_tokens(source, *tokenizer, path("cache")).reused);
  EXPECT_TRUE(prepare_tokens(source, *tokenizer, path("cache")).reused);
  fs::last_write_time(path("f/b.txt"), fs::file_time_type::clock::now() - std::chrono::hours(5));
  EXPECT_TRUE(prepare_tokens(source, *tokenizer, path("cache")).reused) << "the same text";
  source.separator_line = "";
  const TokenizeSummary cut = prepare_tokens(source, *tokenizer, path("cache"));
  EXPECT_FALSE(cut.reused);
  EXPECT_NE(cut.prefix, first.prefix);
}

TEST_F(TextSourceTest, TextOfTheLongestNameIsPrepared) {
  const auto tokenizer = make_byte_tokenizer();
  const std::string name(250, 'n');
  const auto prepare = [&](const std::string& end) {
    return prepare_tokens(source_of(write(name + end, "abc")), *tokenizer, path("cache"));
  };
  const TokenizeSummary first = prepare(".txt");
  EXPECT_EQ(first.num_tokens, 4);
  EXPECT_TRUE(prepare(".txt").reused);
  EXPECT_NE(prepare(".md").prefix, first.prefix);
}

TEST_F(TextSourceTest, DamagedOrUnfinishedTokensAreWrittenAnew) {
  const auto tokenizer = make_byte_tokenizer();
  const TextSource source = source_of(write("a.txt", "abc"));
  const auto prepare = [&] { return prepare_tokens(source, *tokenizer, path("cache")); };
  const std::string prefix = prepare().prefix;
  fs::resize_file(token_bin_path(prefix), 2);
  EXPECT_FALSE(prepare().reused);
  fs::remove(token_idx_path(prefix));
  EXPECT_FALSE(prepare().reused);
  write_file_synced(prefix + ".json", "{");
  EXPECT_FALSE(prepare().reused);
  fs::remove(prefix + ".json");
  write("cache/" + fs::path(prefix).filename().string() + ".partial/tokens", "of a killed process");
  EXPECT_FALSE(prepare().reused);
  EXPECT_FALSE(fs::exists(prefix + ".partial"));
  EXPECT_TRUE(prepare().reused);
}

TEST_F(TextSourceTest, LargeDocumentsAreEncodedInPieces) {
  const auto tokenizer = make_byte_tokenizer();
  std::string text;
  for (int i = 0; text.size() < 2'500'000; ++i) text += std::to_string(i) + "é\n";
  const TextSource source = source_of(write("large.txt", text));
  const TokenizeSummary prepared = prepare_tokens(source, *tokenizer, path("cache"));
  const TokenFile file(prepared.prefix, tokenizer->vocab_size());
  std::vector<int32_t> ids(file.num_tokens());
  file.read(0, ids);
  EXPECT_EQ(ids.size(), text.size() + 1);
  EXPECT_EQ(tokenizer->decode(ids), text);
}

TEST_F(TextSourceTest, PrepareRefusesBlankTextAndALockedFolder) {
  const auto tokenizer = make_byte_tokenizer();
  const TextSource blank = source_of(write("blank.txt", " \n"));
  EXPECT_THAT(error_of([&] { prepare_tokens(blank, *tokenizer, path("cache")); }),
              HasSubstr("no text but blanks"));
  const TextSource source = source_of(write("a.txt", "abc"));
  const std::string prefix = prepare_tokens(source, *tokenizer, path("cache")).prefix;
  write("a.txt", "abcd");
  const PartialFolder other(prefix);
  EXPECT_THAT(error_of([&] { prepare_tokens(source, *tokenizer, path("cache")); }),
              HasSubstr("in use"));
}

}  // namespace
}  // namespace tessera
