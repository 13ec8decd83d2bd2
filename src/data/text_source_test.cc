#include "data/text_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "core/error.h"
#include "core/file.h"
#include "data/prepare.h"
#include "data/token_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TextSourceTest : public ::testing::Test {
 protected:
  TextSourceTest() : folder_(fs::path(testing::TempDir()) / unique_name("text_source_test-")) {
    fs::create_directories(folder_);
  }
  ~TextSourceTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    write_file_synced(path(name), text);
    return path(name);
  }

 private:
  fs::path folder_;
};

std::vector<std::string> documents(const TextSource& source) {
  std::vector<std::string> documents;
  for (const TextFile& file : list_text_files(source)) {
    for_each_document(file, source.separator_line,
                      [&](std::string_view text) { documents.emplace_back(text); });
  }
  return documents;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST_F(TextSourceTest, AFileIsOneDocument) {
  EXPECT_THAT(documents({write("a.txt", "\xEF\xBB\xBFone\n\ntwo\n"), {}}),
              ElementsAre("one\n\ntwo\n"));
}

TEST_F(TextSourceTest, SeparatorLinesEndDocuments) {
  const std::string file = write("a.txt", "one\nmore\n\n \t\r\ntwo\r\n\r\n\nthree");
  EXPECT_THAT(documents({file, ""}), ElementsAre("one\nmore\n", "two\r\n", "three"));
  const std::string marked = write("b.txt", "<|end|>\na <|end|>\n<|end|>  \nb\n<|end|>");
  EXPECT_THAT(documents({marked, "<|end|>"}), ElementsAre("a <|end|>\n", "b\n"));
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
  EXPECT_THAT(documents({path("f"), {}}), ElementsAre("a", "z", "b"));
}

TEST_F(TextSourceTest, RefusesBinaryFiles) {
  const std::string nul = write("nul.bin", std::string("abc\0def", 7));
  EXPECT_THAT(error_of([&] {
                documents({nul, {}});
              }),
              HasSubstr("nul.bin is no text: it has a NUL byte at offset 3"));
  const std::string latin = write("latin.txt", std::string(500, 'a') + "\xE9" + "bc");
  EXPECT_THAT(error_of([&] {
                documents({latin, {}});
              }),
              HasSubstr("1 bytes are invalid, the first at offset 500"));
  const std::string damaged = write("damaged.txt", std::string(5000, 'a') + "\xE9" + "bc");
  EXPECT_EQ(documents({damaged, {}}).size(), 1);
}

TEST_F(TextSourceTest, RefusesMissingAndEmptySources) {
  write("corpus.txt", "x");
  EXPECT_THAT(error_of([&] {
                list_text_files({path("corpsu.txt"), {}});
              }),
              HasSubstr("corpsu.txt does not exist; did you mean 'corpus.txt'?"));
  EXPECT_THAT(error_of([&] {
                list_text_files({path("no/corpus.txt"), {}});
              }),
              HasSubstr("nor does the folder"));
  EXPECT_THAT(error_of([] { list_text_files({"", {}}); }), HasSubstr("no text is given"));
  EXPECT_THAT(error_of([&] {
                list_text_files({write("empty.txt", ""), {}});
              }),
              HasSubstr("empty.txt is empty"));
  fs::create_directories(path("folder"));
  EXPECT_THAT(error_of([&] { list_text_files({path("folder"), {}}); }), HasSubstr("no files"));
  EXPECT_THAT(error_of([] {
                list_text_files({"/dev/null", {}});
              }),
              HasSubstr("neither a file nor a folder"));
}

TEST_F(TextSourceTest, TokensArePreparedOnceAndAgainWhenTheTextChanges) {
  const auto tokenizer = make_byte_tokenizer();
  write("f/a.txt", "ab");
  write("f/b.txt", "c");
  TextSource source = {path("f"), {}};
  std::vector<int64_t> done;
  const auto report = [&done](const PrepareProgress& progress) {
    EXPECT_EQ(progress.bytes_total, 3);
    done.push_back(progress.bytes_done);
  };
  const PreparedTokens first = prepare_tokens(source, *tokenizer, path("cache"), report);
  EXPECT_FALSE(first.reused);
  EXPECT_EQ(first.num_tokens, 5);
  EXPECT_EQ(done.back(), 3);
  const TokenFile file(first.prefix, tokenizer->vocab_size());
  std::vector<int32_t> ids(5);
  file.read(0, ids);
  EXPECT_THAT(ids, ElementsAre('a', 'b', 256, 'c', 256));
  EXPECT_THAT(file.document_offsets(), ElementsAre(0, 3, 5));

  const PreparedTokens second = prepare_tokens(source, *tokenizer, path("cache"));
  EXPECT_TRUE(second.reused);
  EXPECT_EQ(second.prefix, first.prefix);
  EXPECT_EQ(second.num_documents, 2);

  write("f/b.txt", "cd");
  EXPECT_FALSE(prepare_tokens(source, *tokenizer, path("cache")).reused);
  EXPECT_TRUE(prepare_tokens(source, *tokenizer, path("cache")).reused);
  fs::last_write_time(path("f/b.txt"), fs::file_time_type::clock::now() - std::chrono::hours(5));
  EXPECT_FALSE(prepare_tokens(source, *tokenizer, path("cache")).reused);
  source.separator_line = "";
  const PreparedTokens cut = prepare_tokens(source, *tokenizer, path("cache"));
  EXPECT_FALSE(cut.reused);
  EXPECT_NE(cut.prefix, first.prefix);
}

TEST_F(TextSourceTest, DamagedOrUnfinishedTokensAreWrittenAnew) {
  const auto tokenizer = make_byte_tokenizer();
  const TextSource source = {write("a.txt", "abc"), {}};
  const auto prepare = [&] { return prepare_tokens(source, *tokenizer, path("cache")); };
  const std::string prefix = prepare().prefix;
  fs::resize_file(token_bin_path(prefix), 2);
  EXPECT_FALSE(prepare().reused);
  fs::remove(token_idx_path(prefix));
  EXPECT_FALSE(prepare().reused);
  write_file_synced(prefix + ".json", "{");
  EXPECT_FALSE(prepare().reused);
  fs::remove(prefix + ".json");
  write_file_synced(prefix + ".bin.tmp-1-2", "left behind by a killed process");
  EXPECT_FALSE(prepare().reused);
  EXPECT_FALSE(fs::exists(prefix + ".bin.tmp-1-2"));
  EXPECT_TRUE(prepare().reused);
}

TEST_F(TextSourceTest, LargeDocumentsAreEncodedInPieces) {
  const auto tokenizer = make_byte_tokenizer();
  std::string text;
  for (int i = 0; text.size() < 2'500'000; ++i) text += std::to_string(i) + "é\n";
  const TextSource source = {write("large.txt", text), {}};
  const PreparedTokens prepared = prepare_tokens(source, *tokenizer, path("cache"));
  const TokenFile file(prepared.prefix, tokenizer->vocab_size());
  std::vector<int32_t> ids(static_cast<size_t>(file.num_tokens()));
  file.read(0, ids);
  EXPECT_EQ(ids.size(), text.size() + 1);
  EXPECT_EQ(tokenizer->decode(ids), text);
}

TEST_F(TextSourceTest, PrepareRefusesBlankTextAndALockedFolder) {
  const auto tokenizer = make_byte_tokenizer();
  const TextSource blank = {write("blank.txt", " \n"), {}};
  EXPECT_THAT(error_of([&] { prepare_tokens(blank, *tokenizer, path("cache")); }),
              HasSubstr("no text but blanks"));
  const TextSource source = {write("a.txt", "abc"), {}};
  const FolderLock lock(path("cache"));
  EXPECT_THAT(error_of([&] { prepare_tokens(source, *tokenizer, path("cache")); }),
              HasSubstr("in use"));
}

}  // namespace
}  // namespace tessera
