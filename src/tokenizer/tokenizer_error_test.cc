#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file/file.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokenizer_json.h"
#include "tokenizer/train_bpe.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string small_tokenizer() {
  return train_bpe({.vocab_size = 270},
                   [](const auto& use) { use("the cat and the dog and the cat"); });
}

std::string error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

struct Refusal {
  const char* path;   ///< JSON pointer of what is changed
  const char* value;  ///< JSON
  const char* named;  ///< what the message says
};

class RefusedTokenizer : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusedTokenizer, ByName) {
  json file = json::parse(small_tokenizer());
  file[json::json_pointer(GetParam().path)] = json::parse(GetParam().value);
  EXPECT_THAT(error_of([&] { make_bpe_tokenizer(parse_tokenizer_json(file.dump(), "t.json"), 0); }),
              AllOf(HasSubstr("t.json"), HasSubstr(GetParam().named)));
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedTokenizer,
    ::testing::Values(
        Refusal{"/normalizer", R"({"type":"Lowercase"})", "Lowercase"},
        Refusal{"/normalizer", R"({"type":"Replace","pattern":{"Regex":" +"},"content":" "})",
                "Replace"},
        Refusal{"/pre_tokenizer", R"({"type":"BertPreTokenizer"})", "BertPreTokenizer"},
        Refusal{"/pre_tokenizer",
                R"({"type":"Split","pattern":{"Regex":"\\w+"},"behavior":"Isolated"})", "\\w+"},
        Refusal{"/pre_tokenizer",
                R"({"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits"}]})",
                "Digits"},
        Refusal{"/decoder", R"({"type":"WordPiece"})", "WordPiece"},
        Refusal{"/decoder", "null", "decoder"}, Refusal{"/model/type", R"("Unigram")", "Unigram"},
        Refusal{"/model/dropout", "0.1", "dropout"},
        Refusal{"/model/end_of_word_suffix", R"("</w>")", "end_of_word_suffix"},
        Refusal{"/truncation", R"({"max_length":8})", "truncation"},
        Refusal{"/padding", R"({"pad_id":0})", "padding"}, Refusal{"/extra", "1", "extra"},
        Refusal{"/model/merges/0", R"(["zz","q"])", "zz"},
        Refusal{"/model/merges/0", R"("a b c")", "a b c"}, Refusal{"/model/vocab/new", "3", "id 3"},
        Refusal{"/model/vocab/new", "99999999", "99999999"},
        Refusal{"/model/vocab/new", "-1", "id"},
        Refusal{"/added_tokens/0/id", "7", "<|endoftext|>"},
        Refusal{"/added_tokens/0/content", R"("")", "no text"},
        Refusal{"/added_tokens/0/special", "2", "special"}));

TEST(TokenizerErrorTest, DamagedFiles) {
  EXPECT_THROW(parse_tokenizer_json("{", "t"), UserError);
  EXPECT_THROW(parse_tokenizer_json("[]", "t"), UserError);
  EXPECT_THROW(parse_tokenizer_json(R"({"model":{},"model":{}})", "t"), UserError);
  EXPECT_THROW(parse_tokenizer_json(std::string(100000, '['), "t"), UserError);
}

class TokenizerFiles : public ::testing::Test {
 protected:
  TokenizerFiles() : folder_(fs::path(testing::TempDir()) / unique_name("tokenizer_error_test-")) {
    fs::create_directories(folder_);
  }
  ~TokenizerFiles() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    write_file_synced(folder_ / name, text);
    return (folder_ / name).string();
  }
  int32_t end_of_document(const std::string& choice) const {
    return make_tokenizer({.path = folder_.string(), .end_of_document = choice})->end_of_document();
  }

  fs::path folder_;
};

TEST_F(TokenizerFiles, EndOfDocumentIsChosenOrFound) {
  json file = json::parse(small_tokenizer());
  write("tokenizer.json", file.dump());
  EXPECT_EQ(end_of_document(""), 0);
  EXPECT_EQ(end_of_document("17"), 17);
  EXPECT_EQ(end_of_document("<|endoftext|>"), 0);
  EXPECT_THAT(error_of([&] { end_of_document("<eos>"); }), HasSubstr("<eos>"));
  EXPECT_THAT(error_of([&] { end_of_document("270"); }), HasSubstr("270"));
  write("tokenizer_config.json", R"({"eos_token": {"content": "t"}})");
  EXPECT_EQ(end_of_document(""), file["model"]["vocab"]["t"].get<int32_t>());
  write("tokenizer_config.json", R"({"eos_token": "</s>"})");
  EXPECT_THAT(error_of([&] { end_of_document(""); }), HasSubstr("</s>"));
}

TEST_F(TokenizerFiles, WithoutAnEndOfDocument) {
  json file = json::parse(small_tokenizer());
  file["added_tokens"] = json::array();
  file["model"]["vocab"].erase("<|endoftext|>");
  write("tokenizer.json", file.dump());
  EXPECT_THAT(error_of([&] { end_of_document(""); }), HasSubstr("data.end_of_document"));
}

TEST_F(TokenizerFiles, MissingOnes) {
  EXPECT_THAT(error_of([&] { end_of_document(""); }), HasSubstr("neither tokenizer.json"));
  EXPECT_THROW(make_tokenizer({.path = (folder_ / "none").string(), .end_of_document = ""}),
               UserError);
  EXPECT_THROW(make_tokenizer({.path = "byte", .end_of_document = "<eos>"}), UserError);
  const std::string model = write("x.model", "no model at all");
  EXPECT_THAT(error_of([&] { make_tokenizer({.path = model, .end_of_document = ""}); }),
              HasSubstr("SentencePiece"));
}

}  // namespace
}  // namespace tessera
