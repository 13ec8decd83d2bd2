#include "data/text/json_document.h"

#include "data/data_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Parts as "text" with "-" before those without loss and "$" behind those that end a turn.
std::string show(const std::vector<DocumentPart>& parts) {
  std::string shown;
  for (const DocumentPart& part : parts) {
    shown +=
        fmt::format("[{}{}{}]", part.has_loss ? "" : "-", part.text, part.ends_turn ? "$" : "");
  }
  return shown;
}

std::string parse(std::string_view line, const std::string& key = "text") {
  TextSource source;
  source.json_key = key;
  return show(parse_json_document(line, source));
}
std::string instruct(std::string_view line) {
  TextSource source;
  source.instructions = true;
  return show(parse_json_document(line, source));
}
std::string parse_error(std::string_view line) {
  return error_of([&] { parse(line); });
}
std::string instruct_error(std::string_view line) {
  return error_of([&] { instruct(line); });
}

TEST(JsonDocumentTest, FindsTheTextUnderAKey) {
  EXPECT_EQ(parse(R"({"text": "a\nb\u00e9\ud83d\ude00"})"), "[a\nb\xC3\xA9\xF0\x9F\x98\x80$]");
  EXPECT_EQ(
      parse(
          R"( {"id": 1, "meta": {"text": "no", "list": [null, true, -1.5e3, {}]}, "text": "yes"} )"),
      "[yes$]");
  EXPECT_EQ(parse(R"({"content": "c", "text": 3})", "content"), "[c$]");
  EXPECT_EQ(parse(R"({"text": ""})"), "[$]");
}

TEST(JsonDocumentTest, RefusesLinesWithoutText) {
  EXPECT_THAT(parse_error(R"({"content": "c"})"), HasSubstr("there is no 'text'"));
  EXPECT_THAT(parse_error(R"({"text": 3})"), HasSubstr("'text' is a number; a string is expected"));
  EXPECT_THAT(parse_error(R"({"text": null})"), HasSubstr("'text' is null"));
  EXPECT_THAT(parse_error(R"({"text": ["a"]})"), HasSubstr("'text' is an array"));
  EXPECT_THAT(parse_error(R"({"text": {"text": "a"}})"), HasSubstr("'text' is an object"));
  EXPECT_THAT(parse_error(R"({"text": "a", "text": "b"})"), HasSubstr("twice"));
  for (const char* line : {"[1]", "\"text\"", "3", "null"}) {
    EXPECT_THAT(parse_error(line), HasSubstr("an object is expected")) << line;
  }
  for (const char* line : {"", "{", "{\"text\": \"a\"", "{\"text\": \"a\"} x", "{'text': 'a'}",
                           "{\"text\": \"\xFF\"}", "plain text", "{\"text\": \"a\nb\"}"}) {
    EXPECT_THAT(parse_error(line), HasSubstr("no JSON")) << line;
  }
}

TEST(JsonDocumentTest, LossIsOnTheCompletionAlone) {
  EXPECT_EQ(instruct(R"({"prompt": "2+2=", "completion": "4"})"), "[-2+2=][4$]");
  EXPECT_EQ(instruct(R"({"completion": "4", "id": 7, "prompt": ""})"), "[-][4$]");
}

TEST(JsonDocumentTest, LossIsOnTheAssistantsMessages) {
  EXPECT_EQ(instruct(R"({"messages": [{"role": "system", "content": "Be brief."},
                                      {"role": "user", "content": "Hi"},
                                      {"role": "assistant", "content": "Hello"},
                                      {"role": "user", "content": "Bye"},
                                      {"role": "assistant", "content": "So long"}]})"),
            "[-<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n][Hello$]"
            "[-<|user|>\nBye\n<|assistant|>\n][So long$]");
  EXPECT_EQ(
      instruct(
          R"({"messages": [{"role": "assistant", "content": "A"}, {"role": "tool", "content": "T"}]})"),
      "[-<|assistant|>\n][A$][-<|tool|>\nT\n$]");
}

TEST(JsonDocumentTest, RefusesInstructionsThatTeachNothing) {
  EXPECT_THAT(instruct_error(R"({"text": "a"})"), HasSubstr("neither 'messages' nor 'prompt'"));
  EXPECT_THAT(instruct_error(R"({"prompt": "a"})"), HasSubstr("there is no 'completion'"));
  EXPECT_THAT(instruct_error(R"({"completion": "a"})"), HasSubstr("there is no 'prompt'"));
  EXPECT_THAT(instruct_error(R"({"prompt": "a", "completion": ""})"),
              HasSubstr("the completion is empty"));
  EXPECT_THAT(instruct_error(R"({"prompt": 1, "completion": "a"})"),
              HasSubstr("'prompt' is number"));
  EXPECT_THAT(instruct_error(R"({"messages": []})"), HasSubstr("no list of messages"));
  EXPECT_THAT(instruct_error(R"({"messages": ["a"]})"), HasSubstr("a message is string"));
  EXPECT_THAT(instruct_error(R"({"messages": [{"role": "asistant", "content": "a"}]})"),
              HasSubstr("did you mean 'assistant'?"));
  EXPECT_THAT(instruct_error(R"({"messages": [{"role": "user", "content": "a"}]})"),
              HasSubstr("no message is the assistant's"));
  EXPECT_THAT(instruct_error(R"({"messages": [{"role": "user"}]})"),
              HasSubstr("there is no 'content'"));
  EXPECT_THAT(instruct_error(R"(["a"])"), HasSubstr("an object is expected"));
  EXPECT_THAT(instruct_error("{"), HasSubstr("not valid JSON"));
}

}  // namespace
}  // namespace tessera
